// Keys of attentions as int8 with a factor each, after the mean of some of their head's keys is subtracted. Any vector adds
// the same to all scores of a query, so that their softmax stays what it is; without their mean keys are smaller, and so
// are the steps of their codes.
//
// LANES threads, a part of a warp, keep a key in registers, 8 neighbouring columns each. A block takes TURNS keys for
// each LANES of its threads. Factors have 22 bits (mma_attention.h).
//
// Compile-time parameters: TYPE, that of the keys (elements.h); SIZE, head dimension, a multiple of 8; LANES, a power of
// 2, 8 times which is at least SIZE, rounded up to a multiple of 32; TURNS.

#include "elements.h"
#include "quantise.h"

typedef Stored<TYPE>::Bits Element;
typedef Pack<TYPE, 8> Eight;
constexpr int kThreads = 128, kGroups = kThreads / LANES, kDepth = (SIZE + 31) / 32 * 32, kSamples = 64;
static_assert(8 * LANES >= kDepth && LANES <= 32 && kSamples % kGroups == 0);

// codes: (images, heads, keys, kDepth), zeros behind SIZE; factors: (images, heads, key_factors).
extern "C" __global__ void __launch_bounds__(kThreads)
    quantise_keys(const Element* __restrict__ k, signed char* __restrict__ codes, float* __restrict__ factors,
                  int heads, int keys, int key_factors, long long k_image, int k_row, int k_head) {
  pdl_wait();
  __shared__ float parts[kGroups][8 * LANES];
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, column = lane * 8;
  const int image = blockIdx.y / heads, head = blockIdx.y % heads;
  const Element* const from = k + image * k_image + (long long)head * k_head + column;
  const bool own = column < SIZE;

  float mean[8] = {};
#pragma unroll
  for (int i = 0; i < kSamples / kGroups; ++i) {
    // one of each 64th of the keys, at another place in it, as images have rows of 64 as well
    const int sample = i * kGroups + group;
    const unsigned at = (unsigned)(sample * kSamples + sample * 23 % kSamples) * (unsigned)keys / (kSamples * kSamples);
    Eight loaded = Eight();
    if (own) load(from + (long long)at * k_row, loaded);
    float values[8];
    loaded.to(values);
#pragma unroll
    for (int j = 0; j < 8; ++j) mean[j] += values[j];
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) parts[group][column + j] = mean[j];
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 8; ++j) mean[j] = 0.f;
#pragma unroll
  for (int i = 0; i < kGroups; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) mean[j] += parts[i][column + j];
#pragma unroll
  for (int j = 0; j < 8; ++j) mean[j] *= 1.f / kSamples;

#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int key = ((int)blockIdx.x * TURNS + turn) * kGroups + group, at = min(key, keys - 1);
    Eight loaded = Eight();
    if (own) load(from + (long long)at * k_row, loaded);
    float values[8];
    loaded.to(values);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = own ? values[j] - mean[j] : 0.f;
    const RowScale found = row_scale(largest_of_lanes<LANES>(largest_of(0u, values)), 1.f);
    if (key >= keys) continue;
    const long long row = (long long)blockIdx.y * keys + key;
    if (column < kDepth) store_codes(codes + row * kDepth + column, values, found);
    if (lane == 0) factors[(long long)blockIdx.y * key_factors + key] = float_of_bits(bits_of_float(found.scale) & ~3u);
  }
}
