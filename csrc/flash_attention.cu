// Attention over many keys, for Hopper: softmax(q k^T * scale) v, in the manner of FlashAttention-3
// (https://arxiv.org/abs/2407.08608).
//
// A block of threads is GROUPS warp groups of 64 rows of queries each. Keys and values come by the copy engine, 64 at a
// time, into a ring of STAGES slots that the groups share; whoever's turn it is sends for the next. Scores stay in
// registers, where the layout of a product's result is that of a next product's operand. While a group takes its
// exponentials, its last product with values is still under way, and so are those of the other groups.
//
// Where blocks are to be EVEN there are as many as multiprocessors, and each takes as many stacks, of GROUPS times 64 rows
// of one head, as the others. What does not fill another round of stacks comes first, by 64 rows: a block's groups take
// every GROUPS-th block of their keys, and add up what they have. The ring goes on from one to the next.
//
// What is given: SIZE, of a head, 40, 64 or 80; GROUPS; BLOCKS, that share a multiprocessor; STAGES; LAG, how many
// blocks of keys ago a slot must have been done with to be filled again, so at most STAGES - 2; SUM_BY_PRODUCT, whether
// rows are summed by a product with ones (four registers more, 32 additions less); EVEN, 0, or 1 where GROUPS and LAG are
// 4 and heads at most 64 wide; BF16.

#include "hopper.h"
#include "from_registers.h"
#include "shared_rows.h"

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

constexpr int kSums = (kSplit ? 64 : SIZE) / 2;
static_assert(!EVEN || (GROUPS == 4 && LAG == GROUPS && STAGES == 3 * GROUPS && !kSplit), "groups that share rows");

// Where a block works: at rows from 64 * `unit` on.
struct Place {
  int image, head, unit;
  bool shared;  // all groups at the same rows
};

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
// keys by 128 bytes; k_rest and v_rest: by 32 bytes, where SIZE is more than 64. stacks: that blocks take as such, the
// first of all; parted: those after them, whose rows are taken by 64, as are those of each head that make no stack; shares:
// how many times 64 rows are taken so, each group having a block of keys at least. scale: times log2(e).
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    flash_attention(unsigned short* out, const unsigned short* q, const __grid_constant__ TensorMap k_map,
                    const __grid_constant__ TensorMap v_map,
#if SIZE > 64
                    const __grid_constant__ TensorMap k_rest, const __grid_constant__ TensorMap v_rest,
#endif
                    u32 heads, int queries, int keys, u32 stacks, u32 parted, u32 shares, float scale, u64 q_image,
                    u64 q_row, u64 q_head, u64 out_image, u64 out_row, u64 out_head) {
  extern __shared__ unsigned char shared[];
  __shared__ alignas(8) u64 barriers[2 * STAGES];
  const u32 tiles = (address(shared) + 1023) & ~1023u;
  const u32 base = 1 << 16 | tiles >> 4;
  const u32 full = address(barriers), free = full + 8 * STAGES;
  const u32 units = (queries + 63) / 64;
  const int blocks = (keys + kKeys - 1) / kKeys;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), group = warp >> 2;
  // blocks of keys that pass through the ring
  const int passing = EVEN ? (shares + stacks + gridDim.x - 1 - blockIdx.x) / gridDim.x * blocks : blocks;

  auto place = [&](u32 item) {
    const u32 high = EVEN ? units / GROUPS : (units + GROUPS - 1) / GROUPS;  // stacks of a head
    Place at;
    u32 which, part = 0;
    at.shared = EVEN && item < shares;
    if (at.shared && item >= parted * GROUPS) {
      const u32 odd = units % GROUPS;
      item -= parted * GROUPS;
      which = item / odd;
      at.unit = high * GROUPS + item % odd;
    } else {
      if (at.shared) {
        part = item % GROUPS;
        item = stacks + item / GROUPS;
      } else {
        item -= shares;
      }
      which = item / high;
      at.unit = item % high * GROUPS + part;
    }
    at.image = which / heads;
    at.head = which % heads;
    return at;
  };

#if SUM_BY_PRODUCT
  __shared__ alignas(128) u32 ones[64];
  if (threadIdx.x < 64) ones[threadIdx.x] = TWO_ONES;
  show_to_copies();
  const u64 all_ones = u64(8) << 32 | 8 << 16 | address(ones) >> 4;
  float total[4];
#else
  float total[2];
#endif

  auto load = [&](u32 slot, const Place& from, int block) {
    const u32 mine = elected(), to = tiles + slot * 2 * kTile, barrier = full + 8 * slot;
    expect(mine, barrier, 2 * kTile);
    copy(mine, to, &k_map, barrier, 0, from.head, block * kKeys, from.image);
    copy(mine, to + kTile, &v_map, barrier, 0, from.head, block * kKeys, from.image);
#if SIZE > 64
    copy(mine, to + kKeys * kWide, &k_rest, barrier, 64, from.head, block * kKeys, from.image);
    copy(mine, to + kTile + kKeys * kWide, &v_rest, barrier, 64, from.head, block * kKeys, from.image);
#endif
  };

#if EVEN
  bool shared_before = false;
  Part<kSums>* parts = (Part<kSums>*)(shared + (tiles - address(shared)) + STAGES * 2 * kTile);
