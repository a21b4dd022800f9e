// Layer norm of rows, after a residual addition where ADD is 1; for any card.
//
// THREADS threads, whole warps, keep a row in registers between the passes over it; a block has ROWS rows. A thread has
// CHUNKS times PACK neighbouring columns, THREADS * PACK columns apart.
//
// Compile-time parameters: TYPE and OUT, the types of operands and of the norm (elements.h); THREADS, ROWS, CHUNKS, PACK.

#include "elements.h"

typedef Stored<TYPE>::Bits In;
typedef Stored<OUT>::Bits Out;

// The sum over the threads of a row; `room` is memory for a float of each warp, used by one sum only.
__device__ __forceinline__ float sum_of_row(float x, float* room) {
  x = sum_of_warp(x);
  if (THREADS == 32) return x;
  const int warp = threadIdx.x / 32, first = threadIdx.x / THREADS * (THREADS / 32);
  if (threadIdx.x % 32 == 0) room[warp] = x;
  __syncthreads();
  x = 0.f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) x += room[first + i];
  return x;
}

typedef Pack<TYPE, PACK> Access;

// Loads a thread's columns of a row, or of a vector; nothing from null, or out of bounds.
__device__ __forceinline__ void load_columns(const In* from, int columns, Access (&to)[CHUNKS]) {
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int column = (i * THREADS + threadIdx.x % THREADS) * PACK;
    to[i] = Access();
    if (from && column < columns) load(from + column, to[i]);
  }
}

// x, residual, out_sum, out: (rows, columns); shift, post_bias, weight, bias: (columns,), or null. columns is a multiple
// of PACK. out_sum = x + shift + residual, rounded; the norm reads it, then post_bias is added. Without ADD there is x
// alone.
extern "C" __global__ void __launch_bounds__(THREADS* ROWS, 1024 / (THREADS * ROWS))
    layer_norm(const In* __restrict__ x, const In* __restrict__ residual, const In* __restrict__ shift,
               const In* __restrict__ post_bias, const In* __restrict__ weight, const In* __restrict__ bias,
               In* __restrict__ out_sum, Out* __restrict__ out, int rows, int columns, float eps) {
  __shared__ float room[2][THREADS * ROWS / 32];
  const int row = blockIdx.x * ROWS + threadIdx.x / THREADS;
  const long long start = (long long)row * columns;
  const bool inside = row < rows;
  // all loads are issued before the first use
  Access loaded[CHUNKS];
  load_columns(inside ? x + start : nullptr, columns, loaded);
#if ADD
  Access added[CHUNKS], shifts[CHUNKS];
  load_columns(inside ? residual + start : nullptr, columns, added);
  load_columns(shift, columns, shifts);
#endif
  float value[CHUNKS][PACK];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    unpack(loaded[i], value[i]);
#if ADD
    const int column = (i * THREADS + threadIdx.x % THREADS) * PACK;
#pragma unroll
    for (int j = 0; j < PACK; ++j)
      value[i][j] += to_float<TYPE>(shifts[i].of[j]) + to_float<TYPE>(added[i].of[j]);
    // the norm reads the sum as it is stored
    const Access sum = packed<TYPE>(value[i]);
    unpack(sum, value[i]);
    if (!inside || column >= columns) continue;
    if (post_bias) {
      float more[PACK];
      load<TYPE>(post_bias + column, more);
#pragma unroll
      for (int j = 0; j < PACK; ++j) more[j] += value[i][j];
      store<TYPE>(out_sum + start + column, more);
    } else {
      *reinterpret_cast<Access*>(out_sum + start + column) = sum;
    }
#endif
  }
  Access gamma[CHUNKS], beta[CHUNKS];
  load_columns(weight, columns, gamma);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
    for (int j = 0; j < PACK; ++j) sum += value[i][j];
  const float mean = sum_of_row(sum, room[0]) / columns;
  load_columns(bias, columns, beta);
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
  const float rstd = 1.f / sqrtf(sum_of_row(squares, room[1]) / columns + eps);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int column = (i * THREADS + threadIdx.x % THREADS) * PACK;
    if (!inside || column >= columns) continue;
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
      const float scale = weight ? to_float<TYPE>(gamma[i].of[j]) : 1.f;
      value[i][j] = value[i][j] * rstd * scale + to_float<TYPE>(beta[i].of[j]);
    }
    store<OUT>(out + start + column, value[i]);
  }
}
