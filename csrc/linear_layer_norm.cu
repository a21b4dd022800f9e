// A linear layer, what is added to its result, and the layer norm of the sum, as one kernel, for Hopper.
//
// Tiles are ROWS rows of x by WIDTH columns, PARTS of which make a row. One warp sends the copy engine for operands, 64
// terms of the sum at a time, into a ring of STAGES slots; one group of four warps for each 64 rows multiplies; three warps
// bring what the tile's end needs. A row's mean and variance are those of its parts together: each block leaves what it
// knows of its tile's rows for the blocks beside it, writes the sum, and by then finds what they have left. Such a record
// holds a number beside every value, one more than at the launch before: who reads them sees whether they are there yet,
// and nothing is to be cleared. Blocks that wait for each other follow each other in the grid, and blocks begin in that
// order: those of a row, twice as many in pairs, always get on.
//
// What is given: ROWS, 64, 128 or 192; WIDTH; PARTS; STAGES; PAIR, how many blocks, with rows next to each other, share what
// they load of the weight, 1 or 2; BF16.

#include "hopper.h"

constexpr int kDepth = 64, kMultiply = 2 * ROWS, kThreads = kMultiply + 128;  // threads that multiply, and all
constexpr int kRowBytes = ROWS * 128, kStage = kRowBytes + WIDTH * 128;
constexpr int kSums = WIDTH / 2, kColumns = WIDTH * PARTS;  // sums of a thread; columns of the result
// Columns of a box of what is added or written; bytes of its rows, which are swizzled over that width, and of all of it.
constexpr int kChunk = WIDTH % 32 ? 16 : 32, kLine = 2 * kChunk, kBox = ROWS * kLine;
constexpr int kHelpers = 96;  // threads that bring what the tile's end needs
constexpr int kRegisters = ROWS == 64 ? 216 : ROWS == 128 ? 232 : 152;  // of a thread that multiplies

enum { kAfter, kFactor, kOffset, kVectors };
constexpr int kBrought = 2, kUsed = 3, kGroup = 4;  // barriers: all of that is there; it is needed no more; of a group

__device__ __forceinline__ void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// From shared memory to where the map says.
__device__ __forceinline__ void copy_back(const TensorMap* map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column),
               "r"(row), "r"(from)
               : "memory");
}

// What this thread has copied back lies no more where it lay.
__device__ __forceinline__ void copied_back() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

// What a block knows of a row: each of two values beside the number of the launch, so that neither is read without it.
struct Record {
  u32 mean, launch, deviations, launch_again;
};

__device__ __forceinline__ void leave(Record* to, float mean, float deviations, u32 launch) {
  const u64 one = u64(launch) << 32 | __float_as_uint(mean), other = u64(launch) << 32 | __float_as_uint(deviations);
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(one), "l"(other) : "memory");
}

__device__ __forceinline__ bool found(const Record* from, float& mean, float& deviations, u32 launch) {
  u64 one, other;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(one), "=l"(other) : "l"(from) : "memory");
  mean = __uint_as_float(u32(one));
  deviations = __uint_as_float(u32(other));
  return u32(one >> 32) == launch && u32(other >> 32) == launch;
}

