// Attention over many keys, for Hopper: softmax(q k^T * scale) v, in the manner of FlashAttention-3
// (https://arxiv.org/abs/2407.08608).
//
// A block of threads is GROUPS warp groups of 64 rows of queries each. Keys and values come by the copy engine, 64 at a
// time, into a ring of STAGES slots that the groups share; whoever's turn it is sends for the next. Scores stay in
// registers, where the layout of a product's result is that of a next product's operand. While a group takes its
// exponentials, its last product with values is still under way, and so are those of the other groups.
//
// What is given: SIZE, of a head, 40, 64 or 80; GROUPS; BLOCKS, that share a multiprocessor; STAGES; LAG, how many
// blocks of keys ago a slot must have been done with to be filled again, so at most STAGES - 2; SUM_BY_PRODUCT, whether
// rows are summed by a product with ones (four registers more, 32 additions less); BF16.

#include "hopper.h"
#include "from_registers.h"

#if BF16
#define TWO_ONES 0x3f803f80u
#else
#define TWO_ONES 0x3c003c00u
#endif

constexpr int kThreads = 128 * GROUPS;
constexpr int kKeys = 64;  // of a block
constexpr int kSteps = (SIZE + 15) / 16;  // a product takes 16 columns of queries at a time, zeros where there are none
constexpr int kKeySteps = kKeys / 16;
constexpr int kScores = kKeys / 2;
// Keys lie in shared memory as rows of 128 bytes, the widest that wgmma takes, what they have more of as rows of 32.
constexpr int kWide = 128, kNarrow = 32;
constexpr bool kSplit = SIZE > 64;
constexpr int kTile = kKeys * (kWide + (kSplit ? kNarrow : 0));
constexpr int kWideSteps = kSplit ? 4 : kSteps;
// The power of 2 that a probability may exceed 1 by before sums are scaled to a new maximum: rounding is relative.
constexpr float kSlack = 8.f;

// Rows in shared memory for wgmma: swizzled over their width, groups of eight of them following each other. `base` is
// where all tiles begin, in units of 16 bytes.
__device__ __forceinline__ u64 wide(u32 base, u32 bytes) { return u64(1u << 30 | 64) << 32 | (base + (bytes >> 4)); }
__device__ __forceinline__ u64 narrow(u32 base, u32 bytes) { return u64(3u << 30 | 16) << 32 | (base + (bytes >> 4)); }

// d (64, 8) += a (64, 16) b.
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
               : FOUR_OF(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The maximum of all four lanes that hold a row.
__device__ __forceinline__ float across(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// The most of each of the two rows that this thread has scores of. Where `positive`, what is not above 0 need not be
// right, but is some score: positive floats compare as integers do, of which Hopper takes three at a time.
__device__ __forceinline__ void highest(const float (&score)[kScores], bool positive, float (&top)[2]) {
  top[0] = score[0];
  top[1] = score[2];
  if (positive) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int bits = max(__float_as_int(score[2 * half]), __float_as_int(score[2 * half + 1]));
#pragma unroll
      for (int i = 4; i < kScores; i += 4)
        bits = __vimax3_s32(bits, __float_as_int(score[i + 2 * half]), __float_as_int(score[i + 2 * half + 1]));
      top[half] = __int_as_float(bits);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kScores; ++i) top[(i >> 1) & 1] = fmaxf(top[(i >> 1) & 1], score[i]);
  }
}

// q, out: strides in elements, of images, rows and heads. k and v: maps over (images, keys, heads, SIZE), boxes of 64
// keys by 128 bytes; k_rest and v_rest: by 32 bytes, where SIZE is more than 64. scale: times log2(e).
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    flash_attention(unsigned short* out, const unsigned short* q, const __grid_constant__ TensorMap k_map,
                    const __grid_constant__ TensorMap v_map,
#if SIZE > 64
                    const __grid_constant__ TensorMap k_rest, const __grid_constant__ TensorMap v_rest,
#endif
                    int heads, int queries, int keys, float scale, u64 q_image,
                    u64 q_row, u64 q_head, u64 out_image, u64 out_row, u64 out_head) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  const u32 tiles = (address(shared) + 1023) & ~1023u;
  const u32 base = 1 << 16 | tiles >> 4;
  const u32 full = address(barriers), free = full + 8 * STAGES;
  const int image = blockIdx.y / heads, head = blockIdx.y % heads;
  const int blocks = (keys + kKeys - 1) / kKeys;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);

#if SUM_BY_PRODUCT
  __shared__ alignas(128) u32 ones[64];
  if (threadIdx.x < 64) ones[threadIdx.x] = TWO_ONES;
  show_to_copies();
  const u64 all_ones = u64(8) << 32 | 8 << 16 | address(ones) >> 4;
  float total[4] = {0.f, 0.f, 0.f, 0.f};
#else
  float total[2] = {0.f, 0.f};
