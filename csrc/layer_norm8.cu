// Layer norm of rows as int8 with a scale each, after a residual addition if ADD is 1; for any card. The operands are in
// layer_norm.h.
//
// Compile-time parameters: those of layer_norm.h.

#include "elements.h"
#include "layer_norm.h"
#include "quantise.h"

// out: (rows, columns); scales: (rows,).
extern "C" __global__ void __launch_bounds__(THREADS* ROWS, 1024 / (THREADS * ROWS))
    layer_norm8(const In* __restrict__ x, const In* __restrict__ residual, const In* __restrict__ shift,
                const In* __restrict__ post_bias, const In* __restrict__ weight, const In* __restrict__ bias,
                In* __restrict__ out_sum, signed char* __restrict__ out, float* __restrict__ scales, int rows,
                int columns, float eps) {
  pdl_wait();
  __shared__ unsigned room[THREADS * ROWS / 32];
  const int row = row_of(rows);
  const long long start = (long long)row * columns;
  float value[CHUNKS][PACK];
  normalise({x, residual, shift, post_bias, weight, bias, out_sum, columns, eps}, start, value);
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
    if (EXACT || column_of(i) < columns) largest = largest_of(largest, value[i]);
  const RowScale found = row_scale(largest_of_row<THREADS>(largest, room), 1.f);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
    if (EXACT || column_of(i) < columns) store_codes(out + start + column_of(i), value[i], found);
  if (threadIdx.x % THREADS == 0) scales[row] = found.scale;
}
