// Group norm of small channels-last images in one launch: a block keeps a group of an image in registers; for any card.
//
// A thread has PACK neighbouring channels of EACH pixels, `lanes` apart.
//
// Compile-time parameters: those of group_norm.h; OUT, the result's type; EACH; THREADS, of the largest
// block.

#include "group_norm.h"

typedef Stored<OUT>::Bits Result;

// Stores an access of a pixel for each of its neighbours (im2col of a 3x3 convolution with padding 1), and zeros where
// the pixel's own neighbours are outside of the image. out: (images, pixels, 9, channels).
__device__ __forceinline__ void store_patches(Result* out, const float (&y)[PACK], int pixel, int pixels, int across,
                                              int channels, int column) {
  const int row = pixel / across, place = pixel % across, down = pixels / across;
  const float zeros[PACK] = {};
  for (int tap = 0; tap < 9; ++tap) {
    const int dy = tap / 3 - 1, dx = tap % 3 - 1;
    const int above = row - dy, before = place - dx, below = row + dy, behind = place + dx;
    if (above >= 0 && above < down && before >= 0 && before < across)
      store<OUT>(out + ((long long)(above * across + before) * 9 + tap) * channels + column, y);
    if (below < 0 || below >= down || behind < 0 || behind >= across)
      store<OUT>(out + ((long long)pixel * 9 + tap) * channels + column, zeros);
  }
}

// Grid (groups, images). Operands: group_norm.h. weight, bias: (channels,), or null; out: (images, pixels, channels), or
// the im2col matrix if `across`, the image's width, is not 0. `lanes` times channels of a group / PACK threads are
// used, the block is whole warps.
extern "C" __global__ void __launch_bounds__(THREADS)
    group_norm_whole(const In* __restrict__ a, const In* __restrict__ b, const In* __restrict__ addend,
                     const In* __restrict__ residual, const In* __restrict__ weight, const In* __restrict__ bias,
                     In* __restrict__ sum, Result* __restrict__ out, int pixels, int channels, int groups, int lanes,
                     int first, int addend_stride, int across, int with_silu, float scale, float eps) {
  pdl_wait();
  __shared__ Sums of_warps[32];
  const int width = channels / groups, packs = width / PACK, lane = threadIdx.x / packs;
  const int column = blockIdx.x * width + (threadIdx.x - lane * packs) * PACK;
  const int end = lane < lanes ? pixels : 0;
  const Operands operands = {a, b, addend, residual, sum, channels, first, addend_stride, scale};
  const Column mine(operands, blockIdx.y, pixels, column);
  Access loaded[EACH], gamma = Access(), beta = Access();
  load_pixels(mine, lane, lanes, end, loaded);
  if (weight) load<TYPE>(weight + column, gamma);
  if (bias) load<TYPE>(bias + column, beta);

  const float centre = value_at(operands, blockIdx.y, pixels, 0, blockIdx.x * width);
  float value[PACK];
  Sums sums = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (lane + i * lanes >= end) continue;
    values_of(mine, loaded[i], value);
#pragma unroll
    for (int j = 0; j < PACK; ++j) sums.add(value[j] - centre);
  }
  const int in_warp = threadIdx.x % 32, warps = blockDim.x / 32;
  sums = sums_of_warp(sums);
  if (in_warp == 0) of_warps[threadIdx.x / 32] = sums;
  __syncthreads();
  const Sums none = {0.f, 0.f};
  sums = sums_of_warp(in_warp < warps ? of_warps[in_warp] : none);
  const float count = (float)pixels * width;
  const float mean = centre + __fdividef(sums.sum, count), rstd = rsqrtf(__fdividef(sums.m2(count), count) + eps);

  float factor[PACK], more[PACK];
  gamma.to(factor);
#pragma unroll
  for (int j = 0; j < PACK; ++j) factor[j] = weight ? factor[j] * rstd : rstd;
  Result* const image = out + (long long)blockIdx.y * pixels * channels * (across ? 9 : 1);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int pixel = lane + i * lanes;
    if (pixel >= end) continue;
    values_of(mine, loaded[i], value);
    beta.to(more);
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
      value[j] = (value[j] - mean) * factor[j] + more[j];
      if (with_silu) value[j] = silu(value[j]);
    }
    if (across)
      store_patches(image, value, pixel, pixels, across, channels, column);
    else
      store<OUT>(image + (long long)pixel * channels + column, value);
  }
}
