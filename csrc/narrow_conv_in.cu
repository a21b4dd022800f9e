// 3x3 convolution of an image of few channels, without tensor cores; for any card.
//
// A block has a tile of THREADS / 8 * PIXELS pixels and 64 output channels. TAPS taps at a time, it stages what they
// read of the image and the filters in shared memory, in float32. A thread has PIXELS pixels, in groups of 4, and 8
// output channels, in groups of 4: reads of 16 bytes without bank conflicts.
//
// Compile-time parameters: TYPE (elements.h); CHANNELS of the image; THREADS; PIXELS of a thread, a multiple of 4; TAPS
// staged together, a divisor of 9; PACK, elements of a store, at most 4.

#include "elements.h"

typedef Stored<TYPE>::Bits Element;

constexpr int kLanes = 8, kColumns = 64, kRow = kColumns + 4, kTile = THREADS / kLanes * PIXELS, kGroups = PIXELS / 4;
constexpr int kDepth = TAPS * CHANNELS, kBeside = THREADS / kTile;
constexpr int kLoads = (kDepth + kBeside - 1) / kBeside, kFilters = (kDepth * kColumns + THREADS - 1) / THREADS;
static_assert(PIXELS % 4 == 0 && THREADS % kTile == 0 && 9 % TAPS == 0 && PACK <= 4, "");

// x: (images, CHANNELS, height, width) with any strides; weight: (columns, 3, 3, CHANNELS); bias: (columns,), or null;
// out: (pixels, columns), columns a multiple of PACK.
extern "C" __global__ void __launch_bounds__(THREADS)
    narrow_conv_in(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ bias,
                   Element* __restrict__ out, int pixels, int height, int width, int columns, long long x_image,
                   long long x_channel, long long x_row, long long x_column) {
  pdl_wait();
  alignas(16) __shared__ float patches[kDepth][kTile];
  alignas(16) __shared__ float filters[kDepth][kRow];
  const int first_pixel = blockIdx.x * kTile, first_column = blockIdx.y * kColumns;
  // what this thread stages: one pixel's patch, or a part of it
  const int staged = threadIdx.x % kTile, pixel = first_pixel + staged;
  const int z = pixel % width, y = pixel / width % height;
  const Element* const image = x + pixel / width / height * x_image;

  float sums[PIXELS][8];
#pragma unroll
  for (int i = 0; i < PIXELS; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[i][j] = 0.f;
  const int group = threadIdx.x / kLanes * 4, lane = threadIdx.x % kLanes * 4;

#pragma unroll 1
  for (int first = 0; first < 9; first += TAPS) {
    Element values[kLoads], weights[kFilters];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int k = threadIdx.x / kTile + i * kBeside, tap = first + k / CHANNELS;
      const int row = y + tap / 3 - 1, column = z + tap % 3 - 1;
      const bool there = k < kDepth && pixel < pixels && row >= 0 && row < height && column >= 0 && column < width;
      values[i] = there ? image[k % CHANNELS * x_channel + row * x_row + column * x_column] : (Element)0;
    }
#pragma unroll
    for (int i = 0; i < kFilters; ++i) {
      const int at = threadIdx.x + i * THREADS, column = first_column + at / kDepth;
      const bool there = at < kDepth * kColumns && column < columns;
      weights[i] = there ? weight[column * (9 * CHANNELS) + first * CHANNELS + at % kDepth] : (Element)0;
    }
    if (first) __syncthreads();  // all have read the taps before
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int k = threadIdx.x / kTile + i * kBeside;
      if (k < kDepth) patches[k][staged] = to_float<TYPE>(values[i]);
    }
#pragma unroll
    for (int i = 0; i < kFilters; ++i) {
      const int at = threadIdx.x + i * THREADS;
      if (at < kDepth * kColumns) filters[at % kDepth][at / kDepth] = to_float<TYPE>(weights[i]);
    }
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < kDepth; ++k) {
      float left[4], right[4], value[4];
      load<kFloat32>(&filters[k][lane], left);
      load<kFloat32>(&filters[k][lane + kColumns / 2], right);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        load<kFloat32>(&patches[k][g * (kTile / kGroups) + group], value);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            sums[4 * g + i][j] += value[i] * left[j];
            sums[4 * g + i][4 + j] += value[i] * right[j];
          }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 8; j += PACK) {
    const int column = first_column + lane + j % 4 + j / 4 * (kColumns / 2);
    if (column >= columns) continue;
    float add[PACK];
#pragma unroll
    for (int c = 0; c < PACK; ++c) add[c] = bias ? to_float<TYPE>(bias[column + c]) : 0.f;
#pragma unroll
    for (int i = 0; i < PIXELS; ++i) {
      const int at = first_pixel + i / 4 * (kTile / kGroups) + group + i % 4;
      if (at >= pixels) continue;
      float value[PACK];
#pragma unroll
      for (int c = 0; c < PACK; ++c) value[c] = sums[i][j + c] + add[c];
      store<TYPE>(out + (long long)at * columns + column, value);
    }
  }
}
