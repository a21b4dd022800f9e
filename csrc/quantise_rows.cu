// Rows as int8 with a scale each, after a rotation of groups of neighbours if GROUP is not 0; for any card.
//
// THREADS threads, a part of a warp or whole warps, keep a row in registers; a block has ROWS rows. A thread has CHUNKS
// times PACK neighbouring columns, THREADS * PACK columns apart.
//
// Compile-time parameters: TYPE, that of the rows (elements.h); GROUP, 0, 64, 128 or 256, for which PACK is 8 and
// THREADS at least GROUP / 8; THREADS, ROWS, CHUNKS, PACK; EXACT, whether the threads have just as many columns as a
// row.

#include "elements.h"
#include "quantise.h"

typedef Stored<TYPE>::Bits In;
typedef Pack<TYPE, PACK> Access;

// x, out: (rows, columns), columns a multiple of PACK and of GROUP; scales: (rows,).
extern "C" __global__ void __launch_bounds__(THREADS* ROWS, 1024 / (THREADS * ROWS))
    quantise_rows(const In* __restrict__ x, signed char* __restrict__ out, float* __restrict__ scales, int rows,
                  int columns) {
  pdl_wait();
  __shared__ unsigned room[THREADS * ROWS / 32];
  // threads behind the last row do the same as those of the last row
  const int row = min((int)(blockIdx.x * ROWS + threadIdx.x / THREADS), rows - 1);
  const long long start = (long long)row * columns;
  const int thread = threadIdx.x % THREADS;
  Access loaded[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int column = (i * THREADS + thread) * PACK;
    loaded[i] = Access();
    if (EXACT || column < columns) load(x + start + column, loaded[i]);
  }
  float values[CHUNKS][PACK];
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    loaded[i].to(values[i]);
#if GROUP
    rotate(values[i], GROUP);
#endif
    largest = largest_of(largest, values[i]);
  }
  const RowScale found = row_scale(largest_of_row<THREADS>(largest, room), unit_of(GROUP));
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const int column = (i * THREADS + thread) * PACK;
    if (EXACT || column < columns) store_codes(out + start + column, values[i], found);
  }
  if (thread == 0) scales[row] = found.scale;
}
