// Attention by mma.sync: softmax(q k^T * scale) v, after FlashAttention-2 (https://arxiv.org/abs/2307.08691): what
// mma_attention.cu and mma_attention8.cu share. After mma.h.
//
// A warp takes TILES times 16 rows of a head, a block WARPS warps. Keys and values come to shared memory KEYS at a time, in
// two stages: while a block computes with one, the other is loaded. With ONCE, where all keys fit one stage, a block keeps
// them for several blocks of rows. Rows of shared memory are an odd number of 16 bytes apart, so that ldmatrix meets no
// bank twice. The head dimension is not padded: what is left in addition to products of 16 is a product of 8.
//
// With HALF_SUMS, for float16 without ONCE, products of probabilities and values are added up in float16 over a stage, and
// the stages in float32. A stage's probabilities then add up to at most 1, so that no sum exceeds the largest value.
//
// With INT8, without ONCE, the products of queries and keys are of 8-bit integers. A key has a factor; a query gets one
// here, where a warp loads its rows. Sums begin with 1.5 * 2^23 in the bits of a float32, whose last bits are then the
// sum, so that none is converted: 160 products of -127 to 127 are less than 2^22. Factors of keys have 22 bits, so that
// the product with that number is exact.
//
// Compile-time parameters: TYPE (mma.h); INT8; SIZE, head dimension, a multiple of 8; KEYS, a multiple of 16; TILES;
// WARPS; BLOCKS per multiprocessor; ONCE; HALF_SUMS.

typedef Stored<TYPE>::Bits Element;
#if INT8
typedef signed char Key;
constexpr int kDepth = (SIZE + 31) / 32 * 32;  // of a key: zeros follow what it has
#else
typedef Element Key;
constexpr int kDepth = SIZE;
#endif
constexpr int kThreads = 32 * WARPS, kWarpRows = 16 * TILES, kRows = kWarpRows * WARPS;
constexpr int kChunks = SIZE / 8, kPitch = (kChunks | 1) * 8;  // of 16 bytes; elements from row to row
constexpr int kSteps = SIZE / 16, kFragments = kSteps ? kSteps : 1, kKeySteps = KEYS / 16, kColumnTiles = SIZE / 8;
constexpr bool kRest = SIZE % 16 != 0;
constexpr int kKeyChunk = 16 / sizeof(Key), kKeyChunks = kDepth / kKeyChunk, kKeyPitch = (kKeyChunks | 1) * kKeyChunk;
// bytes: of a stage's keys, their values, and their factors; of all of it; where rows are that a warp reads or writes
constexpr int kOfKeys = KEYS * kKeyPitch * sizeof(Key), kOfValues = KEYS * kPitch * 2, kOfFactors = INT8 ? KEYS * 4 : 0;
constexpr int kStage = kOfKeys + kOfValues + kOfFactors, kOwnAt = INT8 ? 0 : kStage;
static_assert(ONCE || kOwnAt + kRows * kPitch * 2 <= 2 * kStage, "rows have room");
static_assert(!INT8 || (!ONCE && KEYS % 32 == 0), "factors are copied by 16 bytes");
constexpr unsigned kZeroBits = 0x4b400000u;
constexpr float kZero = 12582912.f;  // 1.5 * 2^23, whose bits those are
// Exponentials may reach 2^8 before sums are scaled to a new maximum; rounding is relative. With HALF_SUMS they reach no
// more than 1 / KEYS.
constexpr float kSlack = HALF_SUMS ? 0.f : 8.f;
constexpr float kAbove = !HALF_SUMS ? 0.f : KEYS == 64 ? 6.f : 5.f;
static_assert(!HALF_SUMS || (!ONCE && TYPE == kFloat16 && (KEYS == 64 || KEYS == 32)), "a stage's exponent is known");

