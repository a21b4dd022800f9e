// Linear layers and 3x3 convolutions by mma.sync with sums in half precision, for cards whose tensor cores then run at
// twice the rate (GeForce from compute capability 7.5 on).
//
// out (M, N) = a (M, K) b (N, K)^T + bias, after CUTLASS's multistage GEMM. A block has 32 DOWN rows and WIDTH columns,
// its eight warps DOWN by 8 / DOWN parts of it. Each stage of shared memory holds 32 of K, in rows of an odd number of 16
// bytes, so that ldmatrix meets no bank twice. The products of a stage are added up in float16, of a / 16 so that they may
// be large, and the stages in float32.
//
// Compile-time parameters: TYPE, kFloat16; WIDTH, a multiple of 64 / DOWN; DOWN, 2 or 4; STAGES, 2 or more; CONV, whether a
// is an image (N, H, W, C) that stands for the matrix of its 3x3 patches, with padding 1.

#include "mma.h"

typedef Stored<TYPE>::Bits Element;
constexpr int kThreads = 256, kDepth = 32, kChunks = kDepth / 8, kPitch = kDepth + 8;
constexpr int kAcross = 8 / DOWN, kWarpRows = 32, kRows = kWarpRows * DOWN, kColumns = WIDTH / kAcross;
constexpr int kTiles = kColumns / 8, kLoads = kThreads / kChunks;  // rows that all threads load at once
constexpr int kStage = (kRows + WIDTH) * kPitch, kOutPitch = kColumns + 8;
constexpr unsigned kSixteenth = 0x2c002c00;  // 1 / 16, twice in float16
static_assert(kColumns % 8 == 0 && kRows % kLoads == 0 && kRows * kAcross * kOutPitch <= STAGES * kStage);

