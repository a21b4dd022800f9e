// 3x3 convolution of NHWC images, padding 1, for Hopper: an implicit GEMM with M = pixels, N = output channels and
// K = 9 taps x input channels.
//
// Tiles are 128 pixels (a box of columns, rows and images) by WIDTH output channels. A producer warp fills a ring of
// STAGES shared memory stages by TMA, 64 of K at a time: the box of a tap is the tile's box shifted by a pixel, and TMA
// fills what is out of bounds with zeros. Two consumer warpgroups run the mma mainloop. Blocks are persistent.
//
// Compile-time parameters: WIDTH; PINGPONG, whether the consumer warpgroups alternate tiles, one in its epilogue while
// the other is in its mainloop (CUTLASS' ping-pong schedule), or share each tile (cooperative); STAGES; PAIR, 1 or 2,
// blocks of a cluster with neighbouring pixels that share the weight by TMA multicast; SPLIT, blocks of a cluster that
// split K, reduced through distributed shared memory, with PAIR 1, no PINGPONG and one tile per cluster; GROUP,
// channels of a group of the group norm that follows, which divide WIDTH, or 0: otherwise the epilogue adds shift and
// residual, and writes the group statistics of each tile; BF16.

#include "hopper.h"
#if GROUP > 0
#include "group_reduce.h"
#endif

// A tile's pixels: 1 << across columns by 1 << down rows by 128 >> (across + down) images. An image is wide x high
// boxes.
struct Boxes {
  int across, down, wide, high, width, height, images;
};

constexpr int kTaps = 9, kBlockK = 64, kBlockM = 128;  // kBlockK: of a stage, 128 bytes
constexpr int kThreads = 3 * 128;
constexpr int kHalves = PINGPONG ? 2 : 1;  // 64-row mma tiles of a warpgroup
constexpr int kCluster = PAIR * SPLIT;
constexpr int kInputBytes = kBlockM * 128, kWeightBytes = WIDTH * 128, kStageBytes = kInputBytes + kWeightBytes;
constexpr int kSums = WIDTH / 2;  // accumulators of a thread for 64 pixels
#if SPLIT > 1
constexpr int kPitch = WIDTH + 8;  // floats between rows of partial sums
#else
constexpr int kChunk = 32, kPitch = 2 * kChunk + 16;  // columns a warp writes at a time; bytes between rows
#endif