// Of the four lanes that share a row.
__device__ __forceinline__ float summed(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// x: a map over (rows, terms), boxes of ROWS by 64. weight: over (columns, terms), boxes of WIDTH / PAIR by 64. total and
// out: over (rows, columns), boxes of 64 by kChunk, for the sum, plus `after` where that is not null, and the norm of the
// sum before it. residual: alike, boxes of ROWS by kChunk, where it `has_residual`. Vectors (columns) or null. records
// (PARTS, tiles_down * PAIR * ROWS): zeros, or as a launch of the same sizes left them. steps: of 64 terms; tiles_down: of
// rows, by PAIR.
extern "C" __global__ void __launch_bounds__(kThreads, ROWS == 64 ? 2 : 1) __cluster_dims__(PAIR, 1, 1)
    linear_layer_norm(const __grid_constant__ TensorMap total, const __grid_constant__ TensorMap out,
                      const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                      const __grid_constant__ TensorMap residual, int has_residual, const unsigned short* bias,
                      const unsigned short* after, const unsigned short* factor, const unsigned short* offset,
                      Record* records, float eps, int steps, int tiles_down) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES + 1];
  __shared__ alignas(4) unsigned short vectors[kVectors][WIDTH];
  const u32 base = (address(shared) + 1023) & ~1023u, tile_at = base + STAGES * kStage;
  const u32 full = address(barriers), free = full + 8 * STAGES, brought = free + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  u32 rank = 0;
  if (PAIR > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));

  if (threadIdx.x == 0) {
    initialise_ring(full, free, STAGES, kMultiply / 32 * PAIR);
    initialise(brought, 1);
    initialised();
  }
  if (threadIdx.x == 0) next_may_begin();
  if (warp == kMultiply / 32 && elected()) {
    prefetch(&x);
    prefetch(&weight);
  }
  if (PAIR > 1)
    meet();
  else
    __syncthreads();

  const int all_rows = tiles_down * PAIR * ROWS, tiles = tiles_down * PARTS;
  const int first_tile = blockIdx.x / PAIR, stride = gridDim.x / PAIR;
  // tiles of the same rows follow each other
  auto down = [&](int tile) { return (tile / PARTS * PAIR + (PAIR > 1 ? int(rank) : 0)) * ROWS; };

  if (warp >= kMultiply / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == kMultiply / 32) {
      const u32 mine = elected();
      u32 slot = 0, parity = 1;
      auto bring_weight = [&](int tile, int step, u32 slot) {
        const u32 barrier = full + 8 * slot, to = base + slot * kStage + kRowBytes;
        const int column = tile % PARTS * WIDTH, part = rank * (WIDTH / PAIR);
        expect(mine, barrier, kStage);
        if (PAIR > 1)
          copy_to_both(mine, to + part * 128, &weight, barrier, step * kDepth, column + part);
        else
          copy(mine, to, &weight, barrier, step * kDepth, column);
      };
      const int ahead = min(STAGES, steps);
      for (int step = 0; step < ahead; ++step) bring_weight(first_tile, step, step);
      after_previous();
      for (int tile = first_tile; tile < tiles; tile += stride) {
        for (int step = 0; step < steps; ++step) {
          if (tile != first_tile || step >= ahead) {
            wait(free + 8 * slot, parity);
            bring_weight(tile, step, slot);
          }
          copy(mine, base + slot * kStage, &x, full + 8 * slot, step * kDepth, down(tile));
          if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
          }
        }
      }
    } else {
      after_previous();
      const int helper = threadIdx.x - kMultiply - 32;
      for (int tile = first_tile; tile < tiles; tile += stride) {
        if (tile != first_tile) asm volatile("bar.sync %0, %1;" ::"n"(kUsed), "n"(kMultiply + kHelpers) : "memory");
        const int top = down(tile), column = tile % PARTS * WIDTH;
        if (has_residual && helper == 0) {
          expect(1, brought, WIDTH / kChunk * kBox);
#pragma unroll
          for (int i = 0; i < WIDTH / kChunk; ++i)
            copy(1, tile_at + i * kBox, &residual, brought, column + i * kChunk, top);
        }
        for (int i = helper; i < WIDTH / 2; i += kHelpers) {
          const unsigned short* from[kVectors] = {after, factor, offset};
          u32 two[kVectors];
#pragma unroll
          for (int j = 0; j < kVectors; ++j) {
            two[j] = j == kFactor ? packed(1.f, 1.f) : 0u;
            if (from[j] != nullptr) two[j] = __ldg((const u32*)(from[j] + column) + i);
          }
#pragma unroll
          for (int j = 0; j < kVectors; ++j) *(u32*)&vectors[j][2 * i] = two[j];
        }
        asm volatile("bar.arrive %0, %1;" ::"n"(kBrought), "n"(kMultiply + kHelpers) : "memory");
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    after_previous();
    const int group = __shfl_sync(~0u, warp >> 2, 0);
    auto look = [&](int which, int n) {  // columns 8 n + 2 (lane % 4) and the next
      return *(const u32*)&vectors[which][8 * n + 2 * (lane & 3)];
    };
    auto group_meets = [&] { asm volatile("bar.sync %0, 128;" ::"r"(kGroup + group) : "memory"); };
    float sum[kSums];
    u32 slot = 0, parity = 0, previous = 0, tile_parity = 0;
    for (int tile = first_tile; tile < tiles; tile += stride, tile_parity ^= 1) {
      const int part = tile % PARTS, top = down(tile) + warp * 16;
      Record* record = records + top + lane / 4;  // of rows lane / 4 and 8 more, by the first of their parts
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
        wait(full + 8 * slot, parity);
        pin(sum);
        open();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k)
          multiply(sum, operand(base + slot * kStage + group * 64 * 128 + 32 * k),
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
      asm volatile("bar.sync %0, %1;" ::"n"(kBrought), "n"(kMultiply + kHelpers) : "memory");
      if (has_residual) wait(brought, tile_parity);
      await<0>();
      pin(sum);
      if (lane < PAIR) arrive(free + 8 * previous, lane);
      ++launch;

      auto place = [&](int n) {  // of columns 8 n to 8 n + 15 of this warp's rows, for the instructions that move them
        const int row = warp * 16 + (lane & 15), slot = n % (kChunk / 8) + (lane >> 4);
        const int turned = slot ^ (kChunk == 32 ? row >> 1 & 3 : row >> 2 & 1);
        return tile_at + n / (kChunk / 8) * kBox + row * kLine + turned * 16;
      };
      auto put = [&](int n, const u32 (&two)[4]) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place(n)), "r"(two[0]),
                     "r"(two[1]), "r"(two[2]), "r"(two[3])
                     : "memory");
      };
      // Each warp sends some boxes of its group's rows, once all lanes have shown theirs.
      auto send = [&](const TensorMap* to) {
        group_meets();
        if (lane == 0)
#pragma unroll
          for (int i = 0; i < WIDTH / kChunk; i += 4)
            if (i + (warp & 3) < WIDTH / kChunk)
              copy_back(to, tile_at + (i + (warp & 3)) * kBox + group * 64 * kLine,
                        part * WIDTH + (i + (warp & 3)) * kChunk, top - (warp & 3) * 16);
      };

      u32 pairs[WIDTH / 16][4];
      if (has_residual) {
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 2) {  // all under way before the first is waited for
          u32 (&two)[4] = pairs[n / 2];
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                       : "=r"(two[0]), "=r"(two[1]), "=r"(two[2]), "=r"(two[3])
                       : "r"(place(n)));
        }
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i) {
          const float2 one = unpacked(pairs[i / 4][i % 4]);
          sum[2 * i] += one.x;
          sum[2 * i + 1] += one.y;
        }
      }
