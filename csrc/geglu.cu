// GEGLU: value * gelu(gate) of the halves of rows; for any card.
//
// Compile-time parameters: TYPE (elements.h); GATE_FIRST, whether the gate is the first half; TANH, GELU by tanh instead
// of erf; PACK, elements of an access; PACKS, accesses of a thread.

#include "elements.h"

typedef Stored<TYPE>::Bits Element;

__device__ __forceinline__ float gelu(float x) {
#if TANH
  // 0.5 (1 + tanh u) = 1 / (1 + exp(-2 u))
  return x / (1.f + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
#else
  // x * Phi(x), log2 of Phi on the negative side by a polynomial, relative error 1e-5: erff takes more time than the
  // memory
  const float z = fminf(fabsf(x), 8.f);
  float log = fmaf(7.070178753565415e-08f, z, -3.5380496683501406e-06f);
  log = fmaf(log, z, 7.800359890097752e-05f);
  log = fmaf(log, z, -0.001010911539196968f);
  log = fmaf(log, z, 0.008718260563910007f);
  log = fmaf(log, z, -0.05423998460173607f);
  log = fmaf(log, z, -0.45830774307250977f);
  log = fmaf(log, z, -1.1512657403945923f);
  const float below = exp2f(fmaf(log, z, -1.f));
  return x * (x < 0.f ? below : 1.f - below);
#endif
}

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
