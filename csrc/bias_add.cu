// (x + bias + residual) * scale of rows of channels; for any card.
//
// Compile-time parameters: TYPE (elements.h); PACK, elements of an access; PACKS, accesses of a thread.

#include "elements.h"

typedef Stored<TYPE>::Bits Element;

// x, residual, out: (rows, channels); bias: (channels,); residual and bias may be null. channels is a multiple of PACK.
extern "C" __global__ void __launch_bounds__(256)
    bias_add(const Element* __restrict__ x, const Element* __restrict__ bias, const Element* __restrict__ residual,
             Element* __restrict__ out, long long count, int channels, float scale) {
  pdl_wait();
  Pack<TYPE, PACK> loaded[PACKS], more[PACKS];
  const long long first = ((long long)blockIdx.x * (256 * PACKS) + threadIdx.x) * PACK;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const long long at = first + 256 * PACK * i;
    if (at >= count) continue;
    load(x + at, loaded[i]);
    if (residual) load(residual + at, more[i]);
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const long long at = first + 256 * PACK * i;
    if (at >= count) continue;
    float value[PACK], add[PACK];
    loaded[i].to(value);
    if (bias) {
      load<TYPE>(bias + (unsigned)(at / PACK) % (unsigned)(channels / PACK) * PACK, add);
#pragma unroll
      for (int j = 0; j < PACK; ++j) value[j] += add[j];
    }
    if (residual) {
      more[i].to(add);
#pragma unroll
      for (int j = 0; j < PACK; ++j) value[j] += add[j];
    }
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[j] *= scale;
    store<TYPE>(out + at, value);
  }
}
