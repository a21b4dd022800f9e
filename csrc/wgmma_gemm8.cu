// A linear layer on 8-bit operands, for Hopper: out = x_scale[row] * weight_scale[column] * sum + bias, plus a residual
// or through GEGLU, rounded once.
//
// Tiles are 128 rows of x (M) by WIDTH columns (N). A producer warp fills a ring of STAGES shared memory stages by TMA,
// 128 of K, which are 128 bytes, at a time. With TEAM 1 two consumer warpgroups alternate tiles, one in its epilogue
// while the other is in its mainloop (CUTLASS' ping-pong schedule). With TEAM 2 each has 64 rows of every tile. Blocks
// are persistent. Each consumer warpgroup has a buffer of 64 rows in shared memory: the residual arrives there during
// the mainloop, is replaced by the result in place, and that is stored by TMA. Scales of columns and the bias arrive in
// shared memory in the meantime too. The residual may be the memory of the result: a block reads what it overwrites.
//
// Compile-time parameters: KIND, the type of the operands, see hopper.h; EPILOGUE, 0, 1 with residual, 2 GEGLU: half of
// a tile's columns are values, the other half their gates, from the two halves of the weight's rows; WIDTH; STAGES;
// TEAM; PAIR, 1 or 2, blocks of a cluster with neighbouring rows that share the weight by TMA multicast; GATE_FIRST,
// whether the gates are the first half of the weight's rows; TANH, GELU by tanh instead of erf; BF16, the type of the
// result, the bias and the residual.

#include "hopper.h"
#include "hopper_gelu.h"

enum { kPlain, kResidual, kGeglu };

constexpr int kBlockM = 128, kBlockK = 128, kThreads = 3 * 128;
constexpr int kHalves = 2 / TEAM;  // 64 rows each of a tile that a consumer warpgroup has
constexpr int kOut = EPILOGUE == kGeglu ? WIDTH / 2 : WIDTH, kParts = WIDTH / kOut;  // output columns of a tile
constexpr int kSums = WIDTH / 2;                                                     // of a thread for 64 rows
constexpr int kInputBytes = kBlockM * 128, kPart = WIDTH / 2 * 128, kStageBytes = kInputBytes + 2 * kPart;
// Boxes of the residual and of the result: columns, bytes of a row (also the swizzle width), bytes in all.
constexpr int kChunk = kOut % 32 ? 16 : 32, kLine = 2 * kChunk, kBox = 64 * kLine;
constexpr int kBuffer = 64 * 2 * kOut;                    // bytes of a consumer warpgroup's buffer
constexpr int kBiases = 4 * WIDTH, kVectors = 6 * WIDTH;  // offset of the bias after the scales; bytes of both
constexpr int kWarpgroup = 1;                             // named barriers of the consumer warpgroups, 1 and 2
static_assert(kOut % kChunk == 0 && kBuffer % 1024 == 0 && kPart % 1024 == 0, "swizzles begin at multiples of 1 KB");

// What the results of two columns are scaled by, and what is added.
struct Column {
  float2 scale;
  u32 bias;
};

