// First pass of a group norm of large channels-last images: mean and M2 (sum of squared deviations) of some groups in a
// part of an image's pixels; for any card.
//
// A thread has PACK neighbouring channels of each `lanes`-th pixel of its block, EACH at a time.
//
// Compile-time parameters: those of group_norm.h; EACH; THREADS, of the largest block, and RESIDENT,
// such blocks of a multiprocessor; EXTREMES, whether the least and the largest value of each channel are written too.

#include "group_norm.h"

// Grid (parts, blocks of block_groups groups, images). Operands: group_norm.h. partial: (2, images, parts, groups), means
// first. extremes: (2, images, parts, channels), the least first, of what is read, without the addend unless FUSED; NaN
// is neither. A part is per_part pixels, the last one the rest. A block's channels are a multiple of PACK, `lanes` times
// channels / PACK threads are used, the block is whole warps.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    group_norm_statistics(const In* __restrict__ a, const In* __restrict__ b, const In* __restrict__ addend,
                          const In* __restrict__ residual, In* __restrict__ sum, float* __restrict__ partial,
                          In* __restrict__ extremes, int pixels, int per_part, int channels, int groups,
                          int block_groups, int lanes, int first, int addend_stride, float scale) {
  pdl_wait();
  __shared__ Sums of_threads[2][THREADS];
#if EXTREMES
  __shared__ Access least_of[THREADS], largest_of[THREADS];
  float least[PACK], largest[PACK];
#pragma unroll
  for (int j = 0; j < PACK; ++j) largest[j] = -(least[j] = float_of_bits(0x7f800000u));
#endif
  const int width = channels / groups, packs = block_groups * width / PACK;
  const int lane = quotient(threadIdx.x, 1.f / packs), inner = (threadIdx.x - lane * packs) * PACK;
  const int first_group = blockIdx.y * block_groups, here = min(block_groups, groups - first_group);
  const int in_warp = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int mine_first = quotient(inner, 1.f / width), split = (mine_first + 1) * width - inner;
  const bool active = lane < lanes && inner < here * width;
  const Operands operands = {a, b, addend, residual, sum, channels, first, addend_stride, scale};
  // threads without channels stand before the last ones, whose operands they may address
  const int column = min(first_group * width + inner, channels - PACK);
  const Column mine(operands, blockIdx.z, pixels, column);
  const int begin = blockIdx.x * per_part, end = active ? min(begin + per_part, pixels) : 0;
  // channels of one access belong to one group or two: those before `split` to the first
  float centres[2];
  for (int i = 0; i < 2; ++i) {
    const int group = first_group + min(mine_first + i, here - 1);
    centres[i] = value_at(operands, blockIdx.z, pixels, begin, group * width);
  }
  Sums sums[PACK];
#pragma unroll
  for (int j = 0; j < PACK; ++j) sums[j] = {0.f, 0.f};
  for (int from = begin + lane; from < end; from += lanes * EACH) {
    Access loaded[EACH];
    load_pixels(mine, from, lanes, end, loaded);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (from + i * lanes >= end) continue;
      float value[PACK];
      values_of(mine, loaded[i], value);
#pragma unroll
      for (int j = 0; j < PACK; ++j) sums[j].add(value[j] - (j < split ? centres[0] : centres[1]));
#if EXTREMES
      loaded[i].to(value);
#pragma unroll
      for (int j = 0; j < PACK; ++j) least[j] = fminf(least[j], value[j]), largest[j] = fmaxf(largest[j], value[j]);
#endif
    }
  }
  Sums by_group[2] = {{0.f, 0.f}, {0.f, 0.f}};
#pragma unroll
  for (int j = 0; j < PACK; ++j) {
    if (j < split)
      by_group[0].add(sums[j]);
    else
      by_group[1].add(sums[j]);
  }
  of_threads[0][threadIdx.x] = by_group[0];
  of_threads[1][threadIdx.x] = by_group[1];
#if EXTREMES
  least_of[threadIdx.x].from(least), largest_of[threadIdx.x].from(largest);
#endif
  __syncthreads();
  const float count = (float)(min(begin + per_part, pixels) - begin) * width;
  const long long size = (long long)gridDim.z * gridDim.x * groups;
  const long long at = ((long long)blockIdx.z * gridDim.x + blockIdx.x) * groups + first_group;
  // a warp has each `warps`-th group
  for (int group = warp; group < here; group += warps) {
    const int last_pack = (group * width + width - 1) / PACK;
    Sums of_group = {0.f, 0.f};
    for (int row = in_warp; row < lanes; row += 32)
      for (int pack = group * width / PACK; pack <= last_pack; ++pack)
        of_group.add(of_threads[pack * PACK < group * width][row * packs + pack]);
    of_group = sums_of_warp(of_group);
    if (in_warp == 0) {
      const float centre = value_at(operands, blockIdx.z, pixels, begin, (first_group + group) * width);
      partial[at + group] = centre + of_group.sum / count;
      partial[size + at + group] = of_group.m2(count);
    }
  }
#if EXTREMES
  // of the pixels that are `half` lanes apart, until one is left
  for (int count = lanes, half; count > 1; count = half) {
    half = (count + 1) / 2;
    if (lane + half < count) {
      float others[PACK];
      least_of[threadIdx.x + half * packs].to(others);
#pragma unroll
      for (int j = 0; j < PACK; ++j) least[j] = fminf(least[j], others[j]);
      largest_of[threadIdx.x + half * packs].to(others);
#pragma unroll
      for (int j = 0; j < PACK; ++j) largest[j] = fmaxf(largest[j], others[j]);
      least_of[threadIdx.x].from(least), largest_of[threadIdx.x].from(largest);
    }
    __syncthreads();
  }
  if (lane > 0 || inner >= here * width) return;
  In* const found = extremes + ((long long)blockIdx.z * gridDim.x + blockIdx.x) * channels + column;
  store<TYPE>(found, least);
  store<TYPE>(found + (long long)gridDim.z * gridDim.x * channels, largest);
#endif
}
