// Attention over few keys, as a prompt has, and the linear layer that makes its queries, as one kernel, for Hopper: queries
// never reach memory.
//
// Tiles are 64 rows of x by five heads of 64 columns, of which two groups of four warps have a half each. One warp sends the
// copy engine for operands, 64 terms of the sum at a time, into a ring of STAGES slots, and then, through the same ring, for
// the heads' keys and values. The first group attends with two heads, and with the third once the other has handed it the
// half that it has; the second with two. What a head comes to goes back through where its keys lay.
//
// What is given: WIDTH, 160; STAGES, 3 or more; BF16.

#include "hopper.h"
#include "from_registers.h"

constexpr int kRows = 64, kDepth = 64, kGroups = 2, kMultiply = 128 * kGroups, kThreads = kMultiply + 128;
constexpr int kHeads = 5, kSize = 64, kColumns = kGroups * WIDTH;
constexpr int kRowBytes = kRows * 128, kStage = kRowBytes + kColumns * 128;
constexpr int kKeys = 80, kTile = kKeys * 128, kHead = 2 * kTile;  // bytes of a head's keys or values, and of both
constexpr int kMore = 3;  // slots for heads: two with one of each group, and one with the fifth
constexpr int kScores = kKeys / 2, kKeySteps = kKeys / 16;
static_assert(kColumns == kHeads * kSize && 2 * kHead <= kStage && kMore <= STAGES);

template <int N>
struct Number {
  static constexpr int value = N;
};

__device__ __forceinline__ void copy(u32 mine, u32 to, const TensorMap* map, u32 barrier, int term, int row, int image) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "@p cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5]; }" ::"r"(to),
      "l"(map), "r"(term), "r"(row), "r"(image), "r"(barrier), "r"(mine)
      : "memory");
}

__device__ __forceinline__ void copy_back(const TensorMap* map, u32 from, int column, int row, int image) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\n"
               "cp.async.bulk.commit_group;" ::"l"(map),
               "r"(column), "r"(row), "r"(image), "r"(from)
               : "memory");
}

// What this thread has copied back, but for the last of it, lies no more where it lay.
template <int LAST>
__device__ __forceinline__ void copied_back() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAST) : "memory");
}

