// Attention by mma.sync, for any card with tensor cores from compute capability 7.5 on: softmax(q k^T * scale) v, after
// FlashAttention-2 (https://arxiv.org/abs/2307.08691).
//
// A warp takes TILES times 16 rows of a head, a block WARPS warps. Keys and values come to shared memory KEYS at a time, in
// two stages: while a block computes with one, the other is loaded. With ONCE, where all keys fit one stage, a block keeps
// them for several blocks of rows. Rows of shared memory are an odd number of 16 bytes apart, so that ldmatrix meets no
// bank twice. The head dimension is not padded: what is left in addition to products of 16 is a product of 8.
//
// With HALF_SUMS, for float16 without ONCE, products of probabilities and values are added up in float16 over a stage, and
// the stages in float32. A stage's probabilities then add up to at most 1, so that no sum exceeds the largest value.
//
// Compile-time parameters: TYPE (mma.h); SIZE, head dimension, a multiple of 8; KEYS, a multiple of 16; TILES; WARPS;
// BLOCKS per multiprocessor; ONCE; HALF_SUMS.

#include "mma.h"

typedef Stored<TYPE>::Bits Element;
constexpr int kThreads = 32 * WARPS, kWarpRows = 16 * TILES, kRows = kWarpRows * WARPS;
constexpr int kChunks = SIZE / 8, kPitch = (kChunks | 1) * 8;  // of 16 bytes; elements from row to row
constexpr int kSteps = SIZE / 16, kFragments = kSteps ? kSteps : 1, kKeySteps = KEYS / 16, kColumnTiles = SIZE / 8;
constexpr bool kRest = SIZE % 16 != 0;
constexpr int kStage = 2 * KEYS * kPitch;
static_assert(ONCE || kRows <= 2 * KEYS, "rows of q fit one stage");
// Exponentials may reach 2^8 before sums are scaled to a new maximum; rounding is relative. With HALF_SUMS they reach no
// more than 1 / KEYS.
constexpr float kSlack = HALF_SUMS ? 0.f : 8.f;
constexpr float kAbove = !HALF_SUMS ? 0.f : KEYS == 64 ? 6.f : 5.f;
static_assert(!HALF_SUMS || (!ONCE && TYPE == kFloat16 && (KEYS == 64 || KEYS == 32)), "a stage's exponent is known");

// Begins to copy Rows rows, those from `count` on as zeros. A thread takes one chunk of every (Threads / kChunks)th row.
template <int Rows, int Threads>
__device__ __forceinline__ void copy_rows(Element* to, const Element* from, int stride, int count, int thread) {
  constexpr int kAtOnce = Threads / kChunks;
  const int row = thread / kChunks, chunk = thread % kChunks * 8;
  if (Threads % kChunks && row >= kAtOnce) return;
  to += row * kPitch + chunk;
  int at = row * stride + chunk;
#pragma unroll
  for (int i = 0; i < Rows; i += kAtOnce, at += kAtOnce * stride) {
    if (i + kAtOnce > Rows && i + row >= Rows) break;
    copy_async(to + i * kPitch, from + at, i + row < count);
  }
}

__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}

