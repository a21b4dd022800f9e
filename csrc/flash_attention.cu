// Attention over many keys, for Hopper: softmax(q k^T * scale) v, after FlashAttention-3
// (https://arxiv.org/abs/2407.08608).
//
// A thread block is GROUPS warpgroups of 64 queries each. Keys and values are loaded by TMA, 64 at a time, into a ring
// of STAGES shared memory stages that the warpgroups share; the warps take turns as producer. Scores stay in registers:
// the accumulator layout of one mma is the A layout of the next. While a warpgroup computes exponentials, its previous
// PV mma is still in flight, and so are those of the other warpgroups.
//
// With EVEN the grid is one persistent block per multiprocessor, and each takes as many stacks (GROUPS x 64 rows of one
// head) as the others. Rows that do not fill another wave of stacks are processed first, 64 at a time, with split KV:
// each warpgroup of a block takes every GROUPS-th block of keys, and the partial results are combined. The ring
// continues from one work item to the next.
//
// Compile-time parameters: SIZE, head dimension, 40, 64 or 80; GROUPS; BLOCKS per multiprocessor; STAGES; LAG, how many
// key blocks ago a stage must have been released before it is refilled, at most STAGES - 2; SUM_BY_MMA, whether row
// sums are an mma with ones (four registers more, 32 additions fewer); EVEN, 0, or 1 if GROUPS and LAG are 4 and
// SIZE is at most 64; BF16.

#include "hopper.h"
#include "split_kv_combine.h"
#include "wgmma_rs.h"

#if BF16
#define TWO_ONES 0x3f803f80u
#else
#define TWO_ONES 0x3c003c00u
#endif

constexpr int kThreads = 128 * GROUPS;
constexpr int kKeys = 64;                 // keys of a block
constexpr int kSteps = (SIZE + 15) / 16;  // K of an mma is 16; queries are zero-padded to that
constexpr int kKeySteps = kKeys / 16;
constexpr int kScores = kKeys / 2;
// Keys are in shared memory as rows of 128 bytes, the widest swizzle of wgmma; columns beyond 64 as rows of 32 bytes.
constexpr int kWide = 128, kNarrow = 32;
constexpr bool kSplit = SIZE > 64;
constexpr int kTile = kKeys * (kWide + (kSplit ? kNarrow : 0));
constexpr int kWideSteps = kSplit ? 4 : kSteps;
// Rescaling threshold: exponentials may reach 2^8 before accumulators are rescaled to a new maximum; rounding is
// relative.
constexpr float kSlack = 8.f;

constexpr int kSums = (kSplit ? 64 : SIZE) / 2;
static_assert(!EVEN || (GROUPS == 4 && LAG == GROUPS && STAGES == 3 * GROUPS && !kSplit), "groups that share rows");

// A work item: rows from 64 * `unit` on of a head.
struct Place {
  int image, head, unit;
  bool shared;  // all warpgroups at the same rows (split KV)
};

// wgmma matrix descriptors for rows of 128 and 32 bytes, swizzled over that width, groups of eight rows contiguous.
// `base` is the address of all tiles in units of 16 bytes.
__device__ __forceinline__ u64 wide(u32 base, u32 bytes) { return u64(1u << 30 | 64) << 32 | (base + (bytes >> 4)); }
__device__ __forceinline__ u64 narrow(u32 base, u32 bytes) { return u64(3u << 30 | 16) << 32 | (base + (bytes >> 4)); }