// out: tensor map over (rows, columns), boxes of 64 by kChunk. x: over (rows, K), boxes of 128 by 128. weight: over
// (kParts columns, K), boxes of WIDTH / 2 by 128. residual: as out, if EPILOGUE is 1. x_scale (rows), weight_scale
// (kParts columns), bias (kParts columns) or null. columns: a multiple of 8. steps: K tiles. tiles_down: M tiles /
// PAIR; tiles_across: N tiles.
extern "C" __global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(PAIR, 1, 1)
    wgmma_gemm8(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap x,
                const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap residual,
                const float* x_scale, const float* weight_scale, const unsigned short* bias, int steps, int rows,
                int columns, int tiles_down, int tiles_across) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES + 4];
  const u32 base = (smem_address(shared) + 1023) & ~1023u;
  const u32 full = smem_address(barriers), empty = full + 8 * STAGES, order = empty + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  u32 rank = 0;
  if (PAIR > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));

  if (threadIdx.x == 0) {
    mbarrier_init_ring(full, empty, STAGES, 4 * TEAM * PAIR);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(order + 8 * i, 4);
      mbarrier_init(order + 16 + 8 * i, 1);
    }
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == 8) {
      const u32 elected = elect_one();
      u32 stage = 0, parity = 1;
      if (elected) {
        prefetch(&x);
        prefetch(&weight);
      }
      __syncwarp();
      // of values that the last tile has too many there are gates instead, of columns that are not stored
      auto part_from = [&](int column, int part) { return column + part * (EPILOGUE == kGeglu ? columns : WIDTH / 2); };
      int row, column;
      place(blockIdx.x / PAIR, row, column);
      for (int step = 0; step < min(steps, STAGES); ++step)
#pragma unroll
        for (int i = 0; i < 2 / PAIR; ++i)
          tma_prefetch(elected, &weight, step * kBlockK, part_from(column, PAIR > 1 ? rank : i));
      pdl_wait();  // the weight too is written in a plan
      for (int tile = blockIdx.x / PAIR; tile < tiles; tile += gridDim.x / PAIR) {
        place(tile, row, column);
        for (int step = 0; step < steps; ++step) {
          const u32 barrier = full + 8 * stage, to = base + stage * kStageBytes;
          mbarrier_wait(empty + 8 * stage, parity);
          mbarrier_arrive_expect_tx(elected, barrier, kStageBytes);
          tma_load(elected, to, &x, barrier, step * kBlockK, row);
#pragma unroll
          for (int i = 0; i < 2 / PAIR; ++i) {
            const int part = PAIR > 1 ? rank : i;
            const int from = part_from(column, part);
            if (PAIR > 1)
              tma_load_multicast(elected, to + kInputBytes + part * kPart, &weight, barrier, step * kBlockK, from);
            else
              tma_load(elected, to + kInputBytes + part * kPart, &weight, barrier, step * kBlockK, from);
          }
          if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    if (threadIdx.x == 0) {
      prefetch(&out);
      if (EPILOGUE == kResidual) prefetch(&residual);
    }
    __syncwarp();
    pdl_wait();
    const int warpgroup = __shfl_sync(~0u, warp >> 2, 0);
    const u32 buffer = base + STAGES * kStageBytes + warpgroup * kBuffer;
    const u32 vectors = base + STAGES * kStageBytes + 2 * kBuffer + warpgroup * kVectors;
    const u32 ready = order + 16 + 8 * warpgroup;  // what the epilogue reads is in shared memory
    const bool issuer = (warp & 3) == 0 && lane == 0;
    auto warpgroup_sync = [&] { asm volatile("bar.sync %0, 128;" ::"r"(kWarpgroup + warpgroup) : "memory"); };
    auto at = [&](int n) {  // smem address for ldmatrix and stmatrix of columns 8 n to 8 n + 15 of this warp's rows
      const int row = (warp & 3) * 16 + (lane & 15), chunk = n % (kChunk / 8) + (lane >> 4);
      const int swizzled = chunk ^ (kChunk == 32 ? row >> 1 & 3 : row >> 2 & 1);
      return buffer + n / (kChunk / 8) * kBox + row * kLine + swizzled * 16;
    };

    if (bias == nullptr) {
      for (int i = threadIdx.x & 127; i < WIDTH / 2; i += 128)
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(vectors + kBiases + 4 * i), "r"(0) : "memory");
      warpgroup_sync();
    }
    Sum sum[kHalves][kSums];
    u32 used = 0, previous = 0, ready_parity = 0;  // stages so far, by both warpgroups
    int turn = 0, done = 0;                        // whose tile it is; tiles this warpgroup has done
    for (int tile = blockIdx.x / PAIR; tile < tiles; tile += gridDim.x / PAIR, turn ^= 1) {
      if (TEAM == 1 && turn != warpgroup) {
        used += steps;
        continue;
      }
      int top, column;
      place(tile, top, column);
      if (TEAM > 1) top += warpgroup * 64;
      const int left = min(columns - column, kOut), boxes = (left + kChunk - 1) / kChunk;
      auto load_residual = [&](int half) {
        for (int i = 0; i < boxes; ++i)
          tma_load(1, buffer + i * kBox, &residual, ready, column + i * kChunk, top + half * 64);
      };
      auto load_operands = [&] {  // by one thread; the others' reads of the last ones are behind a barrier
        tma_store_wait();
        const u32 of_columns = kParts * left * (bias == nullptr ? 4 : 6);
        mbarrier_arrive_expect_tx(1, ready, of_columns + (EPILOGUE == kResidual ? boxes * kBox : 0));
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const int from = part * columns + column;
          bulk_load(vectors + 4 * part * kOut, weight_scale + from, 4 * left, ready);
          if (bias != nullptr) bulk_load(vectors + kBiases + 2 * part * kOut, bias + from, 2 * left, ready);
        }
        if (EPILOGUE == kResidual) load_residual(0);
      };
      float row_scales[kHalves][2];
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = top + half * 64 + (warp & 3) * 16 + h * 8 + lane / 4;
          row_scales[half][h] = row < rows ? x_scale[row] : 0.f;
        }
      u32 stage = used % STAGES, parity = used / STAGES & 1;
      used += steps;
      if (TEAM == 1 && issuer) load_operands();
      __syncwarp();
      // an mbarrier's parity tells two phases apart, no more: only the next in order may wait on it
      if (TEAM == 1 && (warpgroup > 0 || done > 0)) mbarrier_wait(order + 8 * warpgroup, (done - 1 + warpgroup) & 1);
      ++done;
      for (int step = 0; step < steps; ++step) {
        mbarrier_wait(full + 8 * stage, parity);
        fence_operand(sum);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kBlockK / 32; ++k)
#pragma unroll
          for (int half = 0; half < kHalves; ++half)
            wgmma(sum[half],
                  wgmma_descriptor(base + stage * kStageBytes + (TEAM > 1 ? warpgroup : half) * 64 * 128 + 32 * k),
                  wgmma_descriptor(base + stage * kStageBytes + kInputBytes + 32 * k), step + k);
        wgmma_commit();
        // behind the first products: the stores of the tile before may still read the buffer
        if (TEAM > 1 && step == 0 && issuer) load_operands();
        __syncwarp();
        wgmma_wait<1>();
        if (step > 0 && lane < PAIR) mbarrier_arrive(empty + 8 * previous, lane);
        previous = stage;
        if (++stage == STAGES) {
          stage = 0;
          parity ^= 1;
        }
      }
      if (TEAM == 1 && lane == 0) mbarrier_arrive(order + 8 * (1 - warpgroup));
      wgmma_wait<0>();
      fence_operand(sum);
      if (lane < PAIR) mbarrier_arrive(empty + 8 * previous, lane);

