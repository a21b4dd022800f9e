// 3x3 convolutions in 8 bits by mma.sync, for tensor cores from compute capability 7.5 on: out (N, H, W, K) = scales (N)
// column_scales (K) conv(a (N, H', W', C) - zeros (N), b (K, 3, 3, C)) + bias + residual, with padding 1, of int8 with one
// factor and one zero an image of a, and one factor an output channel of b: a factor of each pixel could not be taken out
// of a sum over nine of them. Sums are in int32, which those of 66311 differences of such codes and codes of -127 to 127
// do not overflow; the rest is in float32, rounded once. Compile-time parameters: mma_gemm.h.

#define INT8 1
#define CONV 1
#define HALF_SUMS 0
#define GATE_FIRST 0
#define TANH 0
#include "mma.h"
#include "mma_gemm.h"

// out, residual: rows of `columns`, one a pixel; b: rows of `depth` operands; scales: of each image, then the zeros of
// each, whole numbers; column_scales: of each row of b, then the sum of its codes, and others. All tensors are aligned to 16 bytes; channels are a
// multiple of 64 SLICES, columns of 8. height, width: of the result, `stride` times as many in the image (rounded up).
extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
    mma_conv8(Element* out, const Operand* __restrict__ a, const float* __restrict__ scales,
              const Operand* __restrict__ b, const float* __restrict__ column_scales, const Element* __restrict__ bias,
              const Element* residual, int rows, int columns, int depth, int channels, int height, int width,
              int image_height, int image_width, int stride) {
  pdl_wait();
  SHARED_MEMORY(Operand, shared);
  const Place own = own_place();
  Sum sum[HIGH][kTiles][4] = {};
  const float* const zeros = scales + rows / (height * width);
  const Image image = {channels, height, width, image_height, image_width, stride, zeros};
  Vectors* const vectors = reinterpret_cast<Vectors*>(shared + kVectorsAt);
  auto begun = [&] { vectors->load(own, scales, column_scales, bias, rows, columns, height * width); };
  auto early = [&] {
    auto copy = [&](int at, Eight* staged) { copy_async(staged, residual + at, true); };
    each_pack(shared, own, rows, columns, copy);
  };
  multiply(sum, shared, own, a, b, rows, columns, depth, image, begun, early);
  add_slices(sum, shared, own);
  store(sum, shared, own, out, nullptr, residual, vectors, rows, columns);
}