// out: a map over (images, rows, columns), x: over (images, rows, terms), boxes of 64 by 64. weight: over (columns, terms),
// boxes of WIDTH by 64. k, v: over (images, keys, heads, 64), boxes of 80 keys of a head. scale: times log2(e). steps: of 64
// terms, not fewer than slots; down: tiles of an image's rows; tiles_across: of columns; tiles: all.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    query_attention(const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap x,
                    const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap k_map,
                    const __grid_constant__ TensorMap v_map, float scale, int keys, int steps, int down, int tiles_across,
                    int tiles) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  __shared__ alignas(16) u32 handed[2][128][4];
  const u32 base = (address(shared) + 1023) & ~1023u;
  const u32 full = address(barriers), free = full + 8 * STAGES;
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;

  if (threadIdx.x == 0) {
    initialise_ring(full, free, STAGES, kMultiply / 32);
    initialised();
    next_may_begin();
  }
  __syncthreads();

  auto place = [&](int tile, int& image, int& row, int& column) {  // of the same rows they follow each other
    image = tile / tiles_across / down;
    row = tile / tiles_across % down * kRows;
    column = tile % tiles_across;
  };

  if (warp >= kMultiply / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == kMultiply / 32) {
      const u32 mine = elected();
      u32 slot = 0, parity = 1;
      auto go_on = [&] {
        if (++slot == STAGES) {
          slot = 0;
          parity ^= 1;
        }
      };
      auto bring_weight = [&](int step, u32 slot, int column) {
        const u32 barrier = full + 8 * slot, to = base + slot * kStage + kRowBytes;
        expect(mine, barrier, kStage);
#pragma unroll
        for (int i = 0; i < kGroups; ++i)
          copy(mine, to + i * WIDTH * 128, &weight, barrier, step * kDepth, column * kColumns + i * WIDTH);
      };
      const int first_tile = blockIdx.x;
      int image, row, column;
      place(first_tile, image, row, column);
      for (int step = 0; step < STAGES; ++step) bring_weight(step, step, column);  // there are no fewer steps
      after_previous();
      for (int tile = first_tile; tile < tiles; tile += gridDim.x) {
        place(tile, image, row, column);
        for (int step = 0; step < steps; ++step, go_on()) {
          if (tile != first_tile || step >= STAGES) {
            wait(free + 8 * slot, parity);
            bring_weight(step, slot, column);
          }
          copy(mine, base + slot * kStage, &x, full + 8 * slot, step * kDepth, row, image);
        }
#pragma unroll
        for (int i = 0; i < kMore; ++i, go_on()) {
          wait(free + 8 * slot, parity);
          expect(mine, full + 8 * slot, (i < 2 ? 2 : 1) * kHead);
#pragma unroll
          for (int j = 0; j < (i < 2 ? 2 : 1); ++j) {
            const int head = column * kHeads + i + 3 * j;
            const u32 to = base + slot * kStage + j * kHead;
            copy(mine, to, &k_map, full + 8 * slot, 0, head, 0, image);
            copy(mine, to + kTile, &v_map, full + 8 * slot, 0, head, 0, image);
          }
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    after_previous();
    const int group = __shfl_sync(~0u, warp >> 2, 0), member = warp & 3;
    u32 slot = 0, parity = 0;
    auto go_on = [&] {
      if (++slot == STAGES) {
        slot = 0;
        parity ^= 1;
      }
    };
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      float sum[WIDTH / 2];
      u32 previous = 0;
      for (int step = 0; step < steps; ++step, go_on()) {
        wait(full + 8 * slot, parity);
        pin(sum);
        open();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k)
          multiply(sum, operand(base + slot * kStage + 32 * k),
                   operand(base + slot * kStage + kRowBytes + group * WIDTH * 128 + 32 * k), step + k);
        close();
        await<1>();
        if (step > 0 && lane == 0) arrive(free + 8 * previous);
        previous = slot;
      }
      await<0>();
      pin(sum);
      if (lane == 0) arrive(free + 8 * previous);

      // as results of products lie, so do operands of the next: 16 columns a step
      u32 query[WIDTH / 16 + 2][4];
#pragma unroll
      for (int i = 0; i < WIDTH / 4; ++i) query[i / 4][i % 4] = packed(sum[2 * i], sum[2 * i + 1]);
      int image, row, column;
      place(tile, image, row, column);
      // One head, of queries from a step on, whose keys and values lie at `at`.
      auto attend = [&](auto first, u32 at, int head) {
        float score[kScores], result[kSize / 2], total[2] = {0.f, 0.f};
        pin(score);
        open();
#pragma unroll
        for (int step = 0; step < kSize / 16; ++step)
          multiply<0>(score, query[decltype(first)::value + step], operand(at + 32 * step), step);
        close();
        await<0>();
        pin(score);

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
          total[i >> 1 & 1] += score[i];
        }
#pragma unroll
        for (int i = 0; i < kScores / 2; ++i) part[i / 4][i % 4] = packed(score[2 * i], score[2 * i + 1]);

        pin(result);
        open();
#pragma unroll
        for (int step = 0; step < kKeySteps; ++step)
          multiply<1>(result, part[step], operand(at + kTile + 16 * 128 * step), step);
        close();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          total[half] += __shfl_xor_sync(~0u, total[half], 1);
          total[half] += __shfl_xor_sync(~0u, total[half], 2);
          total[half] = 1.f / total[half];
        }
        await<0>();
        pin(result);

        asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");  // none reads these keys any more
#pragma unroll
        for (int n = 0; n < kSize / 8; n += 2) {
          u32 two[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            two[i] = packed(result[4 * n + 2 * i] * total[i & 1], result[4 * n + 2 * i + 1] * total[i & 1]);
          const int r = member * 16 + (lane & 15), eighth = n + (lane >> 4);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                           at + r * 128 + ((eighth ^ r) & 7) * 16),
                       "r"(two[0]), "r"(two[1]), "r"(two[2]), "r"(two[3])
                       : "memory");
        }
        show_to_copies();
        asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
        if (member == 0 && lane == 0) copy_back(&out, at, column * kColumns + head * kSize, row, image);
      };
      // The group's heads, slot by slot. A slot is left while the next head's result is copied back.
      auto attend_all = [&](auto whose) {
        constexpr int kGroup = decltype(whose)::value, kFirst = 2 * kGroup;
        u32 before = 0;
        auto leave = [&](auto last) {
          if (member == 0 && lane == 0) copied_back<decltype(last)::value>();
          __syncwarp();
          if (lane == 0) arrive(free + 8 * before);
        };
        auto next = [&](auto first, int head) {
          wait(full + 8 * slot, parity);
          attend(first, base + slot * kStage + kGroup * kHead, head);
          if (head != 3 * kGroup) leave(Number<1>());
          before = slot;
          go_on();
        };
        next(Number<kFirst>(), 3 * kGroup);
        next(Number<kFirst + 4>(), 3 * kGroup + 1);
        if (kGroup == 0) {
          next(Number<8>(), 2);
        } else {
          leave(Number<0>());
          wait(full + 8 * slot, parity);  // or it would be left before it is full
          before = slot;
          go_on();
        }
        leave(Number<0>());
      };

      const int own = member * 32 + lane;
      if (group == 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address(handed[i][own])), "r"(query[i][0]),
                       "r"(query[i][1]), "r"(query[i][2]), "r"(query[i][3])
                       : "memory");
        asm volatile("bar.arrive 1, %0;" ::"n"(kMultiply) : "memory");
        attend_all(Number<1>());
      } else {
        asm volatile("bar.sync 1, %0;" ::"n"(kMultiply) : "memory");
#pragma unroll
        for (int i = 10; i < 12; ++i)
          asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(query[i][0]), "=r"(query[i][1]), "=r"(query[i][2]), "=r"(query[i][3])
                       : "r"(address(handed[i - 10][own]))
                       : "memory");
        attend_all(Number<0>());
      }
    }
  }
}
