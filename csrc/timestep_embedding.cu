// Sine and cosine of timesteps times frequencies; for any card.
//
// Compile-time parameters: TIME, the type of timesteps: as TYPE of elements.h, or kInt32 or kInt64; OUT, the type of the
// result; THREADS.

#include "elements.h"

enum { kInt32 = 3, kInt64 = 4 };

template <int Type>
struct Time {
  typedef typename Stored<Type>::Bits Bits;
  static __device__ float of(Bits t) { return to_float<Type>(t); }
};
template <>
struct Time<kInt32> {
  typedef int Bits;
  static __device__ float of(int t) { return (float)t; }
};
template <>
struct Time<kInt64> {
  typedef long long Bits;
  static __device__ float of(long long t) { return (float)t; }
};

// t: (rows,), `stride` elements apart; frequency: (half,); out: (rows, 2 half), sines on the left if sine_first, else on
// the right.
extern "C" __global__ void __launch_bounds__(THREADS)
    timestep_embedding(const Time<TIME>::Bits* __restrict__ t, const float* __restrict__ frequency,
                       Stored<OUT>::Bits* __restrict__ out, int half, long long stride, int sine_first) {
  pdl_wait();
  const int column = blockIdx.y * THREADS + threadIdx.x;
  if (column >= half) return;
  // rounded as in torch: angles are so large that what rounding leaves of them is seen
  const float angle = rounded_product(Time<TIME>::of(t[blockIdx.x * stride]), frequency[column]);
  const float sine = sinf(angle), cosine = cosf(angle);
  Stored<OUT>::Bits* const row = out + (long long)blockIdx.x * 2 * half + column;
  row[0] = from_float<OUT>(sine_first ? sine : cosine);
  row[half] = from_float<OUT>(sine_first ? cosine : sine);
}
