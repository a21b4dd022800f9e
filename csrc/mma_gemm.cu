// Linear layers and 3x3 convolutions by mma.sync, with what follows them in the epilogue, for tensor cores from compute
// capability 7.5 on; in bfloat16 from 8.0 on. Compile-time parameters: mma_gemm.h.

#define INT8 0
#include "mma.h"
#include "mma_gemm.h"

// a: rows of `depth` elements, or an image; b: rows of `depth` elements; out, residual: rows of `columns`. All are
// aligned to 16 bytes, the bias to 4; depth, and channels of an image, are multiples of 32 SLICES, columns of 8.
// height, width: of the result, `stride` times as many in the image (rounded up).
extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
    mma_gemm(Element* out, const Element* __restrict__ a, const Element* __restrict__ b,
             const Element* __restrict__ bias, const Element* residual, int rows, int columns, int depth, int channels,
             int height, int width, int image_height, int image_width, int stride) {
  pdl_wait();
  SHARED_MEMORY(Operand, shared);
  const Place own = own_place();
  Sum sum[HIGH][kTiles][4] = {};
  const Image image = {channels, height, width, image_height, image_width, stride, nullptr};
  auto nothing = [] {};
  multiply(sum, shared, own, a, b, rows, columns, depth, image, nothing, nothing);
  add_slices(sum, shared, own);
  store(sum, shared, own, out, bias, residual, nullptr, rows, columns);
}
