// (x + bias + residual) * scale of rows of channels; for any card.
//
// Compile-time parameters: TYPE (elements.h); PACK, elements of a thread.

#include "elements.h"

typedef Stored<TYPE>::Bits Element;

// x, residual, out: (rows, channels); bias: (channels,); residual and bias may be null. channels is a multiple of PACK.
extern "C" __global__ void __launch_bounds__(256)
    bias_add(const Element* __restrict__ x, const Element* __restrict__ bias, const Element* __restrict__ residual,
             Element* __restrict__ out, long long count, int channels, float scale) {
  pdl_wait();
  const long long at = ((long long)blockIdx.x * 256 + threadIdx.x) * PACK;
  if (at >= count) return;
  // all loads are in flight before the first is converted
  Pack<TYPE, PACK> loaded, more, offset;
  load(x + at, loaded);
  if (residual) load(residual + at, more);
  if (bias) load(bias + (unsigned)(at / PACK) % (unsigned)(channels / PACK) * PACK, offset);
  float value[PACK], add[PACK];
  loaded.to(value);
  if (bias) {
    offset.to(add);
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[j] += add[j];
  }
  if (residual) {
    more.to(add);
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[j] += add[j];
  }
#pragma unroll
  for (int j = 0; j < PACK; ++j) value[j] *= scale;
  store<TYPE>(out + at, value);
}