// Begins to copy Rows rows, those from `count` on as zeros. A thread takes one chunk of every (Threads / Chunks)th row.
template <int Rows, int Threads, int Chunks, int Pitch, class Type>
__device__ __forceinline__ void copy_rows(Type* to, const Type* from, int stride, int count, int thread) {
  constexpr int kAtOnce = Threads / Chunks;
  const int row = thread / Chunks, chunk = thread % Chunks * (16 / sizeof(Type));
  if (Threads % Chunks && row >= kAtOnce) return;
  to += row * Pitch + chunk;
  int at = row * stride + chunk;
#pragma unroll
  for (int i = 0; i < Rows; i += kAtOnce, at += kAtOnce * stride) {
    if (i + kAtOnce > Rows && i + row >= Rows) break;
    copy_async(to + i * Pitch, from + at, i + row < count);
  }
}

__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}

// Where images, rows and heads begin: elements from one to the next.
struct Strides {
  long long image;
  int row, head;
};

#if INT8
// The codes of 16 rows, as the operand a of products, and their factors times `scale`. Rows behind the last one are
// read from it, and not stored.
__device__ __forceinline__ void load_queries(unsigned (&codes)[kDepth / 32][4], float (&factors)[2], const Element* q,
                                             int first, int last, int stride, float scale) {
  const int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Element* const from = q + min(first + half * 8 + row, last) * stride + 4 * pair;
    Pack<TYPE, 4> loaded[kDepth / 16];
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) {
      loaded[i] = Pack<TYPE, 4>();
      if (16 * i + 16 <= SIZE || 16 * i + 4 * pair < SIZE) load(from + 16 * i, loaded[i]);
    }
    float values[kDepth / 16][4];
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) {
      loaded[i].to(values[i]);
      largest = largest_of(largest, values[i]);
    }
    const RowScale found = row_scale(largest_of_lanes<4>(largest), 1.f);
    factors[half] = found.scale * scale;
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) codes[i / 2][i % 2 * 2 + half] = codes_of(values[i], found);
  }
}
#endif

