// A linear layer, bias and residual, and the layer norm of the sum, as one kernel, for Hopper.
//
// Tiles are ROWS rows of x (M) by WIDTH columns (N); PARTS tiles make a row. A producer warp fills a ring of STAGES
// shared memory stages by TMA, 64 of K at a time; one consumer warpgroup per 64 rows runs the mma mainloop; three
// helper warps load the epilogue's operands. Mean and variance of a row are combined from its parts: each block
// publishes the statistics of its tile's rows in global memory, stores the sum, and then reads those of the blocks
// next to it. Every value of such a record is stored next to a launch number, one higher than at the previous launch: a
// reader sees whether a value is current, and nothing needs clearing. Blocks that wait for each other are consecutive
// in the grid, and blocks are scheduled in that order, so those of a row (twice as many with PAIR 2) always make
// progress.
//
// Compile-time parameters: ROWS, 64, 128 or 192; WIDTH; PARTS; STAGES; PAIR, 1 or 2, blocks of a cluster with
// neighbouring rows that share the weight by TMA multicast; BF16.

#include "hopper.h"

constexpr int kBlockK = 64, kConsumerThreads = 2 * ROWS,
              kThreads = kConsumerThreads + 128;  // consumer threads, and all
constexpr int kInputBytes = ROWS * 128, kStageBytes = kInputBytes + WIDTH * 128;
constexpr int kSums = WIDTH / 2, kColumns = WIDTH * PARTS;  // accumulators of a thread; N
// Boxes of the residual and of the results: columns, bytes of a row (also the swizzle width), bytes in all.
constexpr int kChunk = WIDTH % 32 ? 16 : 32, kLine = 2 * kChunk, kBox = ROWS * kLine;
constexpr int kHelperThreads = 96;                                      // threads that load the epilogue's operands
constexpr int kRegisters = ROWS == 64 ? 216 : ROWS == 128 ? 232 : 152;  // of a consumer thread

enum { kPostBias, kNormWeight, kNormBias, kVectors };
constexpr int
    kEpilogueReady = 2,
    kEpilogueUsed = 3,
    kWarpgroup = 4;  // named barriers: the epilogue's vectors are in shared memory; they have been used; of a warpgroup

// A block's statistics of a row. Each value is paired with the launch number in one 64-bit word, so neither is read
// alone.
struct Record {
  u32 mean, launch, deviations, launch_again;
};

__device__ __forceinline__ void publish(Record* to, float mean, float deviations, u32 launch) {
  const u64 one = u64(launch) << 32 | __float_as_uint(mean), other = u64(launch) << 32 | __float_as_uint(deviations);
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(one), "l"(other) : "memory");
}

__device__ __forceinline__ bool read_published(const Record* from, float& mean, float& deviations, u32 launch) {
  u64 one, other;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(one), "=l"(other) : "l"(from) : "memory");
  mean = __uint_as_float(u32(one));
  deviations = __uint_as_float(u32(other));
  return u32(one >> 32) == launch && u32(other >> 32) == launch;
}

