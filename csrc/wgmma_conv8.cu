// 3x3 convolution of NHWC images in 8 bits, padding 1, for Hopper: an implicit GEMM as in conv2d.cu, of the operands of
// mma_conv8.cu, with 128 of K in a stage.
//
// A code of the image stands for its distance from the image's zero. TMA fills what is out of bounds with zeros, whose
// products are nothing. So the zero times the sum of the weight's codes is taken off, of those taps alone that are inside
// the image: there are nine cases, the middle and its borders. Sums are in int32, which is exact.
//
// Channels are a multiple of 64. If half of the last stage of a tap lies behind them, its products are left out.
//
// Compile-time parameters: WIDTH; PINGPONG; STAGES; PAIR; SPLIT: as in conv2d.cu; TAIL, whether channels are no multiple
// of 128; BF16.

#define KIND 0
#include "hopper.h"

// A tile's pixels, as in conv2d.cu.
struct Boxes {
  int across, down, wide, high, width, height, images;
};

constexpr int kTaps = 9, kBlockK = 128, kBlockM = 128;
constexpr int kThreads = 3 * 128;
constexpr int kHalves = PINGPONG ? 2 : 1;  // 64-row mma tiles of a warpgroup
constexpr int kCluster = PAIR * SPLIT;
constexpr int kInputBytes = kBlockM * 128, kWeightBytes = WIDTH * 128, kStageBytes = kInputBytes + kWeightBytes;
constexpr int kSums = WIDTH / 2;  // accumulators of a thread for 64 pixels
constexpr int kMiddle = 4;        // of the nine cases: 3 y + x, each 0 at the first, 2 at the last, else 1
#if SPLIT > 1
constexpr int kPitch = WIDTH + 8;  // integers between rows of partial sums
#else
// The bits of this number are an integer that grows with what is added to it, an integer up to 2^22.
constexpr float kInteger = 12582912.f;
constexpr u32 kIntegerBits = 0x4b400000u;
constexpr int kChunk = 32, kPitch = 2 * kChunk + 16;  // columns a warp writes at a time; bytes between rows
constexpr int kLanes = kChunk / 8, kEach = 32 / kLanes, kLoads = 16 / kEach;  // lanes per row, rows per warp access
constexpr int kMoves = WIDTH / kChunk * kHalves + (WIDTH % kChunk ? kHalves : 0);
constexpr int kAhead = PINGPONG ? 2 : 3;  // residual loads in flight
// Of each consumer warpgroup, of a tile's columns: the scales, the sums of nine cases, the bias; bytes.
constexpr int kCases = 4 * WIDTH, kBiases = 10 * 4 * WIDTH, kVectors = kBiases + 2 * WIDTH;
#endif

// The row of column_scales with the sums of a case: that of the middle stands first.
__device__ __forceinline__ int row_of(int which) { return which == kMiddle ? 1 : 2 + which - (which > kMiddle); }

// What a tile's row is: its pixel's index in the result, -1 if it is out of bounds; its image; its case.
struct Pixel {
  int index, image, which;
};

