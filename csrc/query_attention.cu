// Cross-attention over few keys (a prompt's) fused with the linear layer that computes its queries, for Hopper: the
// queries never reach global memory.
//
// Tiles are 64 rows of x (M) by five heads of 64 columns (N = 320), half of N per consumer warpgroup. A producer warp
// fills a ring of STAGES shared memory stages by TMA: first the GEMM's operands, 64 of K at a time, then keys and
// values of the heads. Warpgroup 0 attends for two heads, and for the third after warpgroup 1 has handed over its half
// of that head's queries through shared memory; warpgroup 1 attends for the other two. A head's output is staged over
// its keys and stored by TMA.
//
// Compile-time parameters: WIDTH, 160; STAGES, 3 or more; BF16.

#include "hopper.h"
#include "wgmma_rs.h"

constexpr int kBlockM = 64, kBlockK = 64, kWarpgroups = 2, kConsumerThreads = 128 * kWarpgroups,
              kThreads = kConsumerThreads + 128;
constexpr int kHeads = 5, kSize = 64, kColumns = kWarpgroups * WIDTH;
constexpr int kInputBytes = kBlockM * 128, kStageBytes = kInputBytes + kColumns * 128;
constexpr int kKeys = 80, kTile = kKeys * 128, kHead = 2 * kTile;  // bytes of a head's keys (or values), and of both
constexpr int kMore = 3;  // stages with keys and values: two with a head of each warpgroup, one with the fifth head
constexpr int kScores = kKeys / 2, kKeySteps = kKeys / 16;
static_assert(kColumns == kHeads * kSize && 2 * kHead <= kStageBytes && kMore <= STAGES);

template <int N>
struct Number {
  static constexpr int value = N;
};

__device__ __forceinline__ void tma_load(u32 elected, u32 to, const TensorMap* map, u32 barrier, int k, int row,
                                         int image) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5]; }" ::"r"(to),
      "l"(map), "r"(k), "r"(row), "r"(image), "r"(barrier), "r"(elected)
      : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap* map, u32 from, int column, int row, int image) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(column), "r"(row), "r"(image), "r"(from)
      : "memory");
}

// Waits until all but the LAST most recent TMA stores of this thread have read shared memory.
template <int LAST>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAST) : "memory");
}

// out: tensor map over (images, rows, columns), x: over (images, rows, K), boxes of 64 by 64. weight: over (columns,
// K), boxes of WIDTH by 64. k_map, v_map: over (images, keys, heads, 64), boxes of 80 keys of a head. scale: times
// log2(e). steps: K tiles, at least STAGES; down: M tiles of an image; tiles_across: N tiles; tiles: all.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    query_attention(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap x,
                    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap k_map,
                    const __grid_constant__ TensorMap v_map, float scale, int keys, int steps, int down,
                    int tiles_across, int tiles) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  __shared__ alignas(16) u32 handed[2][128][4];
  const u32 base = (smem_address(shared) + 1023) & ~1023u;
  const u32 full = smem_address(barriers), empty = full + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;

  if (threadIdx.x == 0) {
    mbarrier_init_ring(full, empty, STAGES, kConsumerThreads / 32);
    fence_barrier_init();
    pdl_launch_dependents();
  }
  __syncthreads();

  auto place = [&](int tile, int& image, int& row, int& column) {  // consecutive tiles share their rows
    image = tile / tiles_across / down;
    row = tile / tiles_across % down * kBlockM;
    column = tile % tiles_across;
  };

  if (warp >= kConsumerThreads / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == kConsumerThreads / 32) {
      const u32 elected = elect_one();
      u32 stage = 0, parity = 1;
      auto advance = [&] {
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      };
      auto load_weight = [&](int step, u32 stage, int column) {
        const u32 barrier = full + 8 * stage, to = base + stage * kStageBytes + kInputBytes;
        mbarrier_arrive_expect_tx(elected, barrier, kStageBytes);
#pragma unroll
        for (int i = 0; i < kWarpgroups; ++i)
          tma_load(elected, to + i * WIDTH * 128, &weight, barrier, step * kBlockK, column * kColumns + i * WIDTH);
      };
      const int first_tile = blockIdx.x;
      int image, row, column;
      place(first_tile, image, row, column);
      for (int step = 0; step < STAGES; ++step) load_weight(step, step, column);  // steps >= STAGES
      pdl_wait();
      for (int tile = first_tile; tile < tiles; tile += gridDim.x) {
        place(tile, image, row, column);
        for (int step = 0; step < steps; ++step, advance()) {
          if (tile != first_tile || step >= STAGES) {
            mbarrier_wait(empty + 8 * stage, parity);
            load_weight(step, stage, column);
          }
          tma_load(elected, base + stage * kStageBytes, &x, full + 8 * stage, step * kBlockK, row, image);
        }
#pragma unroll
        for (int i = 0; i < kMore; ++i, advance()) {
          mbarrier_wait(empty + 8 * stage, parity);
          mbarrier_arrive_expect_tx(elected, full + 8 * stage, (i < 2 ? 2 : 1) * kHead);
#pragma unroll
          for (int j = 0; j < (i < 2 ? 2 : 1); ++j) {
            const int head = column * kHeads + i + 3 * j;
            const u32 to = base + stage * kStageBytes + j * kHead;
            tma_load(elected, to, &k_map, full + 8 * stage, 0, head, 0, image);
            tma_load(elected, to + kTile, &v_map, full + 8 * stage, 0, head, 0, image);
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    pdl_wait();
    const int warpgroup = __shfl_sync(~0u, warp >> 2, 0), member = warp & 3;
    u32 stage = 0, parity = 0;
    auto advance = [&] {
      if (++stage == STAGES) {
        stage = 0;
        parity ^= 1;
      }
    };
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      float sum[WIDTH / 2];
      u32 previous = 0;
      for (int step = 0; step < steps; ++step, advance()) {
        mbarrier_wait(full + 8 * stage, parity);
        fence_operand(sum);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k)
          wgmma(sum, wgmma_descriptor(base + stage * kStageBytes + 32 * k),
                wgmma_descriptor(base + stage * kStageBytes + kInputBytes + warpgroup * WIDTH * 128 + 32 * k),
                step + k);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0 && lane == 0) mbarrier_arrive(empty + 8 * previous);
        previous = stage;
      }
      wgmma_wait<0>();
      fence_operand(sum);
      if (lane == 0) mbarrier_arrive(empty + 8 * previous);

      // accumulators are laid out as the A operand of the next mma: 16 columns a step
      u32 query[WIDTH / 16 + 2][4];
#pragma unroll
      for (int i = 0; i < WIDTH / 4; ++i) query[i / 4][i % 4] = pack(sum[2 * i], sum[2 * i + 1]);
      int image, row, column;
      place(tile, image, row, column);
      // Attention of one head: its queries begin at step `first`, its keys and values are in shared memory at `at`.
      auto attend = [&](auto first, u32 at, int head) {
        float score[kScores], result[kSize / 2], row_sum[2] = {0.f, 0.f};
        fence_operand(score);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSize / 16; ++step)
          wgmma_rs<0>(score, query[decltype(first)::value + step], wgmma_descriptor(at + 32 * step), step);
        wgmma_commit();
        wgmma_wait<0>();
        fence_operand(score);

        const int left = keys - 2 * (lane & 3);
#pragma unroll
        for (int i = 0; i < kScores; ++i)
          if (8 * (i >> 2) + (i & 1) >= left) score[i] = -infinity();
        float most[2] = {score[0], score[2]};
#pragma unroll
        for (int i = 0; i < kScores; ++i) most[i >> 1 & 1] = fmaxf(most[i >> 1 & 1], score[i]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          most[half] = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], 1));
          most[half] = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], 2)) * scale;
        }
        u32 part[kKeySteps][4];
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          score[i] = exp_2(fmaf(score[i], scale, -most[i >> 1 & 1]));
          row_sum[i >> 1 & 1] += score[i];
        }
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) part[i / 4][i % 4] = pack(score[2 * i], score[2 * i + 1]);

        fence_operand(result);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step)
          wgmma_rs<1>(result, part[step], wgmma_descriptor(at + kTile + 16 * 128 * step), step);
        wgmma_commit();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 1);
          row_sum[half] += __shfl_xor_sync(~0u, row_sum[half], 2);
          row_sum[half] = 1.f / row_sum[half];
        }
        wgmma_wait<0>();
        fence_operand(result);

        asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory");  // nobody reads these keys any more
