// Second pass of a group norm of channels-last images whose result is int8 with one scale and one zero an image; for any
// card. As group_norm_normalise.cu; in front of it each block finds the scale.
//
// Without SiLU the zero is 0. SiLU's results are at least -0.28, so that half of the codes would stand for nothing: with
// it, codes from -127 on stand for that minimum and what is above it.
//
// The norm is linear in each channel, and SiLU grows from its only minimum on. So the largest magnitude of an image's
// result is that of the least or the largest value of one of its channels (group_norm_statistics.cu), or with SiLU of
// that minimum, if there is a negative value: the image is not read for it. An image that holds NaN or infinity has a
// NaN as the mean of a group, and so as its scale.
//
// Compile-time parameters: TYPE, of the operands, in half precision (elements.h); PACK; EACH; THREADS, of the largest
// block, and RESIDENT, such blocks of a multiprocessor.

#define FUSED 0
#include "group_norm.h"
#include "quantise.h"

constexpr float kLeastSilu = 0.27846456f;  // its magnitude, at -1.2784645

constexpr float kCodes = 253.f;  // between the codes of both ends, with SiLU: rounding adds at most one

// Where some neighbouring channels are in their groups: those before `split` belong to `group`, the rest to the next.
struct Groups {
  int group, split;
  __device__ __forceinline__ Groups(int column, int width) {
    group = quotient(column, 1.f / width), split = (group + 1) * width - column;
  }
};

// Factor and offset of neighbouring channels, from their groups' mean and rstd; loads weight and bias.
__device__ __forceinline__ void affine_of(const Access& gamma, const Access& beta, bool weighted, const float* mean,
                                          const float* rstd, const Groups& of, const float (&addend)[PACK],
                                          float (&factor)[PACK], float (&offset)[PACK]) {
  float scale[PACK], more[PACK];
  gamma.to(scale);
  beta.to(more);
#pragma unroll
  for (int j = 0; j < PACK; ++j) {
    const int group = of.group + (j >= of.split);
    factor[j] = rstd[group] * (weighted ? scale[j] : 1.f);
    offset[j] = (addend[j] - mean[group]) * factor[j] + more[j];
  }
}