#pragma unroll
      for (int i = 0; i < WIDTH / 4; ++i) {
        const float2 added = unpacked(biases[i / 2]);
        pairs[i / 4][i % 4] = packed(sum[2 * i] + added.x, sum[2 * i + 1] + added.y);
        const float2 rounded = unpacked(pairs[i / 4][i % 4]);  // what is normalised
        sum[2 * i] = rounded.x;
        sum[2 * i + 1] = rounded.y;
      }
      if (after != nullptr) {
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i) {
          const float2 later = unpacked(look(kAfter, i / 2));
          pairs[i / 4][i % 4] = packed(sum[2 * i] + later.x, sum[2 * i + 1] + later.y);
        }
      }
#pragma unroll
      for (int n = 0; n < WIDTH / 8; n += 2) put(n, pairs[n / 2]);
      show_to_copies();

      // means first, then deviations from them: exact, and what lies in registers is read twice for nothing
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float s[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n) {
          s[n % 2] += sum[4 * n + 2 * h];
          s[n % 2 + 2] += sum[4 * n + 2 * h + 1];
        }
        const float mean = summed((s[0] + s[1]) + (s[2] + s[3])) * (1.f / WIDTH);
#pragma unroll
        for (int n = 0; n < WIDTH / 8; ++n) {
          const float a = sum[4 * n + 2 * h] - mean, b = sum[4 * n + 2 * h + 1] - mean;
          d[n % 2] = fmaf(a, a, d[n % 2]);
          d[n % 2 + 2] = fmaf(b, b, d[n % 2 + 2]);
        }
        const float deviations = summed((d[0] + d[1]) + (d[2] + d[3]));
        if ((lane & 3) == 0) leave(record + part * all_rows + h * 8, mean, deviations, launch);
      }

      send(&total);

      u32 factors[WIDTH / 8], offsets[WIDTH / 8];
#pragma unroll
      for (int n = 0; n < WIDTH / 8; ++n) {
        factors[n] = look(kFactor, n);
        offsets[n] = look(kOffset, n);
      }
      constexpr int kParts = (PARTS + 3) / 4;  // that a lane reads of each row
      float mean[2][kParts], deviations[2][kParts], scales[2], shifts[2];
      bool there;
      do {
        there = true;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int i = 0; i < kParts; ++i)
            there &= found(record + min(4 * i + (lane & 3), PARTS - 1) * all_rows + h * 8, mean[h][i],
                           deviations[h][i], launch);
      } while (!there);
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float all = 0.f, squares = 0.f;
#pragma unroll
        for (int i = 0; i < kParts; ++i) all += 4 * i + (lane & 3) < PARTS ? mean[h][i] : 0.f;
        all = summed(all) * (1.f / PARTS);
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
          const float apart = mean[h][i] - all;
          squares += 4 * i + (lane & 3) < PARTS ? fmaf(apart * apart, float(WIDTH), deviations[h][i]) : 0.f;
        }
        scales[h] = rsqrtf(summed(squares) * (1.f / kColumns) + eps);
        shifts[h] = -all * scales[h];
      }
      if (lane == 0) copied_back();
      group_meets();
#pragma unroll
      for (int n = 0; n < WIDTH / 8; n += 2) {
        u32 (&two)[4] = pairs[n / 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* of = sum + 4 * (n + (i >> 1)) + 2 * (i & 1);
          const float2 times = unpacked(factors[n + (i >> 1)]), plus = unpacked(offsets[n + (i >> 1)]);
          two[i] = packed(fmaf(fmaf(of[0], scales[i & 1], shifts[i & 1]), times.x, plus.x),
                          fmaf(fmaf(of[1], scales[i & 1], shifts[i & 1]), times.y, plus.y));
        }
        put(n, two);
      }
      show_to_copies();
      send(&out);
      if (lane == 0) copied_back();
      __syncwarp();
      if (tile + stride < tiles) asm volatile("bar.arrive %0, %1;" ::"n"(kUsed), "n"(kMultiply + kHelpers) : "memory");
    }
  }
  if (PAIR > 1) meet();  // none ends while the other still sends to it
}
