// First pass of a group norm of channels-last images: mean and M2 (sum of squared deviations) of the groups in a part of
// an image's pixels; for any card.
//
// A block has all channels of its pixels. A thread has PACK neighbouring channels of each `lanes`-th pixel.
//
// Compile-time parameters: TYPE (elements.h); PACK.

#include "elements.h"

typedef Stored<TYPE>::Bits Element;

// Grid (parts, images). x: (images, pixels, channels); shift: (images, channels), rows shift_stride apart, added to x
// first, or null; partial: (2, images, parts, groups), means first. A part is per_part pixels, the last one the rest.
// channels is a multiple of PACK, `lanes` times channels / PACK threads are used, the block is whole warps. Dynamic
// shared memory: 2 * lanes * channels floats.
extern "C" __global__ void group_norm_statistics(const Element* __restrict__ x,
                                                 const Element* __restrict__ shift, float* __restrict__ partial,
                                                 int pixels, int per_part, int channels, int groups, int lanes,
                                                 int shift_stride) {
  SHARED_MEMORY(float, room);
  const int across = channels / PACK, lane = threadIdx.x / across, column = threadIdx.x % across * PACK;
  const int begin = blockIdx.x * per_part, end = min(begin + per_part, pixels);
  const Element* const image = x + (long long)blockIdx.y * pixels * channels;
  // Deviations from the first pixel: as that is one of the values, the sum of squares is at most (1 + count) times M2,
  // which bounds cancellation however large the mean is.
  const Element* const first = image + (long long)begin * channels;
  if (lane < lanes) {
    float centre[PACK], sums[PACK], squares[PACK];
    load<TYPE>(first + column, centre);
#pragma unroll
    for (int j = 0; j < PACK; ++j) sums[j] = squares[j] = 0.f;
#pragma unroll 4
    for (int pixel = begin + lane; pixel < end; pixel += lanes) {
      float value[PACK];
      load<TYPE>(image + (long long)pixel * channels + column, value);
#pragma unroll
      for (int j = 0; j < PACK; ++j) {
        value[j] -= centre[j];
        sums[j] += value[j];
        squares[j] += value[j] * value[j];
      }
    }
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
      room[lane * channels + column + j] = sums[j];
      room[(lanes + lane) * channels + column + j] = squares[j];
    }
  }
  __syncthreads();
  // of each channel, in place
  const float count = end - begin;
  for (int channel = threadIdx.x; channel < channels; channel += blockDim.x) {
    float sum = 0.f, square = 0.f;
    for (int i = 0; i < lanes; ++i) {
      sum += room[i * channels + channel];
      square += room[(lanes + i) * channels + channel];
    }
    const float added = shift ? to_float<TYPE>(shift[(long long)blockIdx.y * shift_stride + channel]) : 0.f;
    room[channel] = to_float<TYPE>(first[channel]) + sum / count + added;
    room[lanes * channels + channel] = fmaxf(square - sum * sum / count, 0.f);
  }
  __syncthreads();
  const int width = channels / groups, in_warp = threadIdx.x % 32;
  const long long size = (long long)gridDim.y * gridDim.x * groups;
  for (int group = threadIdx.x / 32; group < groups; group += blockDim.x / 32) {
    float sum = 0.f;
    for (int i = in_warp; i < width; i += 32) sum += room[group * width + i];
    const float mean = sum_of_warp(sum) / width;
    float m2 = 0.f;
    for (int i = in_warp; i < width; i += 32) {
      const float delta = room[group * width + i] - mean;
      m2 += room[lanes * channels + group * width + i] + count * delta * delta;
    }
    m2 = sum_of_warp(m2);
    if (in_warp == 0) {
      const long long at = ((long long)blockIdx.y * gridDim.x + blockIdx.x) * groups + group;
      partial[at] = mean;
      partial[size + at] = m2;
    }
  }
}