// d (64, 8) += a (64, 16) b.
__device__ __forceinline__ void wgmma_rs(float (&d)[4], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32." TYPE "." TYPE
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
               : FOUR_OF(d, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The maximum over the four lanes that hold a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Maxima of a thread's scores in its two rows. With `positive` a result not above 0 may be any of the scores: positive
// floats compare as integers, for which Hopper has a three-operand maximum.
__device__ __forceinline__ void thread_max(const float (&score)[kScores], bool positive, float (&top)[2]) {
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

// q, out: strides in elements, of images, rows and heads. k_map, v_map: tensor maps over (images, keys, heads, SIZE),
// boxes of 64 keys by 128 bytes; k_rest, v_rest: by 32 bytes, for SIZE > 64. stacks: taken whole, the first of all;
// parted: stacks after those, taken 64 rows at a time with split KV, as is the end of each head that makes no stack;
// shares: how many 64-row items there are, in which each warpgroup has at least one block of keys. scale: times
// log2(e).
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
  const u32 tiles = (smem_address(shared) + 1023) & ~1023u;
  const u32 base = 1 << 16 | tiles >> 4;
  const u32 full = smem_address(barriers), empty = full + 8 * STAGES;
  const u32 units = (queries + 63) / 64;
  const int blocks = (keys + kKeys - 1) / kKeys;
  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), warpgroup = warp >> 2;
  // key blocks that pass through the ring
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

#if SUM_BY_MMA
  __shared__ alignas(128) u32 ones[64];
  if (threadIdx.x < 64) ones[threadIdx.x] = TWO_ONES;
  fence_async_proxy();
  const u64 all_ones = u64(8) << 32 | 8 << 16 | smem_address(ones) >> 4;
  float row_sum[4];
#else
  float row_sum[2];
#endif

  auto load = [&](u32 stage, const Place& from, int block) {
    const u32 elected = elect_one(), to = tiles + stage * 2 * kTile, barrier = full + 8 * stage;
    mbarrier_arrive_expect_tx(elected, barrier, 2 * kTile);
    tma_load(elected, to, &k_map, barrier, 0, from.head, block * kKeys, from.image);
    tma_load(elected, to + kTile, &v_map, barrier, 0, from.head, block * kKeys, from.image);
#if SIZE > 64
    tma_load(elected, to + kKeys * kWide, &k_rest, barrier, 64, from.head, block * kKeys, from.image);
    tma_load(elected, to + kTile + kKeys * kWide, &v_rest, barrier, 64, from.head, block * kKeys, from.image);
#endif
  };

#if EVEN
  bool shared_before = false;
  Part<kSums>* parts = (Part<kSums>*)(shared + (tiles - smem_address(shared)) + STAGES * 2 * kTile);
#endif
  Place at = place(blockIdx.x), next = at;
  // mma fragment: a thread holds its row and the one 8 below, columns `column` and the next of every 8
  const int column = 2 * (lane & 3);
  auto row_of = [&](const Place& at) {
    return (at.unit + (at.shared ? 0 : warpgroup)) * 64 + (warp & 3) * 16 + (lane >> 2);
  };
  u32 query[kSteps][4];
  auto load_queries = [&](const Place& at) {
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
    mbarrier_init_ring(full, empty, STAGES, 4 * GROUPS);
    fence_barrier_init();
    pdl_launch_dependents();
  }
  __syncthreads();
  pdl_wait();
  if (warp == 0)
    for (int i = 0; i < STAGES && i < passing; ++i)
      if (!EVEN || i < blocks)
        load(i, at, i);
      else
        load(i, place(blockIdx.x + i / blocks * gridDim.x), i % blocks);
  load_queries(at);

  float score[kScores], sum[kSums], rest[kSplit ? SIZE / 2 - 32 : 1];
  float most[2] = {-infinity(), -infinity()};
  u32 part[kKeySteps][4];

  auto qk_mma = [&](u32 stage) {
    fence_operand(score);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWideSteps; ++step)
      wgmma_rs<0>(score, query[step], wide(base, stage * 2 * kTile + 32 * step), step);
#if SIZE > 64
    wgmma_rs<0>(score, query[4], narrow(base, stage * 2 * kTile + kKeys * kWide), 1);
#endif
    wgmma_commit();
  };
  auto pv_mma = [&](u32 stage) {
    fence_operand(sum);
    fence_operand(rest);
    fence_operand(row_sum);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
      wgmma_rs<1>(sum, part[step], wide(base, stage * 2 * kTile + kTile + 16 * kWide * step), 1);
#if SIZE > 64
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
      wgmma_rs<1>(rest, part[step], narrow(base, stage * 2 * kTile + kTile + kKeys * kWide + 16 * kNarrow * step), 1);
#endif
#if SUM_BY_MMA
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) wgmma_rs(row_sum, part[step], all_ones);
#endif
    wgmma_commit();
  };

  u32 previous, stage, parity;
  int first, begun = 0;  // this warpgroup's first key block here; key blocks of all items before
  u32 item = blockIdx.x;
  auto release = [&](u32 stage) {  // once for all warpgroups if only this one reads it
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(empty + 8 * stage), "r"(at.shared ? GROUPS : 1)
                 : "memory");
  };
  auto softmax = [&](int block) {
    if (keys - block * kKeys < kKeys) {
      const int left = keys - block * kKeys - column;
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (8 * (i >> 2) + (i & 1) >= left) score[i] = -infinity();
    }
    float top[2], shrunk[2];
    thread_max(score, __all_sync(~0u, most[0] + kSlack >= 0.f && most[1] + kSlack >= 0.f), top);
    const bool grown = __any_sync(~0u, top[0] * scale > most[0] + kSlack || top[1] * scale > most[1] + kSlack);
    if (grown) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // each row decides by its own scores, not by those of its warp
        const float before = most[half], now = row_max(top[half]) * scale;
        most[half] = now > before + kSlack ? now : before;
        shrunk[half] = exp_2(before - most[half]);
      }
    }