// Strides in elements, multiples of 8, as are the addresses. scale: times log2(e). rounds: blocks of rows that a block
// takes, 1 without ONCE.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    mma_attention(Element* __restrict__ out, const Element* __restrict__ q, const Element* __restrict__ k,
                  const Element* __restrict__ v, int heads, int queries, int keys, int rounds, float scale,
                  long long q_image, int q_row, int q_head, long long k_image, int k_row, int k_head, long long v_image,
                  int v_row, int v_head, long long out_image, int out_row, int out_head) {
  pdl_wait();
  const float lowest = float_of_bits(0xff800000u);  // minus infinity
  SHARED_MEMORY(Element, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
  const int image = blockIdx.y / heads, head = blockIdx.y % heads;
  q += image * q_image + head * q_head;
  k += image * k_image + head * k_head;
  v += image * v_image + head * v_head;
  out += image * out_image + head * out_head;
  // this warp's rows of q, then of out: in the second stage, before it is used and after
  Element* const own = shared + kStage + warp * kWarpRows * kPitch;

  // what ldmatrix reads: 16 rows by 16 columns of q; 16 keys by 16 columns of k; the same of v, transposed
  const int q_at = lane % 16 * kPitch + lane / 16 * 8;
  const int k_at = (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8, v_at = lane % 16 * kPitch + lane / 16 * 8;
  // next to those, 16 keys by 8 columns
  const int k_rest = lane % 16 * kPitch + kSteps * 16;

  const int blocks = ONCE ? 1 : (keys + KEYS - 1) / KEYS;
  auto load_keys = [&](int block) {
    Element* const to = shared + block % 2 * kStage;
    const int from = block * KEYS;
    copy_rows<KEYS, kThreads>(to, k + from * k_row, k_row, keys - from, threadIdx.x);
    copy_rows<KEYS, kThreads>(to + KEYS * kPitch, v + from * v_row, v_row, keys - from, threadIdx.x);
  };
  load_keys(0);

  for (int round = 0; round < rounds; ++round) {
    const int first = ((int)blockIdx.x * rounds + round) * kRows + warp * kWarpRows;
    copy_rows<kWarpRows, 32>(own, q + first * q_row, q_row, queries - first, lane);
    copy_async_commit();
    copy_async_wait<0>();
    if (ONCE && round == 0)
      __syncthreads();
    else
      warp_sync();
    unsigned queries_of[TILES][kFragments][4], queries_rest[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) ldmatrix(queries_of[t][step], own + q_at + t * 16 * kPitch + step * 16);
      if (kRest) ldmatrix(queries_rest[t], own + (t * 16 + lane % 16) * kPitch + kSteps * 16);
    }

    float sum[TILES][kColumnTiles][4] = {}, total[TILES][2] = {}, top[TILES][2];
#pragma unroll
    for (int t = 0; t < TILES; ++t) top[t][0] = top[t][1] = lowest;

    for (int block = 0; block < blocks; ++block) {
      if (!ONCE) {
        copy_async_wait<0>();
        __syncthreads();
      }
      if (block + 1 < blocks) {
        load_keys(block + 1);
        copy_async_commit();
      }
      const Element* const ks = shared + block % 2 * kStage;
      const Element* const vs = ks + KEYS * kPitch;
      float score[TILES][2 * kKeySteps][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int n = 0; n < kKeySteps; ++n) {
          unsigned b[4];
          ldmatrix(b, ks + k_at + n * 16 * kPitch + step * 16);
#pragma unroll
          for (int t = 0; t < TILES; ++t) {
            mma(score[t][2 * n], queries_of[t][step], b[0], b[1]);
            mma(score[t][2 * n + 1], queries_of[t][step], b[2], b[3]);
          }
        }
      if (kRest)
#pragma unroll
        for (int n = 0; n < kKeySteps; ++n) {
          unsigned b[2];
          ldmatrix(b, ks + k_rest + n * 16 * kPitch);
#pragma unroll
          for (int t = 0; t < TILES; ++t) {
            mma(score[t][2 * n], queries_rest[t], b[0]);
            mma(score[t][2 * n + 1], queries_rest[t], b[1]);
          }
        }

      const int left = keys - block * KEYS;
      if (left < KEYS)
#pragma unroll
        for (int n = 0; n < 2 * kKeySteps; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (n * 8 + pair * 2 + i % 2 >= left)
#pragma unroll
              for (int t = 0; t < TILES; ++t) score[t][n][i] = lowest;

      float now[TILES][2];
      bool above = false;
#pragma unroll
      for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float most = lowest;
#pragma unroll
          for (int n = 0; n < 2 * kKeySteps; ++n)
            most = fmaxf(most, fmaxf(score[t][n][2 * half], score[t][n][2 * half + 1]));
          now[t][half] = fmaf(row_max(most), scale, kAbove);
          above |= now[t][half] > top[t][half] + kSlack;
        }
      if (any_lane(above)) {
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float higher = fmaxf(top[t][half], now[t][half]), less = exp_2(top[t][half] - higher);
            top[t][half] = higher;
            total[t][half] *= less;
#pragma unroll
            for (int d = 0; d < kColumnTiles; ++d)
#pragma unroll
              for (int i = 0; i < 2; ++i) sum[t][d][2 * half + i] *= less;
          }
      }

      // of 16 keys, by which the scores are replaced
      auto probabilities = [&](int t, int n, unsigned(&p)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int half = i % 2;
          float(&two)[4] = score[t][2 * n + i / 2];
          const float one = exp_2(fmaf(two[2 * half], scale, -top[t][half]));
          const float next = exp_2(fmaf(two[2 * half + 1], scale, -top[t][half]));
          total[t][half] += one + next;
          p[i] = pair_of<TYPE>(one, next);
        }
      };
#if HALF_SUMS
      // a tile of rows and four of columns at a time, for want of registers
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        unsigned p[kKeySteps][4];
#pragma unroll
        for (int n = 0; n < kKeySteps; ++n) probabilities(t, n, p[n]);
#pragma unroll
        for (int first = 0; first < kColumnTiles; first += 4) {
          unsigned halves[4][2] = {};
#pragma unroll
          for (int n = 0; n < kKeySteps; ++n)
#pragma unroll
            for (int d = 0; d < 4 && first + d < kColumnTiles; d += 2) {
              unsigned b[4];
              if (first + d + 1 < kColumnTiles) {
                ldmatrix_transposed(b, vs + v_at + n * 16 * kPitch + (first + d) * 8);
                mma_halves(halves[d + 1], p[n], b[2], b[3]);
              } else {
                unsigned rest[2];
                ldmatrix_transposed(rest, vs + (n * 16 + lane % 16) * kPitch + (first + d) * 8);
                b[0] = rest[0], b[1] = rest[1];
              }
              mma_halves(halves[d], p[n], b[0], b[1]);
            }
#pragma unroll
          for (int d = 0; d < 4 && first + d < kColumnTiles; ++d)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float one, next;
              to_floats<TYPE>(halves[d][half], one, next);
              sum[t][first + d][2 * half] += one;
              sum[t][first + d][2 * half + 1] += next;
            }
        }
      }