#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        if (half == 0 || EPILOGUE == kResidual) {
          mbarrier_wait(ready, ready_parity);
          ready_parity ^= 1;
        } else {
          warpgroup_sync();  // the stores of the half before have read the buffer
        }
        u32 coming[4];  // of the residual, and the scales and biases of its columns: loaded one round ahead
        Column columns_coming[kParts][2];
        auto load = [&](int n) {
#pragma unroll
          for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int first = part * kOut + 8 * (n + i) + 2 * (lane & 3);
              columns_coming[part][i] = {load_two(vectors + 4 * first), load_one(vectors + kBiases + 2 * first)};
            }
          if (EPILOGUE == kResidual)
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                         : "=r"(coming[0]), "=r"(coming[1]), "=r"(coming[2]), "=r"(coming[3])
                         : "r"(at(n))
                         : "memory");
        };
        load(0);
#pragma unroll
        for (int n = 0; n < kOut / 8; n += 2) {
          Column here[kParts][2];
          u32 two[4];
#pragma unroll
          for (int i = 0; i < 2 * kParts; ++i) here[i / 2][i % 2] = columns_coming[i / 2][i % 2];
          if (EPILOGUE == kResidual)
#pragma unroll
            for (int i = 0; i < 4; ++i) two[i] = coming[i];
          if (n + 2 < kOut / 8) load(n + 2);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int h = i & 1;  // row 8 h + lane / 4, columns 8 (n + i / 2) + 2 (lane % 4) and the next
            auto value = [&](int part) {
              const float2 scale = here[part][i >> 1].scale, added = unpack(here[part][i >> 1].bias);
              const Sum* of = sum[half] + part * (kSums / 2) + 4 * (n + (i >> 1)) + 2 * h;
              return make_float2(fmaf(float(of[0]) * row_scales[half][h], scale.x, added.x),
                                 fmaf(float(of[1]) * row_scales[half][h], scale.y, added.y));
            };
            float2 y = value(EPILOGUE == kGeglu && GATE_FIRST);
            if (EPILOGUE == kGeglu) {
              const float2 gate = value(!GATE_FIRST);
              y = make_float2(y.x * gelu(gate.x), y.y * gelu(gate.y));
            } else if (EPILOGUE == kResidual) {
              const float2 more = unpack(two[i]);
              y = make_float2(y.x + more.x, y.y + more.y);
            }
            two[i] = pack(y.x, y.y);
          }
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at(n)), "r"(two[0]),
                       "r"(two[1]), "r"(two[2]), "r"(two[3])
                       : "memory");
        }
        fence_async_proxy();
        warpgroup_sync();
        if (issuer) {
          if (top + half * 64 < rows)
            for (int i = 0; i < boxes; ++i) tma_store(&out, buffer + i * kBox, column + i * kChunk, top + half * 64);
          if (half + 1 < kHalves) {
            tma_store_wait();
            if (EPILOGUE == kResidual) {
              mbarrier_arrive_expect_tx(1, ready, boxes * kBox);
              load_residual(half + 1);
            }
          }
        }
        __syncwarp();
      }
    }
    if (issuer) tma_store_wait();
  }
  if (PAIR > 1) cluster_sync_relaxed();  // no block may exit while the other multicasts to it
}
