// Layer norm of rows, after a residual addition if ADD is 1; to be included after elements.h.
//
// THREADS threads, a part of a warp or whole warps, keep a row in registers between the passes over it; a block has ROWS
// rows. A thread has CHUNKS times PACK neighbouring columns, THREADS * PACK columns apart.
//
// Compile-time parameters: TYPE, that of the operands (elements.h); THREADS, ROWS, CHUNKS, PACK; EXACT, whether the
// threads have just as many columns as a row.

typedef Stored<TYPE>::Bits In;
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

// What the norm is taken of, and its parameters: x, residual, out_sum: (rows, columns); shift, post_bias, weight, bias:
// (columns,), or null. columns is a multiple of PACK. out_sum = x + shift + residual, rounded; the norm reads it, then
// post_bias is added. Without ADD there is x alone.
struct Norm {
  const In *x, *residual, *shift, *post_bias, *weight, *bias;
  In* out_sum;
  int columns;
  float eps;
};

__device__ __forceinline__ int row_of(int rows) {
  // threads behind the last row do the same as those of the last row
  return min((int)(blockIdx.x * ROWS + threadIdx.x / THREADS), rows - 1);
}

// Stores the sum, and gives a thread's columns of the norm.
__device__ __forceinline__ void normalise(const Norm& norm, long long start, float (&value)[CHUNKS][PACK]) {
  __shared__ float room[2][THREADS * ROWS / 32];
  const int columns = norm.columns;
  // all loads are issued before the first use
  Access loaded[CHUNKS], gamma[CHUNKS], beta[CHUNKS];
  load_columns(norm.x + start, columns, loaded);
#if ADD
  Access added[CHUNKS], shifts[CHUNKS];
  load_columns(norm.residual + start, columns, added);
  load_columns(norm.shift, columns, shifts);
#endif
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
  if (norm.post_bias) {
    load_columns(norm.post_bias, columns, shifts);
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
    if (EXACT || column_of(i) < columns) *reinterpret_cast<Access*>(norm.out_sum + start + column_of(i)) = loaded[i];
#endif
  load_columns(norm.weight, columns, gamma);
  load_columns(norm.bias, columns, beta);
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
  const float rstd = rsqrtf(__fdividef(sum_of_row(squares, room[1]), columns) + norm.eps);
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    float scale[PACK], more[PACK];
    gamma[i].to(scale);
    beta[i].to(more);
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
      value[i][j] *= rstd;
      value[i][j] = norm.weight ? value[i][j] * scale[j] + more[j] : value[i][j] + more[j];
    }
  }
}