#endif

  auto load = [&](int block, u32 slot) {
    const u32 mine = elected(), at = tiles + slot * 2 * kTile, barrier = full + 8 * slot;
    expect(mine, barrier, 2 * kTile);
    copy(mine, at, &k_map, barrier, 0, head, block * kKeys, image);
    copy(mine, at + kTile, &v_map, barrier, 0, head, block * kKeys, image);
#if SIZE > 64
    copy(mine, at + kKeys * kWide, &k_rest, barrier, 64, head, block * kKeys, image);
    copy(mine, at + kTile + kKeys * kWide, &v_rest, barrier, 64, head, block * kKeys, image);
#endif
  };

  if (threadIdx.x == 0) {
    initialise_ring(full, free, STAGES, 4 * GROUPS);
    initialised();
    next_may_begin();
  }
  __syncthreads();
  after_previous();
  if (warp == 0)
    for (int i = 0; i < STAGES && i < blocks; ++i) load(i, i);

  // of a product's operands and results a thread has rows `row` and 8 below, of each 8 columns `column` and the next
  const int row = blockIdx.x * 64 * GROUPS + warp * 16 + (lane >> 2), column = 2 * (lane & 3);
  u32 query[kSteps][4];
  const unsigned short* from = q + image * q_image + head * q_head + column;
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = step * 16 + (i >> 1) * 8, r = row + (i & 1) * 8;
      query[step][i] = at < SIZE && r < queries ? *(const u32*)(from + r * q_row + at) : 0u;
    }

  float score[kScores], sum[(kSplit ? 64 : SIZE) / 2], rest[kSplit ? SIZE / 2 - 32 : 1];
  float most[2] = {-infinity(), -infinity()};
  u32 part[kKeySteps][4];
#pragma unroll
  for (float& x : sum) x = 0.f;
#pragma unroll
  for (float& x : rest) x = 0.f;

  auto scores = [&](u32 slot) {
    pin(score);
    open();
#pragma unroll
    for (int step = 0; step < kWideSteps; ++step)
      multiply<0>(score, query[step], wide(base, slot * 2 * kTile + 32 * step), step);
#if SIZE > 64
    multiply<0>(score, query[4], narrow(base, slot * 2 * kTile + kKeys * kWide), 1);
#endif
    close();
  };
  auto values = [&](u32 slot) {
    pin(sum);
    pin(rest);
    pin(total);
    open();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
      multiply<1>(sum, part[step], wide(base, slot * 2 * kTile + kTile + 16 * kWide * step), 1);
#if SIZE > 64
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
      multiply<1>(rest, part[step], narrow(base, slot * 2 * kTile + kTile + kKeys * kWide + 16 * kNarrow * step), 1);
#endif
#if SUM_BY_PRODUCT
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) multiply(total, part[step], all_ones);
#endif
    close();
  };

  u32 previous = STAGES - 1, slot = 0, next = 1, parity = 0;
  auto probabilities = [&](int block) {
    if (keys - block * kKeys < kKeys) {
      const int left = keys - block * kKeys - column;
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (8 * (i >> 2) + (i & 1) >= left) score[i] = -infinity();
    }
    float top[2], shrunk[2];
    highest(score, __all_sync(~0u, most[0] + kSlack >= 0.f && most[1] + kSlack >= 0.f), top);
    const bool grown = __any_sync(~0u, top[0] * scale > most[0] + kSlack || top[1] * scale > most[1] + kSlack);
    if (grown) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // a row goes by its own scores, not by those of the others in its warp
        const float before = most[half], now = across(top[half]) * scale;
        most[half] = now > before + kSlack ? now : before;
        shrunk[half] = exp_2(before - most[half]);
      }
    }
#if !SUM_BY_PRODUCT
    float added[4] = {0.f, 0.f, 0.f, 0.f};
#endif
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      score[i] = exp_2(fmaf(score[i], scale, -most[(i >> 1) & 1]));
#if !SUM_BY_PRODUCT
      added[i & 3] += score[i];
#endif
    }
    await<0>();
    pin(sum);
    pin(rest);
    pin(total);
    if (block > 0 && lane == 0) arrive(free + 8 * previous);
    if (grown) {
#pragma unroll
      for (int i = 0; i < sizeof(sum) / sizeof(float); ++i) sum[i] *= shrunk[(i >> 1) & 1];
#if SIZE > 64
#pragma unroll
      for (int i = 0; i < sizeof(rest) / sizeof(float); ++i) rest[i] *= shrunk[(i >> 1) & 1];
#endif
#pragma unroll
      for (int i = 0; i < sizeof(total) / sizeof(float); ++i) total[i] *= shrunk[SUM_BY_PRODUCT ? i >> 1 : i];
    }
#if !SUM_BY_PRODUCT
    total[0] += added[0] + added[1];
    total[1] += added[2] + added[3];
#endif
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) part[step][i] = packed(score[8 * step + 2 * i], score[8 * step + 2 * i + 1]);
  };

  wait(full, 0);
  scores(0);
  await<0>();
  pin(score);
  int turn = 0;
  for (int block = 0; block < blocks - 1; ++block) {
    probabilities(block);
    wait(full + 8 * next, parity);
    scores(next);
    values(slot);
    const int done = block - LAG;
    if (warp == turn && done >= 0 && done + STAGES < blocks) {
      wait(free + 8 * (done % STAGES), done / STAGES & 1);
      load(done + STAGES, done % STAGES);
    }
    turn = turn == 4 * GROUPS - 1 ? 0 : turn + 1;
    previous = slot;
    slot = next;
    next = next == STAGES - 1 ? 0 : next + 1;
    if (next == 0) parity ^= 1;
    await<1>();
    pin(score);
  }
  probabilities(blocks - 1);
  values(slot);
  await<0>();
  pin(sum);
  pin(rest);
  pin(total);

  unsigned short* to = out + image * out_image + head * out_head + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#if SUM_BY_PRODUCT
    const float factor = 1.f / total[2 * half];
#else
    total[half] += __shfl_xor_sync(~0u, total[half], 1);
    total[half] += __shfl_xor_sync(~0u, total[half], 2);
    const float factor = 1.f / total[half];
#endif
    const int r = row + 8 * half;
    if (r < queries)
#pragma unroll
      for (int i = 0; i < SIZE / 8; ++i) {
        const float* of = i < 8 ? sum + 4 * i : rest + 4 * (i - 8);
        *(u32*)(to + r * out_row + 8 * i) = packed(of[2 * half] * factor, of[2 * half + 1] * factor);
      }
  }
}