// The sum over the four lanes that share a row.
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// x: tensor map over (M, K), boxes of ROWS by 64. weight: over (N, K), boxes of WIDTH / PAIR by 64. out_sum and out:
// over (M, N), boxes of 64 by kChunk: the sum, plus post_bias if that is not null, and the norm of the sum without
// post_bias. residual: likewise, boxes of ROWS by kChunk, if has_residual. Vectors (N) or null. records (PARTS,
// tiles_down * PAIR * ROWS): zeros, or as a launch of the same sizes left them. steps: K tiles. tiles_down: M tiles /
// PAIR.
extern "C" __global__ void __launch_bounds__(kThreads, ROWS == 64 ? 2 : 1) __cluster_dims__(PAIR, 1, 1)
    linear_layer_norm(const __grid_constant__ TensorMap out_sum, const __grid_constant__ TensorMap out,
                      const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                      const __grid_constant__ TensorMap residual, int has_residual, const unsigned short* bias,
                      const unsigned short* post_bias, const unsigned short* norm_weight,
                      const unsigned short* norm_bias, Record* records, float eps, int steps, int tiles_down) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES + 1];
  __shared__ alignas(4) unsigned short vectors[kVectors][WIDTH];
  const u32 base = (smem_address(shared) + 1023) & ~1023u, tile_at = base + STAGES * kStageBytes;
  const u32 full = smem_address(barriers), empty = full + 8 * STAGES, epilogue_full = empty + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  u32 rank = 0;
  if (PAIR > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));

  if (threadIdx.x == 0) {
    mbarrier_init_ring(full, empty, STAGES, kConsumerThreads / 32 * PAIR);
    mbarrier_init(epilogue_full, 1);
    fence_barrier_init();
  }
  if (threadIdx.x == 0) pdl_launch_dependents();
  if (warp == kConsumerThreads / 32 && elect_one()) {
    prefetch(&x);
    prefetch(&weight);
  }
  if (PAIR > 1)
    cluster_sync_relaxed();
  else
    __syncthreads();

  const int all_rows = tiles_down * PAIR * ROWS, tiles = tiles_down * PARTS;
  const int first_tile = blockIdx.x / PAIR, stride = gridDim.x / PAIR;
  // consecutive tiles share their rows
  auto down = [&](int tile) { return (tile / PARTS * PAIR + (PAIR > 1 ? int(rank) : 0)) * ROWS; };

  if (warp >= kConsumerThreads / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == kConsumerThreads / 32) {
      const u32 elected = elect_one();
      u32 stage = 0, parity = 1;
      auto load_weight = [&](int tile, int step, u32 stage) {
        const u32 barrier = full + 8 * stage, to = base + stage * kStageBytes + kInputBytes;
        const int column = tile % PARTS * WIDTH, part = rank * (WIDTH / PAIR);
        mbarrier_arrive_expect_tx(elected, barrier, kStageBytes);
        if (PAIR > 1)
          tma_load_multicast(elected, to + part * 128, &weight, barrier, step * kBlockK, column + part);
        else
          tma_load(elected, to, &weight, barrier, step * kBlockK, column);
      };
      const int ahead = min(STAGES, steps);
      for (int step = 0; step < ahead; ++step) load_weight(first_tile, step, step);
      pdl_wait();
      for (int tile = first_tile; tile < tiles; tile += stride) {
        for (int step = 0; step < steps; ++step) {
          if (tile != first_tile || step >= ahead) {
            mbarrier_wait(empty + 8 * stage, parity);
            load_weight(tile, step, stage);
          }
          tma_load(elected, base + stage * kStageBytes, &x, full + 8 * stage, step * kBlockK, down(tile));
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
    } else {
      pdl_wait();
      const int helper = threadIdx.x - kConsumerThreads - 32;
      for (int tile = first_tile; tile < tiles; tile += stride) {
        if (tile != first_tile)
          asm volatile("bar.sync %0, %1;" ::"n"(kEpilogueUsed), "n"(kConsumerThreads + kHelperThreads) : "memory");
        const int top = down(tile), column = tile % PARTS * WIDTH;
        if (has_residual && helper == 0) {
          mbarrier_arrive_expect_tx(1, epilogue_full, WIDTH / kChunk * kBox);
#pragma unroll
          for (int i = 0; i < WIDTH / kChunk; ++i)
            tma_load(1, tile_at + i * kBox, &residual, epilogue_full, column + i * kChunk, top);
        }
        for (int i = helper; i < WIDTH / 2; i += kHelperThreads) {
          const unsigned short* from[kVectors] = {post_bias, norm_weight, norm_bias};
          u32 two[kVectors];
#pragma unroll
          for (int j = 0; j < kVectors; ++j) {
            two[j] = j == kNormWeight ? pack(1.f, 1.f) : 0u;
            if (from[j] != nullptr) two[j] = __ldg((const u32*)(from[j] + column) + i);
          }
#pragma unroll
          for (int j = 0; j < kVectors; ++j) *(u32*)&vectors[j][2 * i] = two[j];
        }
        asm volatile("bar.arrive %0, %1;" ::"n"(kEpilogueReady), "n"(kConsumerThreads + kHelperThreads) : "memory");
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    pdl_wait();
    const int warpgroup = __shfl_sync(~0u, warp >> 2, 0);
    auto look = [&](int which, int n) {  // columns 8 n + 2 (lane % 4) and the next
      return *(const u32*)&vectors[which][8 * n + 2 * (lane & 3)];
    };
    auto warpgroup_sync = [&] { asm volatile("bar.sync %0, 128;" ::"r"(kWarpgroup + warpgroup) : "memory"); };
    float sum[kSums];
    u32 stage = 0, parity = 0, previous = 0, tile_parity = 0;
    for (int tile = first_tile; tile < tiles; tile += stride, tile_parity ^= 1) {
      const int part = tile % PARTS, top = down(tile) + warp * 16;
      Record* record = records + top + lane / 4;  // of rows lane / 4 and lane / 4 + 8, of part 0
      u32 launch;
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];"
                   : "=r"(launch)
                   : "l"(&record[part * all_rows].launch)
                   : "memory");

      u32 biases[WIDTH / 8];
#pragma unroll
      for (int n = 0; n < WIDTH / 8; ++n)
        biases[n] = bias == nullptr ? 0u : __ldg((const u32*)(bias + part * WIDTH + 8 * n + 2 * (lane & 3)));
      for (int step = 0; step < steps; ++step) {
        mbarrier_wait(full + 8 * stage, parity);
        fence_operand(sum);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k)
          wgmma(sum, wgmma_descriptor(base + stage * kStageBytes + warpgroup * 64 * 128 + 32 * k),
                wgmma_descriptor(base + stage * kStageBytes + kInputBytes + 32 * k), step + k);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0 && lane < PAIR) mbarrier_arrive(empty + 8 * previous, lane);
        previous = stage;
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
      asm volatile("bar.sync %0, %1;" ::"n"(kEpilogueReady), "n"(kConsumerThreads + kHelperThreads) : "memory");
      if (has_residual) mbarrier_wait(epilogue_full, tile_parity);
      wgmma_wait<0>();
      fence_operand(sum);
      if (lane < PAIR) mbarrier_arrive(empty + 8 * previous, lane);
      ++launch;

      auto place =
          [&](int n) {  // smem address for ldmatrix and stmatrix of columns 8 n to 8 n + 15 of this warp's rows
            const int row = warp * 16 + (lane & 15), chunk = n % (kChunk / 8) + (lane >> 4);
            const int swizzled = chunk ^ (kChunk == 32 ? row >> 1 & 3 : row >> 2 & 1);
            return tile_at + n / (kChunk / 8) * kBox + row * kLine + swizzled * 16;
          };
      auto put = [&](int n, const u32(&two)[4]) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place(n)), "r"(two[0]),
                     "r"(two[1]), "r"(two[2]), "r"(two[3])
                     : "memory");
      };
      // Each warp stores some boxes of its warpgroup's rows, after all of them have fenced their writes.
      auto send = [&](const TensorMap* to) {
        warpgroup_sync();
        if (lane == 0)
#pragma unroll
          for (int i = 0; i < WIDTH / kChunk; i += 4)
            if (i + (warp & 3) < WIDTH / kChunk)
              tma_store(to, tile_at + (i + (warp & 3)) * kBox + warpgroup * 64 * kLine,
                        part * WIDTH + (i + (warp & 3)) * kChunk, top - (warp & 3) * 16);
      };

      u32 pairs[WIDTH / 16][4];
      if (has_residual) {
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 2) {  // all loads in flight before the first use
          u32(&two)[4] = pairs[n / 2];
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(two[0]), "=r"(two[1]), "=r"(two[2]), "=r"(two[3])
                       : "r"(place(n)));
        }
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i) {
          const float2 one = unpack(pairs[i / 4][i % 4]);
          sum[2 * i] += one.x;
          sum[2 * i + 1] += one.y;
        }
      }
