// GEGLU: value * gelu(gate) of the halves of rows; for any card.
//
// Compile-time parameters: TYPE (elements.h); GATE_FIRST, whether the gate is the first half; TANH (gelu.h);
// PACK, elements of an access; PACKS, accesses of a thread.

#include "elements.h"

#include "gelu.h"

typedef Stored<TYPE>::Bits Element;

// x: (rows, 2 half); out: (rows, half); half is a multiple of PACK, and there are fewer
// than 2^31 accesses.
extern "C" __global__ void __launch_bounds__(256, 4)
    geglu(const Element* __restrict__ x, Element* __restrict__ out, int rows, int half) {
  pdl_wait();
  const unsigned across = half / PACK, packs = rows * across;
  Pack<TYPE, PACK> value[PACKS], gate[PACKS];
  const unsigned first = blockIdx.x * (256 * PACKS) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const unsigned at = first + 256 * i;
    if (at >= packs) continue;
    const Element* const from = x + ((long long)at + at / across * across) * PACK;
    load(from + (GATE_FIRST ? half : 0), value[i]);
    load(from + (GATE_FIRST ? 0 : half), gate[i]);
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const unsigned at = first + 256 * i;
    if (at >= packs) continue;
    float y[PACK], gates[PACK];
    value[i].to(y);
    gate[i].to(gates);
#pragma unroll
    for (int j = 0; j < PACK; ++j) y[j] *= gelu(gates[j]);
    store<TYPE>(out + (long long)at * PACK, y);
  }
}
