// A linear layer and the GEGLU of its result as one product, for Hopper: the gates never reach memory.
//
// Tiles are 128 rows of x by WIDTH / 2 values and as many gates. One warp sends the copy engine for them, 64 terms of the
// sum at a time, into a ring of STAGES slots. Two groups of four warps take tiles in turn: while one finishes its tile, the
// other multiplies (CUTLASS calls it ping-pong). Blocks compute tiles until there are none left.
//
// What is given: WIDTH; STAGES; PAIR, how many blocks, with rows next to each other, share what they load of the weight,
// 1 or 2; GATE_FIRST, whether the gates are the first half of the weight's rows; TANH, whether GELU is the one by tanh;
// BF16.

#include "hopper.h"

constexpr int kHalves = 2, kRows = 64 * kHalves, kDepth = 64, kThreads = 3 * 128;
constexpr int kOut = WIDTH / 2, kSums = WIDTH / 2, kGates = kSums / 2;  // columns of a tile; sums of a thread and 64 rows
constexpr int kRowBytes = kRows * 128, kPart = kOut * 128, kStage = kRowBytes + 2 * kPart;
constexpr int kChunk = 32, kPitch = 2 * kChunk + 16;  // columns that a warp writes at a time, bytes from row to row

// To the same place in all blocks of a pair.
__device__ __forceinline__ void copy(u32 mine, u32 to, const TensorMap* map, u32 barrier, int term, int row, int half) {
#if PAIR > 1
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %7, 0;\n"
      "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3, %4}], [%5], %6; }" ::"r"(to),
      "l"(map), "r"(term), "r"(row), "r"(half), "r"(barrier), "h"((unsigned short)((1 << PAIR) - 1)), "r"(mine)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5]; }" ::"r"(to),
      "l"(map), "r"(term), "r"(row), "r"(half), "r"(barrier), "r"(mine)
      : "memory");
#endif
}

__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float gelu(float x) {
#if TANH
  const float u = x * fmaf(x * x, 0.044715f, 1.f);
  return x * inverse(1.f + exp_2(u * (-2.f * 0.7978845608f * 1.4426950409f)));
#else
  // x - x times the upper tail of the normal distribution; that by Abramowitz and Stegun 7.1.26, to 1e-7
  const float s = fminf(fabsf(x), 16.f), t = inverse(fmaf(s, 0.3275911f * 0.7071067812f, 1.f));
  float p = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
  p = fmaf(p, t, 0.5f * 1.421413741f);
  p = fmaf(p, t, 0.5f * -0.284496736f);
  p = fmaf(p, t, 0.5f * 0.254829592f);
  return fmaf(-s * t * p, exp_2(x * x * (-0.5f * 1.4426950409f)), fmaxf(x, 0.f));
#endif
}