// a: rows of `depth` elements, or an image; b: rows of `depth` elements; out: rows of `columns`. All are aligned to 16
// bytes; depth, and channels of an image, are multiples of 32, columns of 8. height, width: of the result, `stride` times
// as many in the image (rounded up).
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mma_gemm(Element* __restrict__ out, const Element* __restrict__ a, const Element* __restrict__ b,
             const Element* __restrict__ bias, int rows, int columns, int depth, int channels, int height, int width,
             int image_height, int image_width, int stride) {
  pdl_wait();
  SHARED_MEMORY(Element, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, down = warp / kAcross, across = warp % kAcross;
  const int first_row = blockIdx.y * kRows, first_column = blockIdx.x * WIDTH;

  // what this thread loads: a chunk of every kLoads-th row
  const int chunk = threadIdx.x % kChunks * 8, row = threadIdx.x / kChunks;
  constexpr int kOfA = kRows / kLoads, kOfB = (WIDTH + kLoads - 1) / kLoads;
  const Element* from_a[kOfA];
  int y[kOfA], x[kOfA];
  bool valid[kOfA];
#pragma unroll
  for (int i = 0; i < kOfA; ++i) {
    const int at = first_row + i * kLoads + row;
    valid[i] = at < rows;
    if (CONV) {
      y[i] = at / width % height * stride - 1;
      x[i] = at % width * stride - 1;
      const long long image = at / width / height;
      from_a[i] = a + ((image * image_height + y[i]) * image_width + x[i]) * channels + chunk;
    } else {
      from_a[i] = a + (long long)at * depth + chunk;
    }
  }
  const Element* const from_b = b + (long long)(first_column + row) * depth + chunk;

  int tap_y = 0, tap_x = 0, channel = 0;  // of what is loaded next, where a is an image
  auto load = [&](int step, int stage) {
    Element* const to = shared + stage * kStage + row * kPitch + chunk;
    const int offset = CONV ? (tap_y * image_width + tap_x) * channels + channel : step * kDepth;
#pragma unroll
    for (int i = 0; i < kOfA; ++i) {
      bool inside = valid[i];
      if (CONV)
        inside = inside && (unsigned)(y[i] + tap_y) < (unsigned)image_height &&
                 (unsigned)(x[i] + tap_x) < (unsigned)image_width;
      copy_async(to + i * kLoads * kPitch, from_a[i] + offset, inside);
    }
#pragma unroll
    for (int i = 0; i < kOfB; ++i) {
      if ((i + 1) * kLoads > WIDTH && i * kLoads + row >= WIDTH) break;
      copy_async(to + (kRows + i * kLoads) * kPitch, from_b + (long long)i * kLoads * depth + step * kDepth,
                 first_column + i * kLoads + row < columns);
    }
    if (CONV && (channel += kDepth) == channels) {
      channel = 0;
      if (++tap_x == 3) {
        tap_x = 0;
        ++tap_y;
      }
    }
  };

  const int steps = depth / kDepth;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < steps) load(i, i);
    copy_async_commit();
  }

  float sum[2][kTiles][4] = {};
  const int a_at = (down * kWarpRows + lane % 16) * kPitch + lane / 16 * 8;
  const int b_at = (kRows + across * kColumns + lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8;
  const int last_b_at = (kRows + across * kColumns + (kTiles - 1) * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8;
  unsigned of_a[2][2][4], of_b[2][kTiles][2];  // the operands of a product, and of the next
  auto load_operands = [&](int stage, int k) {
    const Element* const at = shared + stage * kStage + k * 16;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      ldmatrix(of_a[k][t], at + a_at + t * 16 * kPitch);
#pragma unroll
      for (int i = 0; i < 4; ++i) of_a[k][t][i] = halves_product(of_a[k][t][i], kSixteenth);
    }
#pragma unroll
    for (int n = 0; n + 1 < kTiles; n += 2) {
      unsigned two[4];
      ldmatrix(two, at + b_at + n * 8 * kPitch);
      of_b[k][n][0] = two[0], of_b[k][n][1] = two[1], of_b[k][n + 1][0] = two[2], of_b[k][n + 1][1] = two[3];
    }
    if (kTiles % 2) ldmatrix(of_b[k][kTiles - 1], at + last_b_at);
  };

  copy_async_wait<STAGES - 2>();
  __syncthreads();
  load_operands(0, 0);
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
    unsigned part[2][kTiles][2] = {};
    const int next = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (k == 0) {
        load_operands(stage, 1);
        if (step + STAGES - 1 < steps) load(step + STAGES - 1, stage ? stage - 1 : STAGES - 1);
        copy_async_commit();
      } else if (step + 1 < steps) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        load_operands(next, 0);
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int t = 0; t < 2; ++t) mma_halves(part[t][n], of_a[k][t], of_b[k][n][0], of_b[k][n][1]);
    }
    stage = next;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float one, two;
          to_floats<TYPE>(part[t][n][half], one, two);
          sum[t][n][2 * half] = fmaf(one, 16.f, sum[t][n][2 * half]);
          sum[t][n][2 * half + 1] = fmaf(two, 16.f, sum[t][n][2 * half + 1]);
        }
  }

  // through shared memory, so that whole rows are written
  copy_async_wait<0>();
  __syncthreads();
  Element* const own = shared + warp * kWarpRows * kOutPitch;
  const int column = first_column + across * kColumns;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int at = n * 8 + lane % 4 * 2;
    float add[2] = {0.f, 0.f};
    if (bias && column + at < columns) to_floats<TYPE>(*reinterpret_cast<const unsigned*>(bias + column + at), add[0], add[1]);
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        *reinterpret_cast<unsigned*>(own + (t * 16 + half * 8 + lane / 4) * kOutPitch + at) =
            pair_of<TYPE>(sum[t][n][2 * half] + add[0], sum[t][n][2 * half + 1] + add[1]);
  }
  warp_sync();
#pragma unroll
  for (int i = 0; i < kWarpRows * kTiles / 32; ++i) {
    const int at = i * 32 + lane, r = at / kTiles, tile = at % kTiles * 8;
    const long long to = first_row + down * kWarpRows + r;
    if (to < rows && column + tile < columns)
      *reinterpret_cast<Pack<TYPE, 8>*>(out + to * columns + column + tile) =
          *reinterpret_cast<const Pack<TYPE, 8>*>(own + r * kOutPitch + tile);
  }
}
