// RMS or layer norm of rows, scaled and shifted by vectors of a sample; before it a residual addition, of what a gate and
// an RMS norm may be applied to, if ADD is 1; its result as int8 with a scale for each row, if CODES is 1; for any card.
//
// Threads and columns are as in layer_norm.h, but THREADS is a multiple of 32.
//
// Compile-time parameters: TYPE, THREADS, ROWS, CHUNKS, PACK, EXACT (layer_norm.h); ADD; INNER, whether an RMS norm is
// added; TANH, whether the gate's tanh is multiplied by; NORM: 0 no norm after the addition, 1 RMS, 2 layer norm;
// PLUS_ONE, whether 1 is added to the scale; CODES; GROUP, how many neighbours are rotated before (quantise.h), which
// needs PACK to be 8.

#include "elements.h"
#include "layer_norm.h"
#if CODES
#include "quantise.h"
typedef signed char Out;
#else
typedef In Out;
#endif

// A vector for each sample, or null: `stride` elements apart, for `rows` rows each.
struct Vectors {
  const In* first;
  long long stride;
  int rows;
};

__device__ __forceinline__ const In* vector_of(const Vectors& vectors, int row) {
  return vectors.first ? vectors.first + row / vectors.rows * vectors.stride : nullptr;
}

__device__ __forceinline__ float sum_of_squares(const float (&value)[CHUNKS][PACK], float* room) {
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
    for (int j = 0; j < PACK; ++j) squares += value[i][j] * value[i][j];
  return sum_of_row(squares, room);
}

template <int PlusOne>
__device__ __forceinline__ void multiply(float (&value)[CHUNKS][PACK], const In* by, int columns) {
  Access factors[CHUNKS];
  load_columns(by, columns, factors);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    float factor[PACK];
    factors[i].to(factor);
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[i][j] *= PlusOne ? 1.f + factor[j] : factor[j];
  }
}

__device__ __forceinline__ void add(float (&value)[CHUNKS][PACK], const In* terms, int columns) {
  Access loaded[CHUNKS];
  load_columns(terms, columns, loaded);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    float term[PACK];
    loaded[i].to(term);
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[i][j] += term[j];
  }
}

// x, y, out_sum, out: (rows, columns); inner_weight, weight, bias: (columns,), or null; gate, scale, shift: vectors of
// samples, or null; scales: (rows,), or null. columns is a multiple of PACK, and of GROUP. out_sum = x + gate * inner(y),
// rounded, which the norm reads; without ADD it reads x.
extern "C" __global__ void __launch_bounds__(THREADS* ROWS)
    modulated_norm(const In* __restrict__ x, const In* __restrict__ y, const In* __restrict__ inner_weight,
                   const In* __restrict__ weight, const In* __restrict__ bias, const In* __restrict__ gate,
                   const In* __restrict__ scale, const In* __restrict__ shift, In* __restrict__ out_sum,
                   Out* __restrict__ out, float* __restrict__ scales, long long gate_stride, long long scale_stride, long long shift_stride,
                   int gate_rows, int scale_rows, int shift_rows, int rows, int columns, float inner_eps, float eps) {
  pdl_wait();
#if INNER || NORM
  __shared__ float room[3][THREADS * ROWS / 32];
#endif
  const int row = row_of(rows);
  const long long start = (long long)row * columns;
  Access loaded[CHUNKS];
  float value[CHUNKS][PACK];
  load_columns(x + start, columns, loaded);
#if ADD
  Access added[CHUNKS], gates[CHUNKS];
  load_columns(y + start, columns, added);
  load_columns(vector_of({gate, gate_stride, gate_rows}, row), columns, gates);
#if INNER
  Access vectors[CHUNKS];
  load_columns(inner_weight, columns, vectors);
#endif
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) added[i].to(value[i]);
#if INNER
  const float inner = rsqrtf(__fdividef(sum_of_squares(value, room[0]), columns) + inner_eps);
#endif
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    float other[PACK];
#if INNER
    vectors[i].to(other);
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[i][j] *= inner_weight ? inner * other[j] : inner;
#endif
    if (gate) {
      gates[i].to(other);
#pragma unroll
      for (int j = 0; j < PACK; ++j) value[i][j] *= TANH ? tanhf(other[j]) : other[j];
    }
    loaded[i].to(other);
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[i][j] += other[j];
    // the norm reads the sum as it is stored
    loaded[i].from(value[i]);
    if (EXACT || column_of(i) < columns) *reinterpret_cast<Access*>(out_sum + start + column_of(i)) = loaded[i];
  }
#endif
#if NORM
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) loaded[i].to(value[i]);
#if NORM == 2
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
    for (int j = 0; j < PACK; ++j) sum += value[i][j];
  const float mean = __fdividef(sum_of_row(sum, room[1]), columns);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[i][j] = EXACT || column_of(i) < columns ? value[i][j] - mean : 0.f;
#endif
  const float rstd = rsqrtf(__fdividef(sum_of_squares(value, room[2]), columns) + eps);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[i][j] *= rstd;
  if (weight) multiply<0>(value, weight, columns);
  if (bias) add(value, bias, columns);
  if (scale) multiply<PLUS_ONE>(value, vector_of({scale, scale_stride, scale_rows}, row), columns);
  if (shift) add(value, vector_of({shift, shift_stride, shift_rows}, row), columns);
#if CODES
  __shared__ unsigned words[THREADS * ROWS / 32];
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
#if GROUP
    rotate(value[i], GROUP);
#endif
    if (EXACT || column_of(i) < columns) largest = largest_of(largest, value[i]);
  }
  const RowScale found = row_scale(largest_of_row<THREADS>(largest, words), unit_of(GROUP));
  if (threadIdx.x % THREADS == 0) scales[row] = found.scale;
#endif
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    if (!EXACT && column_of(i) >= columns) continue;
#if CODES
    store_codes(out + start + column_of(i), value[i], found);
#else
    store<TYPE>(out + start + column_of(i), value[i]);
#endif
  }
#endif
}
