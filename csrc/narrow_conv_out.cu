// The last step of a 3x3 convolution to few channels: products of the pixels with each of the nine taps are added up; for
// any card.
//
// Compile-time parameters: TYPE (elements.h); CHANNELS of the result; THREADS, of a pixel each.

#include "elements.h"

typedef Stored<TYPE>::Bits Element;

// products: (CHANNELS, 3, 3, pixels); bias: (CHANNELS,), or null; out: (pixels, CHANNELS). Results are the sums times
// scale, plus bias.
extern "C" __global__ void __launch_bounds__(THREADS)
    narrow_conv_out(const Element* __restrict__ products, const Element* __restrict__ bias, Element* __restrict__ out,
                    int pixels, int height, int width, float scale) {
  pdl_wait();
  const int pixel = blockIdx.x * THREADS + threadIdx.x;
  if (pixel >= pixels) return;
  const int y = pixel / width % height, x = pixel % width;
  // all loads are issued before the first use
  Element loaded[CHANNELS][9];
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    const int row = y + tap / 3 - 1, column = x + tap % 3 - 1;
    const bool there = row >= 0 && row < height && column >= 0 && column < width;
    const Element* const source = products + (long long)tap * pixels + pixel + (tap / 3 - 1) * width + tap % 3 - 1;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) loaded[c][tap] = there ? source[(long long)c * 9 * pixels] : (Element)0;
  }
  float sums[CHANNELS];
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    sums[c] = 0.f;
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) sums[c] += to_float<TYPE>(loaded[c][tap]);
    sums[c] = sums[c] * scale + (bias ? to_float<TYPE>(bias[c]) : 0.f);
  }
  store<TYPE>(out + (long long)pixel * CHANNELS, sums);
}
