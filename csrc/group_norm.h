// What the kernels of a group norm read: one tensor and a shift, or (FUSED) what the norm's input is first computed from.
//
// Compile-time parameters: TYPE, of all operands (elements.h); PACK, channels of one access, at most those of a group;
// FUSED.

#include "elements.h"

typedef Stored<TYPE>::Bits In;
typedef Pack<TYPE, PACK> Access;

// Addresses of the operands. a: (images, pixels, first); addend: (images, first), rows addend_stride apart, or null.
// FUSED: b: (images, pixels, channels - first), concatenated, or null; residual: as a, or null; sum: (images, pixels,
// channels), which (a + addend + residual) * scale is written to, rounded. Else first is all channels, and the sum is
// not rounded.
struct Operands {
  const In *a, *b, *addend, *residual;
  In* sum;
  int channels, first, addend_stride;
  float scale;
};

// What one thread reads: PACK channels from `column` on, of pixels of an image.
struct Column {
  const In* source;
  const In* residual;
  In* sum;
  int step;  // elements between the pixels of source and residual
  int channels;
  float scale;
  float addend[PACK];

  __device__ __forceinline__ Column(const Operands& operands, int image, int pixels, int column)
      : source(operands.a), residual(nullptr), sum(nullptr), step(operands.first), channels(operands.channels), scale(1.f) {
    const long long begin = (long long)image * pixels;
#pragma unroll
    for (int j = 0; j < PACK; ++j) addend[j] = 0.f;
#if FUSED
    scale = operands.scale;
    sum = operands.sum + begin * channels + column;
    if (column >= operands.first) {
      step = channels - operands.first;
      source = operands.b + begin * step + column - operands.first;
      return;
    }
    if (operands.residual) residual = operands.residual + begin * step + column;
#endif
    source += begin * step + column;
    if (operands.addend) load<TYPE>(operands.addend + (long long)image * operands.addend_stride + column, addend);
  }
};

// Loads EACH accesses of pixels first, first + lanes, ...; zeros from `end` on. FUSED: computes the sums and writes them.
template <int Each>
__device__ __forceinline__ void load_pixels(const Column& column, int first, int lanes, int end, Access (&loaded)[Each]) {
#pragma unroll
  for (int i = 0; i < Each; ++i) {
    const int pixel = first + i * lanes;
    loaded[i] = Access();
    if (pixel < end) load<TYPE>(column.source + (unsigned)pixel * column.step, loaded[i]);
  }
#if FUSED
  Access added[Each];
  if (column.residual) {
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      const int pixel = first + i * lanes;
      if (pixel < end) load<TYPE>(column.residual + (unsigned)pixel * column.step, added[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < Each; ++i) {
    const int pixel = first + i * lanes;
    if (pixel >= end) continue;
    float value[PACK];
    loaded[i].to(value);
    if (column.residual) {
      float more[PACK];
      added[i].to(more);
#pragma unroll
      for (int j = 0; j < PACK; ++j) value[j] += more[j];
    }
#pragma unroll
    for (int j = 0; j < PACK; ++j) value[j] = (value[j] + column.addend[j]) * column.scale;
    loaded[i].from(value);
    *reinterpret_cast<Access*>(column.sum + (long long)pixel * column.channels) = loaded[i];
  }
#endif
}

// The values of an access, of which the norm is taken.
__device__ __forceinline__ void values_of(const Column& column, const Access& loaded, float (&value)[PACK]) {
  loaded.to(value);
#if !FUSED
#pragma unroll
  for (int j = 0; j < PACK; ++j) value[j] += column.addend[j];
#endif
}

// The value of a channel of a pixel, of which the norm is taken. Sums are of deviations from one of the values: then the
// sum of squares is at most (1 + count) times M2 (the sum of squared deviations from the mean), which bounds cancellation
// however large the mean is. One such value is needed by all threads, as sums of one centre are just added.
__device__ __forceinline__ float value_at(const Operands& operands, int image, int pixels, int pixel, int channel) {
  const long long place = (long long)image * pixels + pixel;
#if FUSED
  const int rest = operands.channels - operands.first;
  if (channel >= operands.first)
    return rounded<TYPE>(to_float<TYPE>(operands.b[place * rest + channel - operands.first]) * operands.scale);
#endif
  float value = to_float<TYPE>(operands.a[place * operands.first + channel]);
  const float addend = operands.addend ? to_float<TYPE>(operands.addend[(long long)image * operands.addend_stride + channel]) : 0.f;
#if FUSED
  if (operands.residual) value += to_float<TYPE>(operands.residual[place * operands.first + channel]);
  return rounded<TYPE>((value + addend) * operands.scale);
#else
  return value + addend;
#endif
}

// Sums of deviations from a centre and of their squares, of `count` values.
struct Sums {
  float sum, squares;

  __device__ __forceinline__ void add(float deviation) {
    sum += deviation;
    squares += deviation * deviation;
  }

  __device__ __forceinline__ void add(const Sums& others) {
    sum += others.sum;
    squares += others.squares;
  }

  __device__ __forceinline__ float m2(float count) const { return fmaxf(squares - sum * (sum / count), 0.f); }
};

// Of all threads of a warp, in each of them.
__device__ __forceinline__ Sums sums_of_warp(Sums mine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    mine.add({shuffle_xor(mine.sum, lanes), shuffle_xor(mine.squares, lanes)});
  return mine;
}

// x / y of numbers below 2^20, without the instructions of a division.
__device__ __forceinline__ int quotient(int x, float reciprocal_of_y) { return (int)((x + 0.5f) * reciprocal_of_y); }

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// Mean and 1 / standard deviation of a group.
struct Moments {
  float mean, rstd;
};

// Of a group of an image, by a warp, from means and sums of squared deviations (M2) of its parts of per_part pixels, the
// last one of the rest (Chan, Golub and LeVeque 1979). means, m2s: the group's of the first part; others are `groups` on.
__device__ __forceinline__ Moments moments_of(const float* means, const float* m2s, int parts, int groups, int pixels,
                                              int per_part, int width, float eps) {
  // deviations of the parts' means from that of the first part, see value_at
  const float centre = *means, values = (float)pixels * width;
  Sums sums = {0.f, 0.f};
#pragma unroll 4
  for (int part = threadIdx.x % 32; part < parts; part += 32) {
    const float count = (float)min(per_part, pixels - part * per_part) * width;
    const float deviation = means[part * groups] - centre;
    sums.add({count * deviation, m2s[part * groups] + count * deviation * deviation});
  }
  sums = sums_of_warp(sums);
  return {centre + sums.sum / values, 1.f / sqrtf(sums.m2(values) / values + eps)};
}