// x_map: tensor map over (images, height, width, channels), boxes of a tile's pixels by 128 channels. weight_map: over
// (columns, 9 channels), boxes of WIDTH / PAIR by 128. out, residual: (images, height, width, columns), the residual or
// null. scales: of each image, then the zeros. column_scales: (10, columns), scales, then sums of codes. bias: (columns)
// or null. height and width are 2 at least. tiles_down: M tiles / PAIR; tiles_across: N tiles.
extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    wgmma_conv8(unsigned short* out, const __grid_constant__ TensorMap x_map,
                const __grid_constant__ TensorMap weight_map, const float* scales, const float* column_scales,
                const unsigned short* bias, const unsigned short* residual, int channels, int columns, int tiles_down,
                int tiles_across, const __grid_constant__ Boxes boxes) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES + 4];
  const u32 base = (smem_address(shared) + 1023) & ~1023u;
  const u32 full = smem_address(barriers), empty = full + 8 * STAGES, order = empty + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  u32 rank = 0;
  if (kCluster > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));

  if (threadIdx.x == 0) {
    mbarrier_init_ring(full, empty, STAGES, (PINGPONG ? 4 : 8) * PAIR);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(order + 8 * i, 4);
      mbarrier_init(order + 16 + 8 * i, 1);
    }
    fence_barrier_init();
    pdl_launch_dependents();
  }
  if (kCluster > 1)
    cluster_sync_relaxed();
  else
    __syncthreads();

  const int chunks = (channels + kBlockK - 1) / kBlockK, all_steps = kTaps * chunks, tiles = tiles_down * tiles_across;
  const int first_step = SPLIT > 1 ? all_steps * rank / SPLIT : 0;
  const int last_step = SPLIT > 1 ? all_steps * (rank + 1) / SPLIT : all_steps;
  // consecutive tiles share their pixels
  auto down = [&](int tile) { return tile / tiles_across * PAIR + (PAIR > 1 ? int(rank) : 0); };

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 8) {
      const u32 elected = elect_one();
      u32 stage = 0, parity = 1;
      const int part = PAIR > 1 ? rank * (WIDTH / PAIR) : 0;
      int tap = first_step / chunks, chunk = first_step % chunks;
      auto next = [&] {
        if (++chunk == chunks) {
          chunk = 0;
          ++tap;
        }
      };
      for (int step = first_step; step < min(last_step, first_step + STAGES); ++step, next())
        tma_prefetch(elected, &weight_map, tap * channels + chunk * kBlockK,
                     int(blockIdx.x / kCluster) % tiles_across * WIDTH + part);
      pdl_wait();  // the weight too is written in a plan
      for (int tile = blockIdx.x / kCluster; tile < tiles; tile += gridDim.x / kCluster) {
        const int box = down(tile), column = tile % tiles_across * WIDTH + part;
        const int x = box % boxes.wide << boxes.across, y = box / boxes.wide % boxes.high << boxes.down;
        const int image = box / (boxes.wide * boxes.high) * (kBlockM >> (boxes.across + boxes.down));
        tap = first_step / chunks, chunk = first_step % chunks;
        for (int step = first_step; step < last_step; ++step, next()) {
          const u32 barrier = full + 8 * stage, to = base + stage * kStageBytes;
          mbarrier_wait(empty + 8 * stage, parity);
          mbarrier_arrive_expect_tx(elected, barrier, kStageBytes);
          const int from = tap * channels + chunk * kBlockK;
          if (PAIR > 1)
            tma_load_multicast(elected, to + kInputBytes + part * 128, &weight_map, barrier, from, column);
          else
            tma_load(elected, to + kInputBytes, &weight_map, barrier, from, column);
          tma_load(elected, to, &x_map, barrier, chunk * kBlockK, x + tap % 3 - 1, y + tap / 3 - 1, image);
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
    }
#if SPLIT > 1
    cluster_sync();
#endif
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    pdl_wait();
    const int warpgroup = __shfl_sync(~0u, warp >> 2, 0);
    const u32 target = PAIR > 1 ? lane : rank;
#if SPLIT == 1
    const u32 own = base + STAGES * kStageBytes + warp * 16 * kPitch;
    const u32 vectors = base + STAGES * kStageBytes + 8 * 16 * kPitch + warpgroup * kVectors;
    const u32 ready = order + 16 + 8 * warpgroup;  // the vectors of a tile are in shared memory
    u32 ready_parity = 0;
    auto warpgroup_sync = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory"); };
    if (bias == nullptr)
      for (int i = threadIdx.x & 127; i < WIDTH / 2; i += 128)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(vectors + kBiases + 4 * i), "r"(0) : "memory");
#endif
    int sum[kHalves][kSums];
    u32 used = 0, previous = 0;  // stages so far
    int turn = 0, done = 0;      // whose tile it is; tiles this warpgroup has done
    for (int tile = blockIdx.x / kCluster; tile < tiles; tile += gridDim.x / kCluster, turn ^= 1) {
      u32 stage = used % STAGES, parity = used / STAGES & 1;
      used += last_step - first_step;
      if (PINGPONG && turn != warpgroup) continue;
      const int box = down(tile), column = tile % tiles_across * WIDTH;
#if SPLIT == 1
      warpgroup_sync();  // the vectors of the tile before have been read
      if ((warp & 3) == 0 && lane == 0) {
        const int left = min(columns - column, WIDTH);
        mbarrier_arrive_expect_tx(1, ready, left * (bias == nullptr ? 40 : 42));
        bulk_load(vectors, column_scales + column, 4 * left, ready);
        for (int which = 0; which < 9; ++which)
          bulk_load(vectors + kCases + which * 4 * WIDTH, column_scales + (long long)row_of(which) * columns + column,
                    4 * left, ready);
        if (bias != nullptr) bulk_load(vectors + kBiases, bias + column, 2 * left, ready);
      }
      __syncwarp();
#endif
      // an mbarrier's parity tells two phases apart, no more: only the next in order may wait on it
      if (PINGPONG && (warpgroup > 0 || done > 0)) mbarrier_wait(order + 8 * warpgroup, (done - 1 + warpgroup) & 1);
      ++done;
      int chunk = first_step % chunks;
      for (int step = first_step; step < last_step; ++step) {
        mbarrier_wait(full + 8 * stage, parity);
        fence_operand(sum);
        wgmma_fence();
        auto products = [&](int k) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half)
            wgmma(sum[half],
                  wgmma_descriptor(base + stage * kStageBytes + (PINGPONG ? half : warpgroup) * 64 * 128 + 32 * k),
                  wgmma_descriptor(base + stage * kStageBytes + kInputBytes + 32 * k), step - first_step + k);
        };
        // no branch between products of a step: it costs a warpgroup that multiplies alone a fifth of its time
        if (TAIL && chunk + 1 == chunks) {
          products(0);
          products(1);
        } else {
#pragma unroll
          for (int k = 0; k < kBlockK / 32; ++k) products(k);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (step > first_step && lane < PAIR) mbarrier_arrive(empty + 8 * previous, target);
        previous = stage;
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
        if (++chunk == chunks) chunk = 0;
      }
      if (PINGPONG && lane == 0) mbarrier_arrive(order + 8 * (1 - warpgroup), rank);
      wgmma_wait<0>();
      fence_operand(sum);
      if (lane < PAIR) mbarrier_arrive(empty + 8 * previous, target);

      const int x = box % boxes.wide << boxes.across, y = box / boxes.wide % boxes.high << boxes.down;
      const int image = box / (boxes.wide * boxes.high) * (kBlockM >> (boxes.across + boxes.down));
      auto pixel = [&](int row) {
        const int px = x + (row & ((1 << boxes.across) - 1)), py = y + (row >> boxes.across & ((1 << boxes.down) - 1));
        const int pn = image + (row >> (boxes.across + boxes.down));
        const bool there = px < boxes.width && py < boxes.height && pn < boxes.images;
        const int which = (py == 0 ? 0 : py == boxes.height - 1 ? 6 : 3) + (px == 0 ? 0 : px == boxes.width - 1 ? 2 : 1);
        return Pixel{there ? (pn * boxes.height + py) * boxes.width + px : -1, min(pn, boxes.images - 1), which};
      };
#if SPLIT > 1
      // each block writes its partial sums over its stages, then reduces a share of the rows of all blocks
      asm volatile("bar.sync 1, %0;" ::"n"(2 * 128) : "memory");
      int* own = (int*)(shared + (base - smem_address(shared)));
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int i = 0; i < kSums; i += 2) {
          const int row = warpgroup * 64 + (warp & 3) * 16 + (lane >> 2) + 8 * (i >> 1 & 1);
          *(int2*)(own + row * kPitch + 8 * (i >> 2) + 2 * (lane & 3)) = make_int2(sum[half][i], sum[half][i + 1]);
        }
      cluster_sync();
      constexpr int kAcross = WIDTH / 8, kShare = kBlockM / SPLIT, kTimes = (kShare * kAcross + 255) / 256;
      int part[kTimes][SPLIT][8];  // all loads in flight before the first use: DSMEM latency is high
