// Layer norm of rows, after a residual addition where ADD is 1; for any card.
//
// THREADS threads, whole warps, keep a row in registers between the passes over it; a block has ROWS rows. A thread has
// CHUNKS times PACK neighbouring columns, THREADS * PACK columns apart.
//
// Compile-time parameters: TYPE and OUT, the types of operands and of the norm (elements.h); THREADS, ROWS, CHUNKS, PACK.

#include "elements.h"

typedef Stored<TYPE>::Bits In;
typedef Stored<OUT>::Bits Out;

// The sum over the threads of a row; `room` is memory for a float of each warp.
__device__ __forceinline__ float sum_of_row(float x, float* room) {
  x = sum_of_warp(x);
  if (THREADS == 32) return x;
  const int warp = threadIdx.x / 32, first = threadIdx.x / THREADS * (THREADS / 32);
  if (threadIdx.x % 32 == 0) room[warp] = x;
  __syncthreads();
  x = 0.f;
  for (int i = 0; i < THREADS / 32; ++i) x += room[first + i];
  __syncthreads();
  return x;
}

// x, residual, out_sum, out: (rows, columns); shift, post_bias, weight, bias: (columns,), or null. columns is a multiple
// of PACK. out_sum = x + shift + residual, rounded; the norm reads it, then post_bias is added. Without ADD there is x
// alone.
extern "C" __global__ void __launch_bounds__(THREADS* ROWS)
    layer_norm(const In* __restrict__ x, const In* __restrict__ residual, const In* __restrict__ shift,
               const In* __restrict__ post_bias, const In* __restrict__ weight, const In* __restrict__ bias,
               In* __restrict__ out_sum, Out* __restrict__ out, int rows, int columns, float eps) {
  __shared__ float room[THREADS * ROWS / 32];
  const int row = blockIdx.x * ROWS + threadIdx.x / THREADS;
  const long long start = (long long)row * columns;
  // all loads are issued before the first use
  Pack<TYPE, PACK> loaded[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int column = (i * THREADS + threadIdx.x % THREADS) * PACK;
    if (row < rows && column < columns) load(x + start + column, loaded[i]);
  }
#if ADD
  Pack<TYPE, PACK> added[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int column = (i * THREADS + threadIdx.x % THREADS) * PACK;
    if (row < rows && column < columns) load(residual + start + column, added[i]);
  }
#endif
  float value[CHUNKS][PACK];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int column = (i * THREADS + threadIdx.x % THREADS) * PACK;
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[i][j] = 0.f;
    if (row >= rows || column >= columns) continue;
    unpack(loaded[i], value[i]);
#if ADD
    float more[PACK];
    if (shift) {
      load<TYPE>(shift + column, more);
#pragma unroll
      for (int j = 0; j < PACK; ++j) value[i][j] += more[j];
    }
    unpack(added[i], more);
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[i][j] = rounded<TYPE>(value[i][j] + more[j]);
    if (post_bias) {
      load<TYPE>(post_bias + column, more);
#pragma unroll
      for (int j = 0; j < PACK; ++j) more[j] += value[i][j];
      store<TYPE>(out_sum + start + column, more);
    } else {
      store<TYPE>(out_sum + start + column, value[i]);
    }
#endif
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
    for (int j = 0; j < PACK; ++j) sum += value[i][j];
  const float mean = sum_of_row(sum, room) / columns;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int column = (i * THREADS + threadIdx.x % THREADS) * PACK;
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
      value[i][j] = column < columns ? value[i][j] - mean : 0.f;
      squares += value[i][j] * value[i][j];
    }
  }
  const float rstd = 1.f / sqrtf(sum_of_row(squares, room) / columns + eps);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int column = (i * THREADS + threadIdx.x % THREADS) * PACK;
    if (row >= rows || column >= columns) continue;
    float gamma[PACK], beta[PACK];
#pragma unroll
    for (int j = 0; j < PACK; ++j) gamma[j] = 1.f, beta[j] = 0.f;
    if (weight) load<TYPE>(weight + column, gamma);
    if (bias) load<TYPE>(bias + column, beta);
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[i][j] = value[i][j] * rstd * gamma[j] + beta[j];
    store<OUT>(out + start + column, value[i]);
  }
}
