// Second pass of a group norm of large channels-last images: combines the statistics of the parts of an image and
// normalises; for any card.
//
// A thread has PACK neighbouring channels of each `lanes`-th pixel of its block, EACH at a time.
//
// Compile-time parameters: TYPE and OUT, the types of operands and result (elements.h); PACK; EACH; THREADS, of the
// largest block, and RESIDENT, such blocks of a multiprocessor; IN_PLACE, whether out is x.

#define FUSED 0
#include "group_norm.h"

typedef Stored<OUT>::Bits Result;

// In place a thread reads its elements before it writes them; the compiler must not read them again afterwards.
#if IN_PLACE
#define NO_ALIAS
#else
#define NO_ALIAS __restrict__
#endif

// Grid (blocks of per_block pixels, blocks of block_groups groups, images). x, out: (images, pixels, channels); shift:
// as addend in group_norm.h; weight, bias: (channels,), or null; partial: (2, images, parts, groups), of per_part
// pixels each, the last one of the rest. The threads are as in group_norm_statistics.cu.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    group_norm_normalise(const In* NO_ALIAS x, const In* __restrict__ shift, const In* __restrict__ weight,
                         const In* __restrict__ bias, const float* __restrict__ partial, Result* NO_ALIAS out,
                         int pixels, int per_block, int channels, int groups, int block_groups, int lanes,
                         int shift_stride, int per_part, int parts, int with_silu, float eps) {
  pdl_wait();
  __shared__ float mean_of[128], rstd_of[128];
  const int width = channels / groups, packs = block_groups * width / PACK;
  const int lane = quotient(threadIdx.x, 1.f / packs), inner = (threadIdx.x - lane * packs) * PACK;
  const int first_group = blockIdx.y * block_groups, here = min(block_groups, groups - first_group);
  const int mine_first = quotient(inner, 1.f / width), split = (mine_first + 1) * width - inner;
  const int in_warp = threadIdx.x % 32;
  const bool active = lane < lanes && inner < here * width;
  const int column = min(first_group * width + inner, channels - PACK);
  const Operands operands = {x, nullptr, shift, nullptr, nullptr, channels, channels, shift_stride, 1.f};
  const Column mine(operands, blockIdx.z, pixels, column);
  const int begin = blockIdx.x * per_block, end = active ? min(begin + per_block, pixels) : 0;
  // the first loads do not wait for the statistics
  Access loaded[EACH], gamma = Access(), beta = Access();
  load_pixels(mine, begin + lane, lanes, end, loaded);
  if (weight) load<TYPE>(weight + column, gamma);
  if (bias) load<TYPE>(bias + column, beta);

  const float* const means = partial + (long long)blockIdx.z * parts * groups + first_group;
  const float* const m2s = means + (long long)gridDim.z * parts * groups;
  for (int group = threadIdx.x / 32; group < here; group += blockDim.x / 32) {
    const Moments of_group = moments_of(means + group, m2s + group, parts, groups, pixels, per_part, width, eps);
    if (in_warp == 0) mean_of[group] = of_group.mean, rstd_of[group] = of_group.rstd;
  }
  __syncthreads();
  if (!active) return;
  float factor[PACK], offset[PACK], scale[PACK], more[PACK];
  gamma.to(scale);
  beta.to(more);
#pragma unroll
  for (int j = 0; j < PACK; ++j) {
    const int group = mine_first + (j >= split);
    factor[j] = rstd_of[group] * (weight ? scale[j] : 1.f);
    offset[j] = (mine.addend[j] - mean_of[group]) * factor[j] + more[j];
  }
  Result* const image = out + (long long)blockIdx.z * pixels * channels + column;
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
      }
      store<OUT>(image + (long long)pixel * channels, value);
    }
  }
}