#pragma unroll
      for (int time = 0; time < kTimes; ++time) {
        const int i = min(time * 256 + int(threadIdx.x), kShare * kAcross - 1);
        const u32 at = base + 4 * ((rank * kShare + i / kAcross) * kPitch + i % kAcross * 8);
#pragma unroll
        for (int other = 0; other < SPLIT; ++other) {
          u32 there;
          asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(other));
#pragma unroll
          for (int four = 0; four < 8; four += 4) {
            int* v = part[time][other] + four;
            asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                         : "r"(there + 4 * four)
                         : "memory");
          }
        }
      }
#pragma unroll
      for (int time = 0; time < kTimes; ++time) {
        const int i = time * 256 + threadIdx.x, at = column + i % kAcross * 8;
        const Pixel here = pixel(rank * kShare + i / kAcross);
        if (i >= kShare * kAcross || here.index < 0 || at >= columns) continue;
        const float scale = scales[here.image];
        const int zero = (int)scales[boxes.images + here.image];
        const float* const sums = column_scales + (long long)row_of(here.which) * columns + at;
        const long long place = (long long)here.index * columns + at;
        uint4 biases = make_uint4(0u, 0u, 0u, 0u), more = biases;
        if (bias != nullptr) biases = *(const uint4*)(bias + at);
        if (residual != nullptr) more = *(const uint4*)(residual + place);
        auto value = [&](int j) {
          int acc = part[time][0][j];
#pragma unroll
          for (int other = 1; other < SPLIT; ++other) acc += part[time][other][j];
          return float(acc - zero * (int)sums[j]) * scale;
        };
        auto two = [&](int j, u32 of_bias, u32 of_residual) {
          const float2 added = unpack(of_bias), other = unpack(of_residual);
          return pack(fmaf(value(j), column_scales[at + j], added.x) + other.x,
                      fmaf(value(j + 1), column_scales[at + j + 1], added.y) + other.y);
        };
        *(uint4*)(out + place) = make_uint4(two(0, biases.x, more.x), two(2, biases.y, more.y),
                                            two(4, biases.z, more.z), two(6, biases.w, more.w));
      }