#endif
  Place at = place(blockIdx.x), next = at;
  // of a product's operands and results a thread has its row and that 8 below, of each 8 columns `column` and the next
  const int column = 2 * (lane & 3);
  auto row_of = [&](const Place& at) {
    return (at.unit + (at.shared ? 0 : group)) * 64 + (warp & 3) * 16 + (lane >> 2);
  };
  u32 query[kSteps][4];
  auto take_queries = [&](const Place& at) {
    const int row = row_of(at);
    const unsigned short* from = q + at.image * q_image + at.head * q_head + column;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int to = step * 16 + (i >> 1) * 8, r = row + (i & 1) * 8;
        query[step][i] = to < SIZE && r < queries ? *(const u32*)(from + r * q_row + to) : 0u;
      }
  };

  if (threadIdx.x == 0) {
    initialise_ring(full, free, STAGES, 4 * GROUPS);
    initialised();
    next_may_begin();
  }
  __syncthreads();
  after_previous();
  if (warp == 0)
    for (int i = 0; i < STAGES && i < passing; ++i)
      if (!EVEN || i < blocks)
        load(i, at, i);
      else
        load(i, place(blockIdx.x + i / blocks * gridDim.x), i % blocks);
  take_queries(at);

  float score[kScores], sum[kSums], rest[kSplit ? SIZE / 2 - 32 : 1];
  float most[2] = {-infinity(), -infinity()};
  u32 part[kKeySteps][4];

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

  u32 previous, slot, parity;
  int first, begun = 0;  // of the blocks of keys here, that is this group's; those of all places before
  u32 item = blockIdx.x;
  auto done_with = [&](u32 slot) {  // for all groups, where none else reads it
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(free + 8 * slot), "r"(at.shared ? GROUPS : 1)
                 : "memory");
  };
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
    if (block > first && lane == 0) done_with(previous);
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

  // Sends for what goes to the slot of the block of keys LAG before this one.
  auto refill = [&](int block) {
    const int now = begun + block, done = now - LAG;
    if ((at.shared ? group * 4 + block / GROUPS % 4 : now % (4 * GROUPS)) != warp) return;
    if (done < 0 || done + STAGES >= passing) return;
    const int ahead = done + STAGES - begun, slot = done % STAGES;
    wait(free + 8 * slot, done / STAGES & 1);
    if (!EVEN || ahead < blocks)
      load(slot, at, ahead);
    else
      load(slot, ahead < 2 * blocks ? next : place(item + ahead / blocks * gridDim.x), ahead % blocks);
  };

  while (true) {
    const bool more = EVEN && begun + blocks < passing;
    if (more) next = place(item + gridDim.x);
#pragma unroll
    for (float& x : sum) x = 0.f;
#pragma unroll
    for (float& x : rest) x = 0.f;
#pragma unroll
    for (float& x : total) x = 0.f;
    most[0] = most[1] = -infinity();
    const int stride = at.shared ? GROUPS : 1;
    // a group keeps to slots of its own, and waits for no other to be done with them
    first = at.shared ? (group - begun) & (GROUPS - 1) : 0;
    slot = (begun + first) % STAGES;
    parity = (begun + first) / STAGES & 1;
    wait(full + 8 * slot, parity);
    scores(slot);
    await<0>();
    pin(score);
    int block = first;
    for (; block + stride < blocks; block += stride) {
      probabilities(block);
      previous = slot;
      slot += stride;
      if (slot >= STAGES) {
        slot -= STAGES;
        parity ^= 1;
      }
      wait(full + 8 * slot, parity);
      scores(slot);
      values(previous);
      refill(block);
      await<1>();
      pin(score);
    }
    if (more) take_queries(next);
    probabilities(block);
    values(slot);
    if (EVEN) refill(block);
    await<0>();
    pin(sum);
    pin(rest);
    pin(total);
    if (EVEN && lane == 0) done_with(slot);

    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.most[half] = most[half];
#if SUM_BY_PRODUCT
      rows.all[half] = total[2 * half];
#else
      rows.all[half] = total[half] + __shfl_xor_sync(~0u, total[half], 1);
      rows.all[half] += __shfl_xor_sync(~0u, rows.all[half], 2);
#endif
    }
#if EVEN
    if (at.shared) {
      // from there on what comes next may go to any group's slots
      if (more && !next.shared) __syncthreads();
      add_up(parts, group, sum, rows, shared_before, more && next.shared);
    }
#endif

    unsigned short* to = out + at.image * out_image + at.head * out_head + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = 1.f / rows.all[half];
      const int r = row_of(at) + 8 * half;
      if (r < queries && !(at.shared && group > 0))
#pragma unroll
        for (int i = 0; i < SIZE / 8; ++i) {
          const float* of = i < 8 ? sum + 4 * i : rest + 4 * (i - 8);
          *(u32*)(to + r * out_row + 8 * i) = packed(of[2 * half] * factor, of[2 * half + 1] * factor);
        }
    }
    if (!more) break;
#if EVEN
    shared_before = at.shared;
#endif
    at = next;
    item += gridDim.x;
    begun += blocks;
  }
}