#pragma unroll
        for (int n = 0; n < kSize / 8; n += 2) {
          u32 two[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            two[i] = pack(result[4 * n + 2 * i] * row_sum[i & 1], result[4 * n + 2 * i + 1] * row_sum[i & 1]);
          const int r = member * 16 + (lane & 15), eighth = n + (lane >> 4);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                           at + r * 128 + ((eighth ^ r) & 7) * 16),
                       "r"(two[0]), "r"(two[1]), "r"(two[2]), "r"(two[3])
                       : "memory");
        }
        fence_async_proxy();
        asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory");
        if (member == 0 && lane == 0) tma_store(&out, at, column * kColumns + head * kSize, row, image);
      };
      // The warpgroup's heads, one per stage. A stage is released while the next head's output is being stored.
      auto attend_all = [&](auto whose) {
        constexpr int kWarpgroup = decltype(whose)::value, kFirst = 2 * kWarpgroup;
        u32 before = 0;
        auto release = [&](auto last) {
          if (member == 0 && lane == 0) tma_store_wait<decltype(last)::value>();
          __syncwarp();
          if (lane == 0) mbarrier_arrive(empty + 8 * before);
        };
        auto next = [&](auto first, int head) {
          mbarrier_wait(full + 8 * stage, parity);
          attend(first, base + stage * kStageBytes + kWarpgroup * kHead, head);
          if (head != 3 * kWarpgroup) release(Number<1>());
          before = stage;
          advance();
        };
        next(Number<kFirst>(), 3 * kWarpgroup);
        next(Number<kFirst + 4>(), 3 * kWarpgroup + 1);
        if (kWarpgroup == 0) {
          next(Number<8>(), 2);
        } else {
          release(Number<0>());
          mbarrier_wait(full + 8 * stage, parity);  // or it would be released before it is full
          before = stage;
          advance();
        }
        release(Number<0>());
      };

      const int own = member * 32 + lane;
      if (warpgroup == 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(handed[i][own])), "r"(query[i][0]),
                       "r"(query[i][1]), "r"(query[i][2]), "r"(query[i][3])
                       : "memory");
        asm volatile("bar.arrive 1, %0;" ::"n"(kConsumerThreads) : "memory");
        attend_all(Number<1>());
      } else {
        asm volatile("bar.sync 1, %0;" ::"n"(kConsumerThreads) : "memory");
#pragma unroll
        for (int i = 10; i < 12; ++i)
          asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(query[i][0]), "=r"(query[i][1]), "=r"(query[i][2]), "=r"(query[i][3])
                       : "r"(smem_address(handed[i - 10][own]))
                       : "memory");
        attend_all(Number<0>());
      }
    }
  }
}
