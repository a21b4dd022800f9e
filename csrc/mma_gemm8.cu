// Linear layers in 8 bits by mma.sync, with what follows them in the epilogue, for tensor cores from compute capability
// 7.5 on: out (M, N) = row_scales (M) column_scales (N) (a (M, K) b (N, K)^T) + bias, of int8 with one factor a row of a
// and one a row of b. Sums are in int32, which those of 133144 products of -127 to 127 do not overflow; the rest is in
// float32, rounded once. Compile-time parameters: mma_gemm.h.

#define INT8 1
#define CONV 0
#define HALF_SUMS 0
#include "mma.h"
#include "mma_gemm.h"

// a, b: rows of `depth` operands; out, residual: rows of `columns`. All are aligned to 16 bytes; depth is a multiple of
// 64 SLICES, columns of 8.
extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
    mma_gemm8(Element* out, const Operand* __restrict__ a, const float* __restrict__ row_scales,
              const Operand* __restrict__ b, const float* __restrict__ column_scales, const Element* __restrict__ bias,
              const Element* residual, int rows, int columns, int depth) {
  pdl_wait();
  SHARED_MEMORY(Operand, shared);
  const Place own = own_place();
  Sum sum[HIGH][kTiles][4] = {};
  Vectors* const vectors = reinterpret_cast<Vectors*>(shared + kVectorsAt);
  auto begun = [&] { vectors->load(own, row_scales, column_scales, bias, rows, columns); };
  auto early = [&] {
    auto copy = [&](int at, Eight* staged) { copy_async(staged, residual + at, true); };
    each_pack(shared, own, rows, columns, copy);
  };
  multiply(sum, shared, own, a, b, rows, columns, depth, {}, begun, early);
  add_slices(sum, shared, own);
  store(sum, shared, own, out, nullptr, residual, vectors, rows, columns);
}