#else
      float row_scales[kHalves][2];
      u32 zeros[kHalves][2], cases[kHalves][2];  // a row's zero, and where the sums of its case are
      int rows[kHalves][kLoads];                 // pixels this lane moves a part of; -1 if out of bounds
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int top = (PINGPONG ? half : warpgroup) * 64 + (warp & 3) * 16;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Pixel here = pixel(top + h * 8 + (lane >> 2));
          row_scales[half][h] = scales[here.image];
          zeros[half][h] = (int)scales[boxes.images + here.image];
          cases[half][h] = vectors + kCases + here.which * 4 * WIDTH;
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) rows[half][i] = pixel(top + i * kEach + lane / kLanes).index;
      }
      mbarrier_wait(ready, ready_parity);
      ready_parity ^= 1;
      const int eighth = column + lane % kLanes * 8;
      uint4 ahead[kAhead][kLoads];
      auto fetch = [&](int move) {  // columns in the outer loop: both halves use the same vectors
        const int first = move / kHalves * kChunk;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int from = rows[move % kHalves][i];
          ahead[move % kAhead][i] = make_uint4(0u, 0u, 0u, 0u);
          if (residual != nullptr && from >= 0 && eighth + first < columns)
            ahead[move % kAhead][i] = *(const uint4*)(residual + (long long)from * columns + eighth + first);
        }
      };
#pragma unroll
      for (int move = 0; move < kAhead && move < kMoves; ++move) fetch(move);
#pragma unroll
      for (int move = 0; move < kMoves; ++move) {
        const int half = move % kHalves, first = move / kHalves * kChunk;
        __syncwarp();
        if (residual != nullptr) {
#pragma unroll
          for (int i = 0; i < kLoads; ++i) {
            const uint4 eight = ahead[move % kAhead][i];
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(own + (i * kEach + lane / kLanes) * kPitch +
                                                                          lane % kLanes * 16),
                         "r"(eight.x), "r"(eight.y), "r"(eight.z), "r"(eight.w)
                         : "memory");
          }
          if (move + kAhead < kMoves) fetch(move + kAhead);
          __syncwarp();
        }
#pragma unroll
        for (int j = 0; j < kChunk / 8 && first + 8 * j < WIDTH; j += 2) {
          u32 two[4] = {0u, 0u, 0u, 0u};
          const u32 place = own + (lane & 15) * kPitch + (j + (lane >> 4)) * 16;
          if (residual != nullptr)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(two[0]), "=r"(two[1]), "=r"(two[2]), "=r"(two[3])
                         : "r"(place)
                         : "memory");
#pragma unroll
          for (int eight = 0; eight < 2; ++eight) {
            const int at = first + 8 * (j + eight) + 2 * (lane & 3);
            const float2 scale = load_two(vectors + 4 * at), added = unpack(load_one(vectors + kBiases + 2 * at));
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float2 sums = load_two(cases[half][h] + 4 * at), more = unpack(two[2 * eight + h]);
              const int* of = sum[half] + 4 * (first / 8 + j + eight) + 2 * h;
              auto value = [&](int sum_of_products, float sum_of_codes) {
                const u32 codes = __float_as_uint(sum_of_codes + kInteger) - kIntegerBits;
                return float(int(sum_of_products - zeros[half][h] * codes)) * row_scales[half][h];
              };
              two[2 * eight + h] = pack(fmaf(value(of[0], sums.x), scale.x, added.x) + more.x,
                                        fmaf(value(of[1], sums.y), scale.y, added.y) + more.y);
            }
          }
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(two[0]),
                       "r"(two[1]), "r"(two[2]), "r"(two[3])
                       : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int at = first + lane % kLanes * 8;
          uint4 eight;
          asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                       : "r"(own + (i * kEach + lane / kLanes) * kPitch + lane % kLanes * 16)
                       : "memory");
          if (rows[half][i] >= 0 && at < WIDTH && column + at < columns)
            *(uint4*)(out + (long long)rows[half][i] * columns + column + at) = eight;
        }
      }
#endif
    }
  }
  if (kCluster > 1) cluster_sync_relaxed();  // no block may exit while others multicast to it or read its shared memory
}
