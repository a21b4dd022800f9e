// The last step of upsampling by 2 and a 3x3 convolution: products of the small image's pixels with each of the nine
// taps are added up where the taps of the upsampled image read them; for any card.
//
// A thread has PACK channels of one pixel of the small image, and of the four pixels that it becomes. A block has a
// tile of pixels, so that what neighbours read as well comes from its L1 cache, and LANES * PACK channels.
//
// Compile-time parameters: TYPE (elements.h); DOWN, ACROSS, pixels of a tile; LANES, threads of a pixel; PACK, elements
// of an access.

#include "elements.h"

typedef Stored<TYPE>::Bits Element;

// products: (3, 3, images, height, width, channels); out: (images, large_height, large_width, channels). channels is a
// multiple of PACK; the large sizes are twice the small ones, or one less. Results are the sums times scale.
extern "C" __global__ void __launch_bounds__(DOWN* ACROSS* LANES, 2)
    upsample_conv2d(const Element* __restrict__ products, Element* __restrict__ out, int images, int height, int width,
                    int large_height, int large_width, int channels, float scale) {
  pdl_wait();
  const int tiles_across = (width + ACROSS - 1) / ACROSS, tiles_down = (height + DOWN - 1) / DOWN;
  const int blocks = (channels + LANES * PACK - 1) / (LANES * PACK);
  const int tile = blockIdx.x / blocks, pixel = threadIdx.x / LANES;
  const int image = tile / tiles_across / tiles_down;
  const int y = tile / tiles_across % tiles_down * DOWN + pixel / ACROSS;
  const int x = tile % tiles_across * ACROSS + pixel % ACROSS;
  const int channel = (blockIdx.x % blocks * LANES + threadIdx.x % LANES) * PACK;
  if (y >= height || x >= width || channel >= channels) return;

  const long long row = (long long)width * channels, plane = row * height * images;
  const Element* const source = products + (((long long)image * height + y) * width + x) * channels + channel;
  // The three taps of row 2 y of the upsampled image read rows y - 1, y, y of the small one, those of row 2 y + 1 read
  // y, y, y + 1: five pairs of a tap and a row. Columns likewise.
  const int tap[5] = {0, 0, 1, 2, 2}, step[5] = {-1, 0, 0, 0, 1};
  const bool rows[5] = {y > 0, true, true, 2 * y + 1 < large_height, 2 * y + 2 < large_height};
  const bool columns[5] = {x > 0, true, true, 2 * x + 1 < large_width, 2 * x + 2 < large_width};
  float sums[2][2][PACK];
#pragma unroll
  for (int c = 0; c < PACK; ++c) sums[0][0][c] = sums[0][1][c] = sums[1][0][c] = sums[1][1][c] = 0.f;
#pragma unroll
  for (int j = 0; j < 5; ++j) {
    // the loads of a column of taps are issued together
    Pack<TYPE, PACK> loaded[5];
#pragma unroll
    for (int i = 0; i < 5; ++i)
      if (rows[i] && columns[j]) load(source + (3 * tap[i] + tap[j]) * plane + step[i] * row + step[j] * channels, loaded[i]);
    float upper[PACK], lower[PACK];
#pragma unroll
    for (int c = 0; c < PACK; ++c) upper[c] = lower[c] = 0.f;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      if (!rows[i] || !columns[j]) continue;
      float value[PACK];
      loaded[i].to(value);
#pragma unroll
      for (int c = 0; c < PACK; ++c) {
        if (i == 0 || i == 2 || i == 3) upper[c] += value[c];
        if (i == 1 || i == 2 || i == 4) lower[c] += value[c];
      }
    }
#pragma unroll
    for (int c = 0; c < PACK; ++c) {
      if (j == 0 || j == 2 || j == 3) sums[0][0][c] += upper[c], sums[1][0][c] += lower[c];
      if (j == 1 || j == 2 || j == 4) sums[0][1][c] += upper[c], sums[1][1][c] += lower[c];
    }
  }
  Element* const target = out + (((long long)image * large_height + 2 * y) * large_width + 2 * x) * channels + channel;
#pragma unroll
  for (int down = 0; down < 2; ++down)
#pragma unroll
    for (int across = 0; across < 2; ++across) {
      if (2 * y + down >= large_height || 2 * x + across >= large_width) continue;
#pragma unroll
      for (int c = 0; c < PACK; ++c) sums[down][across][c] *= scale;
      store<TYPE>(target + ((long long)down * large_width + across) * channels, sums[down][across]);
    }
}