// Grid (blocks of per_block pixels, blocks of block_groups groups, images). out: (images, pixels, channels); scales:
// (2, images), zeros behind scales; extremes: (2, images, parts, channels), of x; the rest is as in group_norm_normalise.cu, with at most 128
// groups of an image.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    group_norm8_normalise(const In* __restrict__ x, const In* __restrict__ shift, const In* __restrict__ weight,
                          const In* __restrict__ bias, const float* __restrict__ partial,
                          const In* __restrict__ extremes, signed char* __restrict__ out, float* __restrict__ scales,
                          int pixels, int per_block, int channels, int groups, int block_groups, int lanes,
                          int shift_stride, int per_part, int parts, int with_silu, float eps) {
  pdl_wait();
  __shared__ float mean_of[128], rstd_of[128];
  __shared__ unsigned largest_of_warps[32], negative_of_warps[32];
  __shared__ Sums sums_of[THREADS / 32][32];
  const int width = channels / groups, packs = block_groups * width / PACK;
  const int lane = quotient(threadIdx.x, 1.f / packs), inner = (threadIdx.x - lane * packs) * PACK;
  const int first_group = blockIdx.y * block_groups, here = min(block_groups, groups - first_group);
  const int in_warp = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const bool active = lane < lanes && inner < here * width;
  const int column = min(first_group * width + inner, channels - PACK);
  const Operands operands = {x, nullptr, shift, nullptr, nullptr, channels, channels, shift_stride, 1.f};
  const Column mine(operands, blockIdx.z, pixels, column);
  const int begin = blockIdx.x * per_block, end = active ? min(begin + per_block, pixels) : 0;
  // the first loads do not wait for the statistics
  Access loaded[EACH], gamma = Access(), beta = Access();
  load_pixels(mine, begin + lane, lanes, end, loaded);

  // a thread has some channels, of every `down`-th part
  const int all = channels / PACK, down = (int)blockDim.x >= 2 * all ? blockDim.x / all : 1;
  const int first_part = down > 1 ? threadIdx.x / all : 0, first_pack = threadIdx.x - first_part * all;
  const In* const least = extremes + (long long)blockIdx.z * parts * channels;
  const In* const largest = least + (long long)gridDim.z * parts * channels;
  float ends[2][PACK];
  auto compare = [&](int channel) {  // of the thread's parts
#pragma unroll
    for (int j = 0; j < PACK; ++j) ends[1][j] = -(ends[0][j] = float_of_bits(0x7f800000u));
#pragma unroll 4
    for (int part = first_part; part < parts; part += down) {
      float others[PACK];
      load<TYPE>(least + (long long)part * channels + channel, others);
#pragma unroll
      for (int j = 0; j < PACK; ++j) ends[0][j] = fminf(ends[0][j], others[j]);
      load<TYPE>(largest + (long long)part * channels + channel, others);
#pragma unroll
      for (int j = 0; j < PACK; ++j) ends[1][j] = fmaxf(ends[1][j], others[j]);
    }
  };
  const bool compares = first_part < down && first_part < parts && first_pack < all;
  if (compares) compare(first_pack * PACK);  // nor does this

  const float* const means = partial + (long long)blockIdx.z * parts * groups;
  const float* const m2s = means + (long long)gridDim.z * parts * groups;
  // of all groups, as moments_of of one: a lane has a group, a warp some of the parts
  for (int first = 0; first < groups; first += 32) {
    const int group = min(first + in_warp, groups - 1);
    const float centre = means[group], values = (float)pixels * width;
    Sums sums = {0.f, 0.f};
#pragma unroll 4
    for (int part = warp; part < parts; part += warps) {
      const float count = (float)min(per_part, pixels - part * per_part) * width;
      const float deviation = means[part * groups + group] - centre;
      sums.add({count * deviation, m2s[part * groups + group] + count * deviation * deviation});
    }
    sums_of[warp][in_warp] = sums;
    __syncthreads();
    if (warp == 0) {
      for (int i = 1; i < warps; ++i) sums.add(sums_of[i][in_warp]);
      mean_of[group] = centre + sums.sum / values;
      rstd_of[group] = 1.f / sqrtf(sums.m2(values) / values + eps);
    }
    __syncthreads();
  }

  unsigned top = 0;  // the largest magnitude; with SiLU, of what is not negative, or infinite
  bool negative = false;
  for (int at = first_pack; compares && at < all; at += down > 1 ? all : blockDim.x) {
    const int channel = at * PACK;
    if (at != first_pack) compare(channel);
    float factor[PACK], offset[PACK], addend[PACK] = {};
    if (shift) load<TYPE>(shift + (long long)blockIdx.z * shift_stride + channel, addend);
    if (weight) load<TYPE>(weight + channel, gamma);
    if (bias) load<TYPE>(bias + channel, beta);
    affine_of(gamma, beta, weight, mean_of, rstd_of, Groups(channel, width), addend, factor, offset);
#pragma unroll
    for (int j = 0; j < PACK; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float y = ends[i][j] * factor[j] + offset[j];
        negative |= y < 0.f;
        const unsigned bits = bits_of_float(y) & 0x7fffffffu;
        top = larger(top, with_silu && y < 0.f && bits < 0x7f800000u ? 0u : bits);
      }
  }
  top = largest_of_lanes<32>(top);
  negative = any_of_warp(negative);
  if (in_warp == 0) largest_of_warps[warp] = top, negative_of_warps[warp] = negative;
  __syncthreads();
  top = 0, negative = false;
  for (int i = 0; i < warps; ++i) top = larger(top, largest_of_warps[i]), negative |= negative_of_warps[i];
  RowScale found;
  float zero = 0.f;
  if (with_silu) {
    // of infinity and NaN it is NaN, which row_scale takes for what they are
    const float below = negative ? kLeastSilu : 0.f, above = silu(float_of_bits(top));
    // if all values are small, the zero is not above 0
    const float span = above < below ? 2.f * below : above + below;
    found = row_scale(bits_of_float(span) & 0x7fffffffu, 127.f / kCodes);
    found.inverse *= kCodes / 127.f;
    if (found.mask) zero = floorf(below * found.inverse + 0.5f) - 127.f;
  } else {
    found = row_scale(top, 1.f);
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
    scales[blockIdx.z] = found.scale, scales[gridDim.z + blockIdx.z] = zero;
  const float factor_of_codes = found.inverse;
  found.inverse = 1.f;

  if (!active) return;
  float factor[PACK], offset[PACK];
  if (weight) load<TYPE>(weight + column, gamma);
  if (bias) load<TYPE>(bias + column, beta);
  affine_of(gamma, beta, weight, mean_of, rstd_of, Groups(column, width), mine.addend, factor, offset);
  signed char* const image = out + (long long)blockIdx.z * pixels * channels + column;
  for (int from = begin + lane; from < end; from += lanes * EACH) {
    if (from != begin + lane) load_pixels(mine, from, lanes, end, loaded);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int pixel = from + i * lanes;
      if (pixel >= end) continue;
      float value[PACK];
      loaded[i].to(value);
#pragma unroll
      for (int j = 0; j < PACK; ++j) {
        value[j] = value[j] * factor[j] + offset[j];
        if (with_silu) value[j] = silu(value[j]);
        value[j] = value[j] * factor_of_codes + zero;
      }
      store_codes(image + (long long)pixel * channels, value, found);
    }
  }
}
