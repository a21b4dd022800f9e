// Activations of rows as int8 with a scale each, after a rotation of groups of neighbours if GROUP is not 0; for any card.
//
// THREADS threads, whole warps, keep a row in registers; a block has ROWS rows. A thread has CHUNKS times PACK
// neighbouring columns, THREADS * PACK columns apart.
//
// Compile-time parameters: TYPE, that of the rows (elements.h); GATED, whether it is SwiGLU of two rows, else GELU of
// one; TANH, which form of GELU; JOINED, whether the first columns are those of another tensor, as they are; GROUP, 0,
// 64, 128 or 256, for which PACK is 8; THREADS, ROWS, CHUNKS, PACK; EXACT, whether the threads have just as many columns
// as a row.

#include "elements.h"
#if !TANH
#include "gelu.h"
#endif
#include "quantise.h"

typedef Stored<TYPE>::Bits In;
typedef Pack<TYPE, PACK> Access;

// x / (1 + 2^power). Approximate powers and quotients, of relative error 1e-5: exact ones take more time than the memory.
__device__ __forceinline__ float divided(float x, float power) { return __fdividef(x, 1.f + exp_2(power)); }

#if TANH
// x / (1 + exp(-2 u)), u = 0.797885 (x + 0.044715 x^3), which is 0.5 x (1 + tanh u)
__device__ __forceinline__ float gelu(float x) {
  return divided(x, x * fmaf(x * x, -0.10294324f, -2.3022082f));
}
#endif

// joined: (rows, split); x, gate: (rows, columns - split); rows so many elements apart. Strides, columns and split are
// multiples of PACK, columns is one of GROUP. gate is not read without GATED; without JOINED joined is not read, and
// split is 0. out: (rows, columns), dense. scales: (rows,).
extern "C" __global__ void __launch_bounds__(THREADS* ROWS)
    activation8(const In* __restrict__ x, const In* __restrict__ gate, const In* __restrict__ joined,
                signed char* __restrict__ out, float* __restrict__ scales, long long x_stride, long long gate_stride,
                long long joined_stride, int rows, int columns, int split) {
  pdl_wait();
  __shared__ unsigned room[THREADS * ROWS / 32];
  // threads behind the last row do the same as those of the last row
  const int row = min((int)(blockIdx.x * ROWS + threadIdx.x / THREADS), rows - 1);
  const int thread = threadIdx.x % THREADS;
  Access loaded[CHUNKS];
#if GATED
  Access gates[CHUNKS];
#endif
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int column = (i * THREADS + thread) * PACK;
    const bool plain = JOINED && column < split;
    const In* const from = plain ? joined + row * joined_stride + column : x + row * x_stride + column - split;
    loaded[i] = Access();
    if (EXACT || column < columns) load(from, loaded[i]);
#if GATED
    gates[i] = Access();
    if (!plain && (EXACT || column < columns)) load(gate + row * gate_stride + column - split, gates[i]);
#endif
  }
  float values[CHUNKS][PACK];
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    loaded[i].to(values[i]);
#if GATED
    float factors[PACK];
    gates[i].to(factors);
#endif
    if (!JOINED || (i * THREADS + thread) * PACK >= split) {
#pragma unroll
      for (int j = 0; j < PACK; ++j) {
#if GATED
        values[i][j] *= divided(factors[j], -1.4426950408889634f * factors[j]);
#else
        values[i][j] = gelu(values[i][j]);
#endif
      }
    }
#if GROUP
    rotate(values[i], GROUP);
#endif
    largest = largest_of(largest, values[i]);
  }
  const RowScale found = row_scale(largest_of_row<THREADS>(largest, room), unit_of(GROUP));
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int column = (i * THREADS + thread) * PACK;
    if (EXACT || column < columns) store_codes(out + (long long)row * columns + column, values[i], found);
  }
  if (thread == 0) scales[row] = found.scale;
}