#if !SUM_BY_MMA
    float added[4] = {0.f, 0.f, 0.f, 0.f};
#endif
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      score[i] = exp_2(fmaf(score[i], scale, -most[(i >> 1) & 1]));
#if !SUM_BY_MMA
      added[i & 3] += score[i];
#endif
    }
    wgmma_wait<0>();
    fence_operand(sum);
    fence_operand(rest);
    fence_operand(row_sum);
    if (block > first && lane == 0) release(previous);
    if (grown) {
#pragma unroll
      for (int i = 0; i < sizeof(sum) / sizeof(float); ++i) sum[i] *= shrunk[(i >> 1) & 1];
#if SIZE > 64
#pragma unroll
      for (int i = 0; i < sizeof(rest) / sizeof(float); ++i) rest[i] *= shrunk[(i >> 1) & 1];
#endif
#pragma unroll
      for (int i = 0; i < sizeof(row_sum) / sizeof(float); ++i) row_sum[i] *= shrunk[SUM_BY_MMA ? i >> 1 : i];
    }
#if !SUM_BY_MMA
    row_sum[0] += added[0] + added[1];
    row_sum[1] += added[2] + added[3];
#endif
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) part[step][i] = pack(score[8 * step + 2 * i], score[8 * step + 2 * i + 1]);
  };

  // Refills the stage of the key block LAG before this one; one warp's turn.
  auto refill = [&](int block) {
    const int now = begun + block, done = now - LAG;
    if ((at.shared ? warpgroup * 4 + block / GROUPS % 4 : now % (4 * GROUPS)) != warp) return;
    if (done < 0 || done + STAGES >= passing) return;
    const int ahead = done + STAGES - begun, stage = done % STAGES;
    mbarrier_wait(empty + 8 * stage, done / STAGES & 1);
    if (!EVEN || ahead < blocks)
      load(stage, at, ahead);
    else
      load(stage, ahead < 2 * blocks ? next : place(item + ahead / blocks * gridDim.x), ahead % blocks);
  };

  while (true) {
    const bool more = EVEN && begun + blocks < passing;
    if (more) next = place(item + gridDim.x);
#pragma unroll
    for (float& x : sum) x = 0.f;
#pragma unroll
    for (float& x : rest) x = 0.f;
#pragma unroll
    for (float& x : row_sum) x = 0.f;
    most[0] = most[1] = -infinity();
    const int stride = at.shared ? GROUPS : 1;
    // in split KV a warpgroup uses separate stages, and waits for no other
    first = at.shared ? (warpgroup - begun) & (GROUPS - 1) : 0;
    stage = (begun + first) % STAGES;
    parity = (begun + first) / STAGES & 1;
    mbarrier_wait(full + 8 * stage, parity);
    qk_mma(stage);
    wgmma_wait<0>();
    fence_operand(score);
    int block = first;
    for (; block + stride < blocks; block += stride) {
      softmax(block);
      previous = stage;
      stage += stride;
      if (stage >= STAGES) {
        stage -= STAGES;
        parity ^= 1;
      }
      mbarrier_wait(full + 8 * stage, parity);
      qk_mma(stage);
      pv_mma(previous);
      refill(block);
      wgmma_wait<1>();
      fence_operand(score);
    }
    if (more) load_queries(next);
    softmax(block);
    pv_mma(stage);
    if (EVEN) refill(block);
    wgmma_wait<0>();
    fence_operand(sum);
    fence_operand(rest);
    fence_operand(row_sum);
    if (EVEN && lane == 0) release(stage);

    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.most[half] = most[half];
#if SUM_BY_MMA
      rows.all[half] = row_sum[2 * half];
#else
      rows.all[half] = row_sum[half] + __shfl_xor_sync(~0u, row_sum[half], 1);
      rows.all[half] += __shfl_xor_sync(~0u, rows.all[half], 2);
#endif
    }
#if EVEN
    if (at.shared) {
      // the next item's loads may go to any warpgroup's stages
      if (more && !next.shared) __syncthreads();
      split_kv_combine(parts, warpgroup, sum, rows, shared_before, more && next.shared);
    }
#endif

    unsigned short* to = out + at.image * out_image + at.head * out_head + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = 1.f / rows.all[half];
      const int r = row_of(at) + 8 * half;
      if (r < queries && !(at.shared && warpgroup > 0))
#pragma unroll
        for (int i = 0; i < SIZE / 8; ++i) {
          const float* of = i < 8 ? sum + 4 * i : rest + 4 * (i - 8);
          *(u32*)(to + r * out_row + 8 * i) = pack(of[2 * half] * factor, of[2 * half + 1] * factor);
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
