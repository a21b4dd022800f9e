// RMS norm of the heads of queries or keys, and their rotary embedding; for any card.
//
// A block has one token. THREADS threads, a power of 2 of a warp, keep the columns of a head in registers, PACK neighbours
// each; a block has ROWS heads at a time, HEADS times, so that the angles of a token are loaded once for all of them.
//
// Compile-time parameters: TYPE (elements.h); NORM, whether there is a norm; FORM, of the rotation: 0 none, 1 of
// neighbours by complex numbers, 2 of neighbours, 3 of the halves of a head, 4 of neighbours by matrices, 5 of halves by
// matrices; JOINED, whether tokens of a second tensor follow; THREADS, ROWS, HEADS, PACK; EXACT, whether the threads have
// just as many columns as a head.

#include "elements.h"

typedef Stored<TYPE>::Bits Element;
typedef Pack<TYPE, PACK> Access;

enum { kNone, kComplex, kNeighbours, kHalves, kMatrices, kMatricesOfHalves };
constexpr bool kOfHalves = FORM == kHalves || FORM == kMatricesOfHalves;
constexpr bool kOtherThread = kOfHalves || (FORM != kNone && PACK == 1);

// x: (batch, split, heads, columns) with these strides, columns next to each other; second: (batch, tokens - split, heads,
// columns) likewise, not read without JOINED, when split is tokens; out: (batch, tokens, heads, columns), dense. columns
// is a multiple of PACK, and so is its half in FORM 3 and 5. weight, second_weight: (columns,), or null. cosine, sine:
// (batch, tokens, columns) with strides of a batch and of a token; in FORM 1 cosine has the pairs (cosine, sine) of
// neighbours, in FORM 4 and 5 the matrices of pairs, row by row.
extern "C" __global__ void __launch_bounds__(THREADS* ROWS)
    norm_rotary(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ second,
                const Element* __restrict__ second_weight, const float* __restrict__ cosine,
                const float* __restrict__ sine, Element* __restrict__ out, long long batch_stride, long long token_stride,
                long long head_stride, long long second_batch, long long second_token, long long second_head,
                long long angle_batch, long long angle_token, int tokens, int heads, int columns, int split, float eps) {
  pdl_wait();
  const int token = blockIdx.x % tokens, batch = blockIdx.x / tokens;
  const int column = threadIdx.x % THREADS * PACK, first = blockIdx.y * (ROWS * HEADS) + threadIdx.x / THREADS;
  const bool inside = EXACT || column < columns;
  // of FORM 3, and of neighbours of which each thread has one
  const int other = kOfHalves ? (column < columns / 2 ? column + columns / 2 : column - columns / 2) : column ^ 1;
  const Element* from = x + batch * batch_stride + token * token_stride;
#if JOINED
  if (token >= split) {
    from = second + batch * second_batch + (token - split) * second_token;
    weight = second_weight, head_stride = second_head;
  }
#endif
  Access loaded[HEADS], others[HEADS], scales, other_scales;
#pragma unroll
  for (int i = 0; i < HEADS; ++i) {
    // threads behind the last head do the same as those of the last head
    const Element* const head = from + min(first + i * ROWS, heads - 1) * head_stride;
    loaded[i] = Access();
    if (inside) load(head + column, loaded[i]);
    if (kOtherThread) {
      others[i] = Access();
      if (inside) load(head + other, others[i]);
    }
  }
  scales = Access(), other_scales = Access();
  if (weight && inside) {
    load(weight + column, scales);
    if (kOtherThread) load(weight + other, other_scales);
  }
  float cosines[PACK], sines[PACK];
#pragma unroll
  for (int j = 0; j < PACK; ++j) cosines[j] = 1.f, sines[j] = 0.f;
  if (FORM != kNone && inside) {
    const long long angle = batch * angle_batch + token * angle_token;
    if (FORM == kComplex) {
#pragma unroll
      for (int j = 0; j < PACK; ++j) {
        const float* const pair = cosine + angle + (column + j) / 2 * 2;
        cosines[j] = pair[0], sines[j] = pair[1];
      }
    } else if (FORM == kMatrices || FORM == kMatricesOfHalves) {
      const int half = columns / 2;
#pragma unroll
      for (int j = 0; j < PACK; ++j) {
        const int at = column + j, row = kOfHalves ? column >= half : at % 2;
        const float* const factors = cosine + angle + (kOfHalves ? at - row * half : at / 2) * 4 + row * 2;
        cosines[j] = factors[row], sines[j] = factors[1 - row];
      }
    } else {
#pragma unroll
      for (int j = 0; j < PACK; ++j) cosines[j] = cosine[angle + column + j], sines[j] = sine[angle + column + j];
    }
    // the first of two loses the product of the second
#pragma unroll
    for (int j = 0; j < PACK; ++j)
      if (FORM < kMatrices && (kOfHalves ? column < columns / 2 : (column + j) % 2 == 0)) sines[j] = -sines[j];
  }
  float scale[PACK], other_scale[PACK];
  scales.to(scale);
  other_scales.to(other_scale);
#pragma unroll
  for (int i = 0; i < HEADS; ++i) {
    float value[PACK], turned[PACK];
    loaded[i].to(value);
    if (kOtherThread) others[i].to(turned);
    if (NORM) {
      float squares = 0.f;
#pragma unroll
      for (int j = 0; j < PACK; ++j) squares += value[j] * value[j];
      const float rstd = rsqrtf(__fdividef(sum_of_lanes<THREADS>(squares), columns) + eps);
#pragma unroll
      for (int j = 0; j < PACK; ++j) {
        value[j] *= weight ? rstd * scale[j] : rstd;
        if (kOtherThread) turned[j] *= weight ? rstd * other_scale[j] : rstd;
      }
    }
    if (!kOtherThread) {
#pragma unroll
      for (int j = 0; j < PACK; ++j) turned[j] = value[j ^ 1];
    }
    if (FORM != kNone) {
      float result[PACK];
#pragma unroll
      for (int j = 0; j < PACK; ++j) result[j] = value[j] * cosines[j] + turned[j] * sines[j];
#pragma unroll
      for (int j = 0; j < PACK; ++j) value[j] = result[j];
    }
    const int head = first + i * ROWS;
    if (inside && head < heads) store<TYPE>(out + ((long long)blockIdx.x * heads + head) * columns + column, value);
  }
}