// x: a map over (rows, terms), boxes of 128 by 64. weight: over (2, columns, terms), boxes of (1, WIDTH / 2, 64). out
// (rows, columns), bias (2 columns) or null. steps: terms / 64. tiles_down: of rows, by PAIR; tiles_across: of columns.
extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(PAIR, 1, 1)
    linear_geglu(unsigned short* out, const unsigned short* bias, const __grid_constant__ TensorMap x,
                 const __grid_constant__ TensorMap weight, int steps, int rows, int columns, int tiles_down,
                 int tiles_across) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES + 2];
  const u32 base = (address(shared) + 1023) & ~1023u, staging = base + STAGES * kStage;
  const u32 full = address(barriers), free = full + 8 * STAGES, order = free + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  u32 rank = 0;
  if (PAIR > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));

  if (threadIdx.x == 0) {
    initialise_ring(full, free, STAGES, 4 * PAIR);
    initialise(order, 4);
    initialise(order + 8, 4);
    initialised();
    next_may_begin();
  }
  if (PAIR > 1)
    meet();
  else
    __syncthreads();

  const int tiles = tiles_down * tiles_across;
  auto place = [&](int tile, int& row, int& column) {  // of the same rows they follow each other
    row = (tile / tiles_across * PAIR + (PAIR > 1 ? int(rank) : 0)) * kRows;
    column = tile % tiles_across * kOut;
  };

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 8) {
      const u32 mine = elected();
      u32 slot = 0, parity = 1;
      auto bring_weight = [&](int step, u32 slot, int column) {
        const u32 barrier = full + 8 * slot;
        expect(mine, barrier, kStage);
#pragma unroll
        for (int i = 0; i < 2 / PAIR; ++i) {
          const int half = PAIR > 1 ? rank : i;
          copy(mine, base + slot * kStage + kRowBytes + half * kPart, &weight, barrier, step * kDepth, column, half);
        }
      };
      const int first_tile = blockIdx.x / PAIR, ahead = min(STAGES, steps);
      int row, column;
      place(first_tile, row, column);
      for (int step = 0; step < ahead; ++step) bring_weight(step, step, column);
      after_previous();
      for (int tile = first_tile; tile < tiles; tile += gridDim.x / PAIR) {
        place(tile, row, column);
        for (int step = 0; step < steps; ++step) {
          if (tile != first_tile || step >= ahead) {
            wait(free + 8 * slot, parity);
            bring_weight(step, slot, column);
          }
          copy(mine, base + slot * kStage, &x, full + 8 * slot, step * kDepth, row);
          if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    after_previous();
    const int group = __shfl_sync(~0u, warp >> 2, 0);
    float sum[kHalves][kSums];
    u32 used = 0, previous = 0;  // slots so far, by both groups
    int turn = 0, done = 0;  // whose tile it is; tiles of this group
    for (int tile = blockIdx.x / PAIR; tile < tiles; tile += gridDim.x / PAIR, turn ^= 1) {
      if (turn != group) {
        used += steps;
        continue;
      }
      int row, column;
      place(tile, row, column);
      u32 slot = used % STAGES, parity = used / STAGES & 1;
      used += steps;
      // a slot's barrier tells two fillings apart, no more: whoever waits at one must be next
      if (group > 0 || done > 0) wait(order + 8 * group, (done - 1 + group) & 1);
      ++done;
      for (int step = 0; step < steps; ++step) {
        wait(full + 8 * slot, parity);
        pin(sum);
        open();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k)
#pragma unroll
          for (int half = 0; half < kHalves; ++half)
            multiply(sum[half], operand(base + slot * kStage + half * 64 * 128 + 32 * k),
                     operand(base + slot * kStage + kRowBytes + 32 * k), step + k);
        close();
        await<1>();
        if (step > 0 && lane < PAIR) arrive(free + 8 * previous, lane);
        previous = slot;
        if (++slot == STAGES) {
          slot = 0;
          parity ^= 1;
        }
      }
      if (lane == 0) arrive(order + 8 * (1 - group), rank);
      await<0>();
      pin(sum);
      if (lane < PAIR) arrive(free + 8 * previous, lane);

      const u32 own = staging + warp * 16 * kPitch;
      constexpr int kLanes = kChunk / 8, kEach = 32 / kLanes;  // lanes of a row; rows that a warp writes at once
      constexpr int kValue = GATE_FIRST ? kGates : 0, kGate = GATE_FIRST ? 0 : kGates;
#pragma unroll
      for (int first = 0; first < kOut; first += kChunk) {
        float2 added[kChunk / 8], opened[kChunk / 8];  // to values, to gates
#pragma unroll
        for (int j = 0; j < kChunk / 8 && first + 8 * j < kOut; ++j) {
          const int at = column + first + 8 * j + 2 * (lane & 3);
          added[j] = opened[j] = make_float2(0.f, 0.f);
          if (bias != nullptr && at < columns) {
            added[j] = unpacked(*(const u32*)(bias + (GATE_FIRST ? columns + at : at)));
            opened[j] = unpacked(*(const u32*)(bias + (GATE_FIRST ? at : columns + at)));
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
              two[i] = packed((sum[half][kValue + s] + added[n].x) * gelu(sum[half][kGate + s] + opened[n].x),
                              (sum[half][kValue + s + 1] + added[n].y) * gelu(sum[half][kGate + s + 1] + opened[n].y));
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
  if (PAIR > 1) meet();  // none ends while the other still sends to it
}
