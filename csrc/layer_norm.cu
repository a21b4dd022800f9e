// Layer norm of rows, after a residual addition if ADD is 1; for any card. The operands are in layer_norm.h.
//
// Compile-time parameters: those of layer_norm.h; OUT, the type of the norm (elements.h).

#include "elements.h"
#include "layer_norm.h"

typedef Stored<OUT>::Bits Out;

extern "C" __global__ void __launch_bounds__(THREADS* ROWS, 1024 / (THREADS * ROWS))
    layer_norm(const In* __restrict__ x, const In* __restrict__ residual, const In* __restrict__ shift,
               const In* __restrict__ post_bias, const In* __restrict__ weight, const In* __restrict__ bias,
               In* __restrict__ out_sum, Out* __restrict__ out, int rows, int columns, float eps) {
  pdl_wait();
  const long long start = (long long)row_of(rows) * columns;
  float value[CHUNKS][PACK];
  normalise({x, residual, shift, post_bias, weight, bias, out_sum, columns, eps}, start, value);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
    if (EXACT || column_of(i) < columns) store<OUT>(out + start + column_of(i), value[i]);
}
