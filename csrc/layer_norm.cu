// Layer norm of rows, after a residual addition if ADD is 1; for any card.
//
// THREADS threads, a part of a warp or whole warps, keep a row in registers between the passes over it; a block has ROWS
// rows. A thread has CHUNKS times PACK neighbouring columns, THREADS * PACK columns apart.
//
// Compile-time parameters: TYPE and OUT, the types of operands and of the norm (elements.h); THREADS, ROWS, CHUNKS, PACK;
// EXACT, whether the threads have just as many columns as a row.

#include "elements.h"

typedef Stored<TYPE>::Bits In;
typedef Stored<OUT>::Bits Out;
typedef Pack<TYPE, PACK> Access;

// The sum over the threads of a row; `room` is memory for a float of each warp, used by one sum only.
__device__ __forceinline__ float sum_of_row(float x, float* room) {
  x = sum_of_lanes<THREADS < 32 ? THREADS : 32>(x);
  if (THREADS <= 32) return x;
  const int warp = threadIdx.x / 32, first = threadIdx.x / THREADS * (THREADS / 32);
  if (threadIdx.x % 32 == 0) room[warp] = x;
  __syncthreads();
  x = 0.f;
#pragma unroll
  for (int i = 0; i < THREADS / 32; ++i) x += room[first + i];
  return x;
}

__device__ __forceinline__ int column_of(int chunk) { return (chunk * THREADS + threadIdx.x % THREADS) * PACK; }

// Loads a thread's columns of a row, or of a vector; zeros from null, or out of bounds.
__device__ __forceinline__ void load_columns(const In* from, int columns, Access (&to)[CHUNKS]) {
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) to[i] = Access();
  if (!from) return;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
    if (EXACT || column_of(i) < columns) load(from + column_of(i), to[i]);
}

// x, residual, out_sum, out: (rows, columns); shift, post_bias, weight, bias: (columns,), or null. columns is a multiple
// of PACK. out_sum = x + shift + residual, rounded; the norm reads it, then post_bias is added. Without ADD there is x
// alone.
extern "C" __global__ void __launch_bounds__(THREADS* ROWS, 1024 / (THREADS * ROWS))
    layer_norm(const In* __restrict__ x, const In* __restrict__ residual, const In* __restrict__ shift,
               const In* __restrict__ post_bias, const In* __restrict__ weight, const In* __restrict__ bias,
               In* __restrict__ out_sum, Out* __restrict__ out, int rows, int columns, float eps) {
  pdl_wait();
  __shared__ float room[2][THREADS * ROWS / 32];
  // threads behind the last row do the same as those of the last row
  const int row = min((int)(blockIdx.x * ROWS + threadIdx.x / THREADS), rows - 1);
  const long long start = (long long)row * columns;
  // all loads are issued before the first use
  Access loaded[CHUNKS], gamma[CHUNKS], beta[CHUNKS];
  load_columns(x + start, columns, loaded);
#if ADD
  Access added[CHUNKS], shifts[CHUNKS];
  load_columns(residual + start, columns, added);
  load_columns(shift, columns, shifts);
#endif
  float value[CHUNKS][PACK];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    loaded[i].to(value[i]);
#if ADD
    float more[PACK], shift_of[PACK];
    added[i].to(more);
    shifts[i].to(shift_of);
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[i][j] += shift_of[j] + more[j];
    // the norm reads the sum as it is stored
    loaded[i].from(value[i]);
    loaded[i].to(value[i]);
#endif
  }
#if ADD
  if (post_bias) {
    load_columns(post_bias, columns, shifts);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      float sum[PACK];
      shifts[i].to(sum);
#pragma unroll
      for (int j = 0; j < PACK; ++j) sum[j] += value[i][j];
      loaded[i].from(sum);
    }
  }
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
    if (EXACT || column_of(i) < columns) *reinterpret_cast<Access*>(out_sum + start + column_of(i)) = loaded[i];
#endif
  load_columns(weight, columns, gamma);
  load_columns(bias, columns, beta);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
    for (int j = 0; j < PACK; ++j) sum += value[i][j];
  const float mean = __fdividef(sum_of_row(sum, room[0]), columns);
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
      value[i][j] = EXACT || column_of(i) < columns ? value[i][j] - mean : 0.f;
      squares += value[i][j] * value[i][j];
    }
  }
  const float rstd = rsqrtf(__fdividef(sum_of_row(squares, room[1]), columns) + eps);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    float scale[PACK], more[PACK];
    gamma[i].to(scale);
    beta[i].to(more);
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
      value[i][j] *= rstd;
      value[i][j] = weight ? value[i][j] * scale[j] + more[j] : value[i][j] + more[j];
    }
    if (EXACT || column_of(i) < columns) store<OUT>(out + start + column_of(i), value[i]);
  }
}
