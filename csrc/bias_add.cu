// (x + bias + residual) * scale of rows of channels; for any card.
//
// Compile-time parameters: TYPE (elements.h); PACK, elements of an access; PACKS, accesses of a thread.

#include "elements.h"

typedef Stored<TYPE>::Bits Element;

// x, residual, out: (rows, channels); bias: (channels,); residual and bias may be null. channels is a multiple of PACK.
extern "C" __global__ void __launch_bounds__(256)
    bias_add(const Element* x, const Element* bias, const Element* residual, Element* out, long long count,
             int channels, float scale) {
  pdl_wait();
  float value[PACKS][PACK], more[PACKS][PACK];
  const long long first = ((long long)blockIdx.x * (256 * PACKS) + threadIdx.x) * PACK;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const long long at = first + 256 * PACK * i;
    if (at >= count) continue;
    load<TYPE>(x + at, value[i]);
    if (residual) load<TYPE>(residual + at, more[i]);
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const long long at = first + 256 * PACK * i;
    if (at >= count) continue;
    float add[PACK];
    if (bias) {
      load<TYPE>(bias + at % channels, add);
      for (int j = 0; j < PACK; ++j) value[i][j] += add[j];
    }
    for (int j = 0; j < PACK; ++j) value[i][j] = (residual ? value[i][j] + more[i][j] : value[i][j]) * scale;
    store<TYPE>(out + at, value[i]);
  }
}
