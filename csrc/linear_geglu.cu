// A linear layer with GEGLU in the epilogue of its GEMM, for Hopper: the gates never reach global memory.
//
// Tiles are 128 rows of x (M) by WIDTH / 2 values and as many gates (N). A producer warp fills a ring of STAGES shared
// memory stages by TMA, 64 of K at a time. Two consumer warpgroups alternate tiles, one in its epilogue while the other
// is in its mainloop (CUTLASS' ping-pong schedule). Blocks are persistent.
//
// Compile-time parameters: WIDTH; STAGES; PAIR, 1 or 2, blocks of a cluster with neighbouring rows that share the
// weight by TMA multicast; GATE_FIRST, whether the gates are the first half of the weight's rows; TANH, GELU by tanh
// instead of erf; BF16.

#include "hopper.h"
#include "hopper_gelu.h"

constexpr int kHalves = 2, kBlockM = 64 * kHalves, kBlockK = 64, kThreads = 3 * 128;
constexpr int kOut = WIDTH / 2, kSums = WIDTH / 2,
              kGates = kSums / 2;  // output columns of a tile; accumulators of a thread for 64 rows
constexpr int kInputBytes = kBlockM * 128, kPart = kOut * 128, kStageBytes = kInputBytes + 2 * kPart;
constexpr int kChunk = 32, kPitch = 2 * kChunk + 16;  // columns a warp writes at a time; bytes between rows

// TMA load of a 3D box of the weight, multicast to the blocks of a pair.
__device__ __forceinline__ void tma_load(u32 elected, u32 to, const TensorMap* map, u32 barrier, int k, int row,
                                         int half) {
#if PAIR > 1
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %7, 0;\n"
      "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4}], [%5], %6; }" ::"r"(to),
      "l"(map), "r"(k), "r"(row), "r"(half), "r"(barrier), "h"((unsigned short)((1 << PAIR) - 1)), "r"(elected)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5]; }" ::"r"(to),
      "l"(map), "r"(k), "r"(row), "r"(half), "r"(barrier), "r"(elected)
      : "memory");
#endif
}