// x_map: tensor map over (images, height, width, channels), boxes of a tile's pixels by 64 channels. weight_map: over
// (columns, 9 channels), boxes of WIDTH / PAIR by 64. out (images, height, width, columns). chunks: channels / 64.
// tiles_down: M tiles / PAIR; tiles_across: N tiles. With GROUP: shift (images, columns) with its row stride, or null;
// residual like out, or null; partial (2, images, boxes of an image, groups): means and sums of squared deviations.
extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    conv2d(unsigned short* out, const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
           int chunks, int columns, int tiles_down, int tiles_across, const __grid_constant__ Boxes boxes
#if GROUP > 0
           ,
           const unsigned short* shift, int shift_stride, const unsigned short* residual, float* partial
#endif
    ) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES + 2];
  const u32 base = (smem_address(shared) + 1023) & ~1023u;
  const u32 full = smem_address(barriers), empty = full + 8 * STAGES, order = empty + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  u32 rank = 0;
  if (kCluster > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));

  if (threadIdx.x == 0) {
    mbarrier_init_ring(full, empty, STAGES, (PINGPONG ? 4 : 8) * PAIR);
    mbarrier_init(order, 4);
    mbarrier_init(order + 8, 4);
    fence_barrier_init();
    pdl_launch_dependents();
  }
  if (kCluster > 1)
    cluster_sync_relaxed();
  else
    __syncthreads();

  const int all_steps = kTaps * chunks, tiles = tiles_down * tiles_across;
  const int first_step = SPLIT > 1 ? all_steps * rank / SPLIT : 0;
  const int last_step = SPLIT > 1 ? all_steps * (rank + 1) / SPLIT : all_steps;
  // consecutive tiles share their pixels
  auto down = [&](int tile) { return tile / tiles_across * PAIR + (PAIR > 1 ? int(rank) : 0); };

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 8) {
      const u32 elected = elect_one();
      u32 stage = 0, parity = 1;
      auto load_weight = [&](int tile, int step, u32 stage) {
        const u32 barrier = full + 8 * stage, to = base + stage * kStageBytes + kInputBytes;
        const int column = tile % tiles_across * WIDTH, part = rank * (WIDTH / PAIR);
        mbarrier_arrive_expect_tx(elected, barrier, kStageBytes);
        if (PAIR > 1)
          tma_load_multicast(elected, to + part * 128, &weight_map, barrier, step * kBlockK, column + part);
        else
          tma_load(elected, to, &weight_map, barrier, step * kBlockK, column);
      };
      const int first_tile = blockIdx.x / kCluster, ahead = min(STAGES, last_step - first_step);
      for (int step = 0; step < ahead; ++step) load_weight(first_tile, first_step + step, step);
      pdl_wait();
      for (int tile = first_tile; tile < tiles; tile += gridDim.x / kCluster) {
        const int box = down(tile);
        const int x = box % boxes.wide << boxes.across, y = box / boxes.wide % boxes.high << boxes.down;
        const int image = box / (boxes.wide * boxes.high) * (kBlockM >> (boxes.across + boxes.down));
        int tap = first_step / chunks, chunk = first_step % chunks;
        for (int step = first_step; step < last_step; ++step) {
          if (tile != first_tile || step - first_step >= ahead) {
            mbarrier_wait(empty + 8 * stage, parity);
            load_weight(tile, step, stage);
          }
          tma_load(elected, base + stage * kStageBytes, &x_map, full + 8 * stage, chunk * kBlockK, x + tap % 3 - 1,
                   y + tap / 3 - 1, image);
          if (++chunk == chunks) {
            chunk = 0;
            ++tap;
          }
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
    float sum[kHalves][kSums];
    u32 used = 0, previous = 0;  // stages so far
    int turn = 0, done = 0;      // whose tile it is; tiles this warpgroup has done
    for (int tile = blockIdx.x / kCluster; tile < tiles; tile += gridDim.x / kCluster, turn ^= 1) {
      u32 stage = used % STAGES, parity = used / STAGES & 1;
      used += last_step - first_step;
      if (PINGPONG) {
        if (turn != warpgroup) continue;
        // an mbarrier's parity tells two phases apart, no more: only the next in order may wait on it
        if (warpgroup > 0 || done > 0) mbarrier_wait(order + 8 * warpgroup, (done - 1 + warpgroup) & 1);
        ++done;
      }
      for (int step = first_step; step < last_step; ++step) {
        mbarrier_wait(full + 8 * stage, parity);
        fence_operand(sum);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k)
#pragma unroll
          for (int half = 0; half < kHalves; ++half)
            wgmma(sum[half],
                  wgmma_descriptor(base + stage * kStageBytes + (PINGPONG ? half : warpgroup) * 64 * 128 + 32 * k),
                  wgmma_descriptor(base + stage * kStageBytes + kInputBytes + 32 * k), step - first_step + k);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > first_step && lane < PAIR) mbarrier_arrive(empty + 8 * previous, target);
        previous = stage;
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
      if (PINGPONG && lane == 0) mbarrier_arrive(order + 8 * (1 - warpgroup), rank);
      wgmma_wait<0>();
      fence_operand(sum);
      if (lane < PAIR) mbarrier_arrive(empty + 8 * previous, target);

      const int box = down(tile), column = tile % tiles_across * WIDTH;
      const int x = box % boxes.wide << boxes.across, y = box / boxes.wide % boxes.high << boxes.down;
      const int image = box / (boxes.wide * boxes.high) * (kBlockM >> (boxes.across + boxes.down));
      auto pixel = [&](int row) {  // index in `out` of a pixel of the tile; -1 if out of bounds
        const int px = x + (row & ((1 << boxes.across) - 1)), py = y + (row >> boxes.across & ((1 << boxes.down) - 1));
        const int pn = image + (row >> (boxes.across + boxes.down));
        const bool there = px < boxes.width && py < boxes.height && pn < boxes.images;
        return there ? (pn * boxes.height + py) * boxes.width + px : -1;
      };
#if GROUP == 0
      auto store = [&](int row, int at, uint4 eight) {  // 8 columns from `at` on, of a row of the tile
        const int to = pixel(row);
        if (to >= 0 && column + at < columns) *(uint4*)(out + (long long)to * columns + column + at) = eight;
      };
#endif
#if SPLIT > 1
      // each block writes its partial sums over its stages, then reduces a share of the rows of all blocks
      asm volatile("bar.sync 1, %0;" ::"n"(2 * 128) : "memory");
      float* own = (float*)(shared + (base - smem_address(shared)));
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int i = 0; i < kSums; i += 2) {
          const int row = warpgroup * 64 + (warp & 3) * 16 + (lane >> 2) + 8 * (i >> 1 & 1);
          *(float2*)(own + row * kPitch + 8 * (i >> 2) + 2 * (lane & 3)) = make_float2(sum[half][i], sum[half][i + 1]);
        }
      cluster_sync();
      constexpr int kAcross = WIDTH / 8, kShare = kBlockM / SPLIT, kTimes = (kShare * kAcross + 255) / 256;
      float part[kTimes][SPLIT][8];  // all loads in flight before the first use: DSMEM latency is high
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
            float* v = part[time][other] + four;
            asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                         : "r"(there + 4 * four)
                         : "memory");
          }
        }
      }
