// Nearest-neighbour upsampling of NHWC images, or of the sum of two; for any card.
//
// A block writes a part of one row of the result. Pixels that are read several times come from the caches.
//
// Compile-time parameters: TYPE (elements.h); THREADS; PACK, elements of an access; PACKS, accesses of a thread.

#include "elements.h"

typedef Stored<TYPE>::Bits Element;

// x, residual: (images, height, width, channels); out: (images, out_height, out_width, channels); residual may be null.
// channels is a multiple of PACK. Target pixel i is source pixel floor(i * step), in float32 as in torch.
extern "C" __global__ void __launch_bounds__(THREADS)
    upsample(const Element* __restrict__ x, const Element* __restrict__ residual, Element* __restrict__ out, int channels,
             int height, int width, int out_height, int out_width, float step_y, float step_x) {
  pdl_wait();
  const int across = channels / PACK, packs = out_width * across;
  const int line = blockIdx.x, y = line % out_height;
  const long long from = ((long long)(line / out_height) * height + min((int)(y * step_y), height - 1)) * width * channels;
  Element* const to = out + (long long)line * out_width * channels;
  const int first = blockIdx.y * (THREADS * PACKS) + threadIdx.x;
  Pack<TYPE, PACK> loaded[PACKS], more[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int at = first + THREADS * i;
    if (at >= packs) continue;
    const int target = at / across;
    const int source = min((int)(target * step_x), width - 1);
    const long long place = from + (long long)(source * across + at % across) * PACK;
    load(x + place, loaded[i]);
    if (residual) load(residual + place, more[i]);
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int at = first + THREADS * i;
    if (at >= packs) continue;
    if (residual) {
      float value[PACK], add[PACK];
      loaded[i].to(value);
      more[i].to(add);
#pragma unroll
      for (int j = 0; j < PACK; ++j) value[j] += add[j];
      store<TYPE>(to + (long long)at * PACK, value);
    } else {
      *reinterpret_cast<Pack<TYPE, PACK>*>(to + (long long)at * PACK) = loaded[i];
    }
  }
}