// x: tensor map over (M, K), boxes of 128 by 64. weight_map: over (2, columns, K), boxes of (1, WIDTH / 2, 64). out
// (rows, columns), bias (2 columns) or null. steps: K tiles. tiles_down: M tiles / PAIR; tiles_across: N tiles.
extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(PAIR, 1, 1)
    linear_geglu(unsigned short* out, const unsigned short* bias, const __grid_constant__ TensorMap x,
                 const __grid_constant__ TensorMap weight_map, int steps, int rows, int columns, int tiles_down,
                 int tiles_across) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES + 2];
  const u32 base = (smem_address(shared) + 1023) & ~1023u, staging = base + STAGES * kStageBytes;
  const u32 full = smem_address(barriers), empty = full + 8 * STAGES, order = empty + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  u32 rank = 0;
  if (PAIR > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));

  if (threadIdx.x == 0) {
    mbarrier_init_ring(full, empty, STAGES, 4 * PAIR);
    mbarrier_init(order, 4);
    mbarrier_init(order + 8, 4);
    fence_barrier_init();
    pdl_launch_dependents();
  }
  if (PAIR > 1)
    cluster_sync_relaxed();
  else
    __syncthreads();

  const int tiles = tiles_down * tiles_across;
  auto place = [&](int tile, int& row, int& column) {  // consecutive tiles share their rows
    row = (tile / tiles_across * PAIR + (PAIR > 1 ? int(rank) : 0)) * kBlockM;
    column = tile % tiles_across * kOut;
  };

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 8) {
      const u32 elected = elect_one();
      u32 stage = 0, parity = 1;
      auto load_weight = [&](int step, u32 stage, int column) {
        const u32 barrier = full + 8 * stage;
        mbarrier_arrive_expect_tx(elected, barrier, kStageBytes);
#pragma unroll
        for (int i = 0; i < 2 / PAIR; ++i) {
          const int half = PAIR > 1 ? rank : i;
          tma_load(elected, base + stage * kStageBytes + kInputBytes + half * kPart, &weight_map, barrier,
                   step * kBlockK, column, half);
        }
      };
      const int first_tile = blockIdx.x / PAIR, ahead = min(STAGES, steps);
      int row, column;
      place(first_tile, row, column);
      for (int step = 0; step < ahead; ++step) load_weight(step, step, column);
      pdl_wait();
      for (int tile = first_tile; tile < tiles; tile += gridDim.x / PAIR) {
        place(tile, row, column);
        for (int step = 0; step < steps; ++step) {
          if (tile != first_tile || step >= ahead) {
            mbarrier_wait(empty + 8 * stage, parity);
            load_weight(step, stage, column);
          }
          tma_load(elected, base + stage * kStageBytes, &x, full + 8 * stage, step * kBlockK, row);
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    pdl_wait();
    const int warpgroup = __shfl_sync(~0u, warp >> 2, 0);
    float sum[kHalves][kSums];
    u32 used = 0, previous = 0;  // stages so far, by both warpgroups
    int turn = 0, done = 0;      // whose tile it is; tiles this warpgroup has done
    for (int tile = blockIdx.x / PAIR; tile < tiles; tile += gridDim.x / PAIR, turn ^= 1) {
      if (turn != warpgroup) {
        used += steps;
        continue;
      }
      int row, column;
      place(tile, row, column);
      u32 stage = used % STAGES, parity = used / STAGES & 1;
      used += steps;
      // an mbarrier's parity tells two phases apart, no more: only the next in order may wait on it
      if (warpgroup > 0 || done > 0) mbarrier_wait(order + 8 * warpgroup, (done - 1 + warpgroup) & 1);
      ++done;
      for (int step = 0; step < steps; ++step) {
        mbarrier_wait(full + 8 * stage, parity);
        fence_operand(sum);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockK / 16; ++k)
#pragma unroll
          for (int half = 0; half < kHalves; ++half)
            wgmma(sum[half], wgmma_descriptor(base + stage * kStageBytes + half * 64 * 128 + 32 * k),
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
      if (lane == 0) mbarrier_arrive(order + 8 * (1 - warpgroup), rank);
      wgmma_wait<0>();
      fence_operand(sum);
      if (lane < PAIR) mbarrier_arrive(empty + 8 * previous, lane);

      const u32 own = staging + warp * 16 * kPitch;
      constexpr int kLanes = kChunk / 8, kEach = 32 / kLanes;  // lanes per row; rows per warp store
      constexpr int kValue = GATE_FIRST ? kGates : 0, kGate = GATE_FIRST ? 0 : kGates;
#pragma unroll
      for (int first = 0; first < kOut; first += kChunk) {
        float2 value_bias[kChunk / 8], gate_bias[kChunk / 8];
#pragma unroll
        for (int j = 0; j < kChunk / 8 && first + 8 * j < kOut; ++j) {
          const int at = column + first + 8 * j + 2 * (lane & 3);
          value_bias[j] = gate_bias[j] = make_float2(0.f, 0.f);
          if (bias != nullptr && at < columns) {
            value_bias[j] = unpack(*(const u32*)(bias + (GATE_FIRST ? columns + at : at)));
            gate_bias[j] = unpack(*(const u32*)(bias + (GATE_FIRST ? at : columns + at)));
          }
        }
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          __syncwarp();
#pragma unroll
          for (int j = 0; j < kChunk / 8 && first + 8 * j < kOut; j += 2) {
            u32 two[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int n = j + (i >> 1), s = 4 * (first / 8 + n) + 2 * (i & 1);
              two[i] =
                  pack((sum[half][kValue + s] + value_bias[n].x) * gelu(sum[half][kGate + s] + gate_bias[n].x),
                       (sum[half][kValue + s + 1] + value_bias[n].y) * gelu(sum[half][kGate + s + 1] + gate_bias[n].y));
            }
            const u32 to = own + (lane & 15) * kPitch + (j + (lane >> 4)) * 16;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(two[0]),
                         "r"(two[1]), "r"(two[2]), "r"(two[3])
                         : "memory");
          }
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 16 / kEach; ++i) {
            const int r = i * kEach + lane / kLanes, at = first + lane % kLanes * 8;
            const int to = row + half * 64 + (warp & 3) * 16 + r;
            uint4 eight;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(eight.x), "=r"(eight.y), "=r"(eight.z), "=r"(eight.w)
                         : "r"(own + r * kPitch + lane % kLanes * 16)
                         : "memory");
            if (at < kOut && to < rows && column + at < columns)
              *(uint4*)(out + (long long)to * columns + column + at) = eight;
          }
        }
      }
    }
  }
  if (PAIR > 1) cluster_sync_relaxed();  // no block may exit while the other multicasts to it
}