#pragma unroll
      for (int time = 0; time < kTimes; ++time) {
        const int i = time * 256 + threadIdx.x;
        float acc[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          acc[j] = part[time][0][j];
#pragma unroll
          for (int other = 1; other < SPLIT; ++other) acc[j] += part[time][other][j];
        }
        if (i < kShare * kAcross)
          store(rank * kShare + i / kAcross, i % kAcross * 8,
                make_uint4(pack(acc[0], acc[1]), pack(acc[2], acc[3]), pack(acc[4], acc[5]), pack(acc[6], acc[7])));
      }
#elif GROUP > 0
      const u32 own = base + STAGES * kStageBytes + warp * 16 * kPitch;
      constexpr int kLanes = kChunk / 8, kEach = 32 / kLanes,
                    kLoads = 16 / kEach;  // lanes per row, rows per warp access
      constexpr int kMoves = WIDTH / kChunk * kHalves, kAhead = PINGPONG ? 2 : 3;  // residual loads in flight
      const int pair = column + 2 * (lane & 3);
      const unsigned short* added = shift == nullptr ? nullptr : shift + (long long)image * shift_stride + pair;
      int rows[kHalves][kLoads];  // pixels this lane moves a part of; -1 if out of bounds
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          rows[half][i] = pixel((PINGPONG ? half : warpgroup) * 64 + (warp & 3) * 16 + i * kEach + lane / kLanes);
      const int eighth = column + lane % kLanes * 8;
      uint4 ahead[kAhead][kLoads];
      u32 more[2][kChunk / 8];
      auto fetch = [&](int move) {  // columns in the outer loop: both halves use the same shift
        const int first = move / kHalves * kChunk;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const int from = rows[move % kHalves][i];
          ahead[move % kAhead][i] = make_uint4(0u, 0u, 0u, 0u);
          if (residual != nullptr && from >= 0)
            ahead[move % kAhead][i] = *(const uint4*)(residual + (long long)from * columns + eighth + first);
        }
      };
      auto look = [&](int chunk) {
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n)
          more[chunk % 2][n] = added == nullptr ? 0u : *(const u32*)(added + chunk * kChunk + 8 * n);
      };
      look(0);
#pragma unroll
      for (int move = 0; move < kAhead && move < kMoves; ++move) fetch(move);