// Strides are multiples of 8 (those of k of 16 if it has 8 bits), as are the addresses. scale: times log2(e). rounds:
// blocks of rows that a block takes, 1 without ONCE. factors, with INT8: of a head's keys, key_factors a head.
__device__ __forceinline__ void attend(Element* __restrict__ out, const Element* __restrict__ q,
                                       const Key* __restrict__ k, const float* __restrict__ factors,
                                       const Element* __restrict__ v, int heads, int queries, int keys, int rounds,
                                       float scale, const Strides& of_q, const Strides& of_k, const Strides& of_v,
                                       const Strides& of_out, int key_factors) {
  const float lowest = float_of_bits(0xff800000u);  // minus infinity
  SHARED_MEMORY(Element, shared);  // of char, a register is spilled
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
  const int image = blockIdx.y / heads, head = blockIdx.y % heads;
  q += image * of_q.image + head * of_q.head;
  k += image * of_k.image + head * of_k.head;
  v += image * of_v.image + head * of_v.head;
  out += image * of_out.image + head * of_out.head;
  if (INT8) factors += (long long)blockIdx.y * key_factors;
  // this warp's rows of q, then of out: where stages are before they are used, or after
  Element* const own = shared + kOwnAt / 2 + warp * kWarpRows * kPitch;
  auto keys_of = [&](int block) { return reinterpret_cast<Key*>(shared + block % 2 * (kStage / 2)); };
  auto values_of = [&](int block) { return shared + block % 2 * (kStage / 2) + kOfKeys / 2; };
  auto factors_of = [&](int block) {
    return reinterpret_cast<float*>(shared + block % 2 * (kStage / 2) + (kOfKeys + kOfValues) / 2);
  };

  // what ldmatrix reads: 16 rows by 16 columns of q or, transposed, of v; 16 keys by 32 bytes of k
  const int v_at = lane % 16 * kPitch + lane / 16 * 8;
  const int k_at = (lane / 16 * 8 + lane % 8) * kKeyPitch + lane / 8 % 2 * kKeyChunk;

  const int blocks = ONCE ? 1 : (keys + KEYS - 1) / KEYS;
  auto load_keys = [&](int block) {
    const int from = block * KEYS;
    const int left = keys - from, thread = threadIdx.x;
    copy_rows<KEYS, kThreads, kKeyChunks, kKeyPitch>(keys_of(block), k + from * of_k.row, of_k.row, left, thread);
    copy_rows<KEYS, kThreads, kChunks, kPitch>(values_of(block), v + from * of_v.row, of_v.row, left, thread);
    // there is memory behind the last key's
    if (INT8 && thread < KEYS / 4) copy_async(factors_of(block) + 4 * thread, factors + from + 4 * thread, true);
  };
  load_keys(0);

  for (int round = 0; round < rounds; ++round) {
    const int first = ((int)blockIdx.x * rounds + round) * kRows + warp * kWarpRows;
#if INT8
    unsigned queries_of[TILES][kDepth / 32][4];
    float factor[TILES][2];  // of a row's scores
    copy_async_commit();
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      load_queries(queries_of[t], factor[t], q, first + t * 16, queries - 1, of_q.row, scale);
#else
    copy_rows<kWarpRows, 32, kChunks, kPitch>(own, q + first * of_q.row, of_q.row, queries - first, lane);
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
      for (int step = 0; step < kSteps; ++step) ldmatrix(queries_of[t][step], own + v_at + t * 16 * kPitch + step * 16);
      if (kRest) ldmatrix(queries_rest[t], own + (t * 16 + lane % 16) * kPitch + kSteps * 16);
    }
#endif

#if INT8
    auto factor_of = [&](int t, int half) { return factor[t][half]; };
#else
    auto factor_of = [&](int, int) { return scale; };
#endif
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
      const Key* const ks = keys_of(block);
      const Element* const vs = reinterpret_cast<const Element*>(reinterpret_cast<const char*>(ks) + kOfKeys);
      float score[TILES][2 * kKeySteps][4] = {};
#if INT8
      // 16 keys at a time: what their sums take is free again
#pragma unroll
      for (int n = 0; n < kKeySteps; ++n) {
        int of_codes[TILES][2][4];
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
          for (int i = 0; i < 8; ++i) of_codes[t][i / 4][i % 4] = kZeroBits;
#pragma unroll
        for (int step = 0; step < kDepth / 32; ++step) {
          unsigned b[4];
          ldmatrix(b, ks + k_at + n * 16 * kKeyPitch + step * 32);
#pragma unroll
          for (int t = 0; t < TILES; ++t) {
            mma(of_codes[t][0], queries_of[t][step], b[0], b[1]);
            mma(of_codes[t][1], queries_of[t][step], b[2], b[3]);
          }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const Pack<kFloat32, 2> two = *reinterpret_cast<const Pack<kFloat32, 2>*>(
              factors_of(block) + n * 16 + m * 8 + 2 * pair);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float less = -kZero * two.of[i];
#pragma unroll
            for (int t = 0; t < TILES; ++t)
#pragma unroll
              for (int half = 0; half < 2; ++half)
                score[t][2 * n + m][2 * half + i] =
                    fmaf(float_of_bits((unsigned)of_codes[t][m][2 * half + i]), two.of[i], less);
          }
        }
      }
#else
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int n = 0; n < kKeySteps; ++n) {
          unsigned b[4];
          ldmatrix(b, ks + k_at + n * 16 * kKeyPitch + step * 16);
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
          ldmatrix(b, ks + (n * 16 + lane % 16) * kKeyPitch + kSteps * 16);
#pragma unroll
          for (int t = 0; t < TILES; ++t) {
            mma(score[t][2 * n], queries_rest[t], b[0]);
            mma(score[t][2 * n + 1], queries_rest[t], b[1]);
          }
        }
#endif

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
          now[t][half] = fmaf(row_max(most), factor_of(t, half), kAbove);
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
          const float one = exp_2(fmaf(two[2 * half], factor_of(t, half), -top[t][half]));
          const float next = exp_2(fmaf(two[2 * half + 1], factor_of(t, half), -top[t][half]));
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
        *reinterpret_cast<Pack<TYPE, 8>*>(out + (first + r) * of_out.row + chunk * 8) = eight;
      }
    }
    if (ONCE) warp_sync();
  }
}