#pragma unroll
      for (int i = 0; i < WIDTH / 4; ++i) {
        const float2 added = unpack(biases[i / 2]);
        pairs[i / 4][i % 4] = pack(sum[2 * i] + added.x, sum[2 * i + 1] + added.y);
        const float2 rounded = unpack(pairs[i / 4][i % 4]);  // the norm is of the rounded sum
        sum[2 * i] = rounded.x;
        sum[2 * i + 1] = rounded.y;
      }
      if (post_bias != nullptr) {
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i) {
          const float2 later = unpack(look(kPostBias, i / 2));
          pairs[i / 4][i % 4] = pack(sum[2 * i] + later.x, sum[2 * i + 1] + later.y);
        }
      }
#pragma unroll
      for (int n = 0; n < WIDTH / 8; n += 2) put(n, pairs[n / 2]);
      fence_async_proxy();

      // two passes, mean then squared deviations: exact, and rereading registers is free
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float s[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n) {
          s[n % 2] += sum[4 * n + 2 * h];
          s[n % 2 + 2] += sum[4 * n + 2 * h + 1];
        }
        const float mean = row_sum((s[0] + s[1]) + (s[2] + s[3])) * (1.f / WIDTH);
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n) {
          const float a = sum[4 * n + 2 * h] - mean, b = sum[4 * n + 2 * h + 1] - mean;
          d[n % 2] = fmaf(a, a, d[n % 2]);
          d[n % 2 + 2] = fmaf(b, b, d[n % 2 + 2]);
        }
        const float deviations = row_sum((d[0] + d[1]) + (d[2] + d[3]));
        if ((lane & 3) == 0) publish(record + part * all_rows + h * 8, mean, deviations, launch);
      }

      send(&out_sum);

      u32 norm_weights[WIDTH / 8], norm_biases[WIDTH / 8];
