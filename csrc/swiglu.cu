// SwiGLU: value * silu(gate) of rows that may be parts of wider ones; for any card.
//
// Compile-time parameters: TYPE (elements.h); PACK, elements of an access; PACKS, accesses of a thread.

#include "elements.h"

typedef Stored<TYPE>::Bits Element;

// gate, value: (rows, columns) with rows so many elements apart; out: (rows, columns), dense. columns and the distances
// are multiples of PACK, and there are fewer than 2^31 accesses.
extern "C" __global__ void __launch_bounds__(256, 4)
    swiglu(const Element* __restrict__ gate, const Element* __restrict__ value, Element* __restrict__ out,
           long long gate_stride, long long value_stride, int rows, int columns) {
  pdl_wait();
  const unsigned across = columns / PACK, packs = rows * across;
  Pack<TYPE, PACK> gates[PACKS], values[PACKS];
  const unsigned first = blockIdx.x * (256 * PACKS) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const unsigned at = first + 256 * i, row = at / across, column = at % across * PACK;
    if (at >= packs) continue;
    load(gate + row * gate_stride + column, gates[i]);
    load(value + row * value_stride + column, values[i]);
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const unsigned at = first + 256 * i;
    if (at >= packs) continue;
    float x[PACK], y[PACK];
    gates[i].to(x);
    values[i].to(y);
#pragma unroll
    for (int j = 0; j < PACK; ++j) y[j] *= x[j] / (1.f + expf(-x[j]));
    store<TYPE>(out + (long long)at * PACK, y);
  }
}