#pragma unroll
      for (int move = 0; move < kMoves; ++move) {
        const int half = move % kHalves, chunk = move / kHalves, first = chunk * kChunk;
        if (half == 0 && first + kChunk < WIDTH) look(chunk + 1);
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
        for (int j = 0; j < kChunk / 8; j += 2) {
          u32 two[4] = {0u, 0u, 0u, 0u};
          const u32 place = own + (lane & 15) * kPitch + (j + (lane >> 4)) * 16;
          if (residual != nullptr)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(two[0]), "=r"(two[1]), "=r"(two[2]), "=r"(two[3])
                         : "r"(place)
                         : "memory");
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float* of = sum[half] + 4 * (first / 8 + j + (i >> 1)) + 2 * (i & 1);
            const float2 one = unpack(two[i]), other = unpack(more[chunk % 2][j + (i >> 1)]);
            two[i] = pack(of[0] + (one.x + other.x), of[1] + (one.y + other.y));
            const float2 rounded = unpack(two[i]);  // the norm is of the rounded sum
            of[0] = rounded.x;
            of[1] = rounded.y;
          }
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(two[0]),
                       "r"(two[1]), "r"(two[2]), "r"(two[3])
                       : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          uint4 eight;
          asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                       : "r"(own + (i * kEach + lane / kLanes) * kPitch + lane % kLanes * 16)
                       : "memory");
          if (rows[half][i] >= 0) *(uint4*)(out + (long long)rows[half][i] * columns + eighth + first) = eight;
        }
      }

      // two passes, mean then squared deviations: exact, and rereading registers is free
      __shared__ float group_sums[2][8][kGroups], squares[2][8][kGroups], means[8][kGroups];
      constexpr int kWarps = PINGPONG ? 4 : 8;  // that share the tile
      const int set = PINGPONG ? warpgroup : 0, member = PINGPONG ? warp & 3 : warp;
      bool there[2 * kHalves];
#pragma unroll
      for (int i = 0; i < 2 * kHalves; ++i)
        there[i] = pixel((PINGPONG ? i >> 1 : warpgroup) * 64 + (warp & 3) * 16 + (i & 1) * 8 + (lane >> 2)) >= 0;
      const float count = float(GROUP * max(min(1 << boxes.across, boxes.width - x), 0) *
                                max(min(1 << boxes.down, boxes.height - y), 0));
      group_reduce(group_sums[set][member], lane, [&](int j) {
        float part_sum = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * kHalves; ++i)
          part_sum += there[i] ? sum[i >> 1][4 * j + 2 * (i & 1)] + sum[i >> 1][4 * j + 2 * (i & 1) + 1] : 0.f;
        return part_sum;
      });
      asm volatile("bar.sync %0, %1;" ::"r"(2 + set), "n"(32 * kWarps) : "memory");
      if (lane < kGroups) {
        float mean = 0.f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) mean += group_sums[set][i][lane];
        means[warp][lane] = mean / count;
      }
      __syncwarp();
      group_reduce(squares[set][member], lane, [&](int j) {
        const float mean = means[warp][(4 * j + (lane & 3)) / (GROUP / 2)];
        float part_sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4 * kHalves; ++i) {
          const float d = sum[i >> 2][4 * j + (i & 3)] - mean;
          part_sum += there[i >> 1] ? d * d : 0.f;
        }
        return part_sum;
      });
      asm volatile("bar.sync %0, %1;" ::"r"(2 + set), "n"(32 * kWarps) : "memory");
      if (member == 0 && lane < kGroups && image < boxes.images) {
        const int groups = columns / GROUP, parts = boxes.wide * boxes.high;
        float* to = partial + ((long long)image * parts + box % parts) * groups + column / GROUP + lane;
        float deviations = 0.f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) deviations += squares[set][i][lane];
        to[0] = means[warp][lane];
        to[(long long)boxes.images * parts * groups] = deviations;
      }
#else
      const u32 own = base + STAGES * kStageBytes + warp * 16 * kPitch;
      constexpr int kLanes = kChunk / 8, kEach = 32 / kLanes;  // lanes per row; rows per warp store
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int first = 0; first < WIDTH; first += kChunk) {
          __syncwarp();
#pragma unroll
          for (int j = 0; j < kChunk / 8 && first + 8 * j < WIDTH; j += 2) {
            const float* of = sum[half] + 4 * (first / 8 + j);
            const u32 to = own + (lane & 15) * kPitch + (j + (lane >> 4)) * 16;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                         "r"(pack(of[0], of[1])), "r"(pack(of[2], of[3])), "r"(pack(of[4], of[5])),
                         "r"(pack(of[6], of[7]))
                         : "memory");
          }
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 16 / kEach; ++i) {
            const int row = i * kEach + lane / kLanes, at = lane % kLanes * 8;
            uint4 eight;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                         : "r"(own + row * kPitch + 2 * at)
                         : "memory");
            if (first + at < WIDTH)
              store((PINGPONG ? half : warpgroup) * 64 + (warp & 3) * 16 + row, first + at, eight);
          }
        }
#endif
    }
  }
  if (kCluster > 1) cluster_sync_relaxed();  // no block may exit while others multicast to it or read its shared memory
}