#pragma unroll
      for (int n = 0; n < WIDTH / 8; ++n) {
        norm_weights[n] = look(kNormWeight, n);
        norm_biases[n] = look(kNormBias, n);
      }
      constexpr int kParts = (PARTS + 3) / 4;  // parts of a row that a lane reads
      float mean[2][kParts], deviations[2][kParts], scales[2], shifts[2];
      bool there;
      do {
        there = true;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int i = 0; i < kParts; ++i)
            there &= read_published(record + min(4 * i + (lane & 3), PARTS - 1) * all_rows + h * 8, mean[h][i],
                                    deviations[h][i], launch);
      } while (!there);
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float all = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < kParts; ++i) all += 4 * i + (lane & 3) < PARTS ? mean[h][i] : 0.f;
        all = row_sum(all) * (1.f / PARTS);
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const float apart = mean[h][i] - all;
          squares += 4 * i + (lane & 3) < PARTS ? fmaf(apart * apart, float(WIDTH), deviations[h][i]) : 0.f;
        }
        scales[h] = rsqrtf(row_sum(squares) * (1.f / kColumns) + eps);
        shifts[h] = -all * scales[h];
      }
      if (lane == 0) tma_store_wait();
      warpgroup_sync();
#pragma unroll
      for (int n = 0; n < WIDTH / 8; n += 2) {
        u32(&two)[4] = pairs[n / 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* of = sum + 4 * (n + (i >> 1)) + 2 * (i & 1);
          const float2 times = unpack(norm_weights[n + (i >> 1)]), plus = unpack(norm_biases[n + (i >> 1)]);
          two[i] = pack(fmaf(fmaf(of[0], scales[i & 1], shifts[i & 1]), times.x, plus.x),
                        fmaf(fmaf(of[1], scales[i & 1], shifts[i & 1]), times.y, plus.y));
        }
        put(n, two);
      }
      fence_async_proxy();
      send(&out);
      if (lane == 0) tma_store_wait();
      __syncwarp();
      if (tile + stride < tiles)
        asm volatile("bar.arrive %0, %1;" ::"n"(kEpilogueUsed), "n"(kConsumerThreads + kHelperThreads) : "memory");
    }
  }
  if (PAIR > 1) cluster_sync_relaxed();  // no block may exit while the other multicasts to it
}