#else
#pragma unroll
      for (int n = 0; n < kKeySteps; ++n) {
        unsigned p[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; ++t) probabilities(t, n, p[t]);
#pragma unroll
        for (int d = 0; d + 1 < kColumnTiles; d += 2) {
          unsigned b[4];
          ldmatrix_transposed(b, vs + v_at + n * 16 * kPitch + d * 8);
#pragma unroll
          for (int t = 0; t < TILES; ++t) {
            mma(sum[t][d], p[t], b[0], b[1]);
            mma(sum[t][d + 1], p[t], b[2], b[3]);
          }
        }
        if (kRest) {
          unsigned b[2];
          ldmatrix_transposed(b, vs + (n * 16 + lane % 16) * kPitch + kSteps * 16);
#pragma unroll
          for (int t = 0; t < TILES; ++t) mma(sum[t][kColumnTiles - 1], p[t], b[0], b[1]);
        }
      }
#endif
    }

    // through shared memory, so that whole rows are written
    if (ONCE)
      warp_sync();
    else
      __syncthreads();
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float all = total[t][half];
        all += shuffle_xor(all, 1);
        all += shuffle_xor(all, 2);
        const float inverse = 1.f / all;
        Element* const to = own + (t * 16 + half * 8 + row) * kPitch + pair * 2;
#pragma unroll
        for (int d = 0; d < kColumnTiles; ++d)
          *reinterpret_cast<unsigned*>(to + d * 8) =
              pair_of<TYPE>(sum[t][d][2 * half] * inverse, sum[t][d][2 * half + 1] * inverse);
      }
    warp_sync();
#pragma unroll
    for (int i = 0; i < (kWarpRows * kChunks + 31) / 32; ++i) {
      const int at = i * 32 + lane, r = at / kChunks, chunk = at % kChunks;
      if (kWarpRows * kChunks % 32 && at >= kWarpRows * kChunks) break;
      if (first + r < queries) {
        Pack<TYPE, 8> eight;
        load(own + r * kPitch + chunk * 8, eight);
        *reinterpret_cast<Pack<TYPE, 8>*>(out + (first + r) * out_row + chunk * 8) = eight;
      }
    }
    if (ONCE) warp_sync();
  }
}
