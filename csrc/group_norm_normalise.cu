// Second pass of a group norm of channels-last images: combines the statistics of the parts of an image (Chan, Golub and
// LeVeque 1979) and normalises; for any card.
//
// A thread has PACK neighbouring channels of each `lanes`-th pixel of its block.
//
// Compile-time parameters: TYPE and OUT, the types of operands and result (elements.h); PACK; SILU, whether SiLU follows.

#include "elements.h"

typedef Stored<TYPE>::Bits In;
typedef Stored<OUT>::Bits Out;

// Grid (blocks of per_block pixels, images). x, out: (images, pixels, channels); shift as in group_norm_statistics.cu;
// weight, bias: (channels,), or null; partial: (2, images, parts, groups), of per_part pixels each. The threads are as
// in that kernel. Dynamic shared memory: (2 + warps) * groups floats.
extern "C" __global__ void group_norm_normalise(
    const In* __restrict__ x, const In* __restrict__ shift, const In* __restrict__ weight, const In* __restrict__ bias,
    const float* __restrict__ partial, Out* __restrict__ out, int pixels, int per_block, int per_part, int parts,
    int channels, int groups, int lanes, int shift_stride, float eps) {
  SHARED_MEMORY(float, room);
  const int width = channels / groups, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const long long size = (long long)gridDim.y * parts * groups;
  const float* const means = partial + (long long)blockIdx.y * parts * groups;
  float* const of_warps = room + 2 * groups;
  // a warp has every `warps`-th part, a thread every 32nd group
  for (int group = threadIdx.x % 32; group < groups; group += 32) {
    float mean = 0.f;
#pragma unroll 4
    for (int part = warp; part < parts; part += warps)
      mean += means[part * groups + group] * (min(per_part, pixels - part * per_part) / (float)pixels);
    of_warps[warp * groups + group] = mean;
  }
  __syncthreads();
  for (int group = threadIdx.x; group < groups; group += blockDim.x) {
    float mean = 0.f;
    for (int i = 0; i < warps; ++i) mean += of_warps[i * groups + group];
    room[group] = mean;
  }
  __syncthreads();
  for (int group = threadIdx.x % 32; group < groups; group += 32) {
    float m2 = 0.f;
#pragma unroll 4
    for (int part = warp; part < parts; part += warps) {
      const float delta = means[part * groups + group] - room[group];
      m2 += means[size + part * groups + group] + min(per_part, pixels - part * per_part) * width * delta * delta;
    }
    of_warps[warp * groups + group] = m2;
  }
  __syncthreads();
  for (int group = threadIdx.x; group < groups; group += blockDim.x) {
    float m2 = 0.f;
    for (int i = 0; i < warps; ++i) m2 += of_warps[i * groups + group];
    room[groups + group] = 1.f / sqrtf(m2 / ((float)pixels * width) + eps);
  }
  __syncthreads();
  const int across = channels / PACK, lane = threadIdx.x / across, column = threadIdx.x % across * PACK;
  if (lane >= lanes) return;
  float centre[PACK], scale[PACK], beta[PACK];
#pragma unroll
  for (int j = 0; j < PACK; ++j) centre[j] = beta[j] = 0.f, scale[j] = 1.f;
  if (shift) load<TYPE>(shift + (long long)blockIdx.y * shift_stride + column, centre);
  if (weight) load<TYPE>(weight + column, scale);
  if (bias) load<TYPE>(bias + column, beta);
#pragma unroll
  for (int j = 0; j < PACK; ++j) {
    const int group = (column + j) / width;
    centre[j] = room[group] - centre[j];
    scale[j] *= room[groups + group];
  }
  const int begin = blockIdx.x * per_block, end = min(begin + per_block, pixels);
  const long long image = (long long)blockIdx.y * pixels * channels + column;
#pragma unroll 4
  for (int pixel = begin + lane; pixel < end; pixel += lanes) {
    const long long at = image + (long long)pixel * channels;
    float value[PACK];
    load<TYPE>(x + at, value);
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
      value[j] = (value[j] - centre[j]) * scale[j] + beta[j];
#if SILU
      value[j] = value[j] / (1.f + __expf(-value[j]));
#endif
    }
    store<OUT>(out + at, value);
  }
}
