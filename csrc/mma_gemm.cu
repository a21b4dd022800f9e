// Linear layers and 3x3 convolutions by mma.sync, with what follows them in the epilogue, for tensor cores from compute
// capability 7.5 on.
//
// out (M, N) = a (M, K) b (N, K)^T + bias, after CUTLASS's multistage GEMM. A block has 32 DOWN rows and WIDTH columns,
// its eight warps DOWN by 8 / DOWN parts of it. Each stage of shared memory holds 32 of K, in rows of an odd number of 16
// bytes, so that ldmatrix meets no bank twice.
//
// Compile-time parameters: TYPE, kFloat16 or kBFloat16, the latter from 8.0 on; WIDTH, a multiple of 64 / DOWN; DOWN, 2 or
// 4; STAGES, 2 or more; CONV, whether a is an image (N, H, W, C) that stands for the matrix of its 3x3 patches, with
// padding 1; HALF_SUMS, in float16, for cards on which such sums take half the time (GeForce): the products of a stage are
// added up in float16, of a / 16 so that they may be large, and the stages in float32; EPILOGUE:
//
//   0  nothing else
//   1  a residual is added, (M, N), which `out` may overwrite
//   2  GEGLU: of 2 N columns the first N are values, the others gates (GATE_FIRST: the other way around); TANH as in
//      gelu.h. Eight values and eight gates lie beside each other in shared memory, so that one thread has both.

#include "mma.h"

#include "gelu.h"

typedef Stored<TYPE>::Bits Element;
constexpr int kThreads = 256, kDepth = 32, kChunks = kDepth / 8, kPitch = kDepth + 8;
constexpr int kAcross = 8 / DOWN, kWarpRows = 32, kRows = kWarpRows * DOWN, kColumns = WIDTH / kAcross;
constexpr bool kResidual = EPILOGUE == 1, kGeglu = EPILOGUE == 2;
constexpr int kTiles = kColumns / 8, kLoads = kThreads / kChunks;  // rows that all threads load at once
constexpr int kOutTiles = kGeglu ? kTiles / 2 : kTiles, kOutColumns = kOutTiles * 8, kOutPitch = kOutColumns + 8;
constexpr int kStep = kGeglu ? 2 : 1, kValues = kGeglu && GATE_FIRST, kGates = kGeglu && !GATE_FIRST;  // tiles of 8
constexpr int kStage = (kRows + WIDTH) * kPitch;
static_assert(kColumns % 8 == 0 && kRows % kLoads == 0 && kRows * kAcross * kOutPitch <= STAGES * kStage);
static_assert(!kGeglu || kTiles % 2 == 0);
static_assert(!HALF_SUMS || TYPE == kFloat16);

// Two neighbours of a bias, or zeros.
__device__ __forceinline__ void load_bias(const Element* bias, int column, bool valid, float (&to)[2]) {
  to[0] = to[1] = 0.f;
  if (bias && valid) to_floats<TYPE>(*reinterpret_cast<const unsigned*>(bias + column), to[0], to[1]);
}

// a: rows of `depth` elements, or an image; b: rows of `depth` elements; out, residual: rows of `columns`. All are aligned
// to 16 bytes, the bias to 4; depth, and channels of an image, are multiples of 32, columns of 8. height, width: of the
// result, `stride` times as many in the image (rounded up).
extern "C" __global__ void __launch_bounds__(kThreads, DOWN == 2 ? 2 : 1)
    mma_gemm(Element* out, const Element* __restrict__ a, const Element* __restrict__ b,
             const Element* __restrict__ bias, const Element* residual, int rows, int columns, int depth, int channels,
             int height, int width, int image_height, int image_width, int stride) {
  pdl_wait();
  SHARED_MEMORY(Element, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, down = warp / kAcross, across = warp % kAcross;
  const int first_row = blockIdx.y * kRows, first_column = blockIdx.x * kOutColumns * kAcross;

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
  constexpr int kColumnsOfLoad = kGeglu ? kLoads / 2 : kLoads;
  const int column_of_b = first_column + (kGeglu ? row / 16 * 8 + row % 8 : row);
  const Element* const from_b = b + (long long)(column_of_b + (kGeglu && row / 8 % 2 ? columns : 0)) * depth + chunk;

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
      copy_async(to + (kRows + i * kLoads) * kPitch, from_b + (long long)i * kColumnsOfLoad * depth + step * kDepth,
                 column_of_b + i * kColumnsOfLoad < columns);
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
#if HALF_SUMS
#pragma unroll
      for (int i = 0; i < 4; ++i) of_a[k][t][i] = halves_product(of_a[k][t][i], 0x2c002c00);  // 1 / 16, twice
#endif
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
#if HALF_SUMS
    unsigned part[2][kTiles][2] = {};
#endif
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
        for (int t = 0; t < 2; ++t)
#if HALF_SUMS
          mma_halves(part[t][n], of_a[k][t], of_b[k][n][0], of_b[k][n][1]);
#else
          mma(sum[t][n], of_a[k][t], of_b[k][n][0], of_b[k][n][1]);
#endif
    }
    stage = next;
#if HALF_SUMS
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
#endif
  }

  // through shared memory, so that whole rows are read and written
  copy_async_wait<0>();
  __syncthreads();
  Element* const own = shared + warp * kWarpRows * kOutPitch;
  const int column = first_column + across * kOutColumns;
  auto each_pack = [&](auto run) {
#pragma unroll
    for (int i = 0; i < kWarpRows * kOutTiles / 32; ++i) {
      const int at = i * 32 + lane, r = at / kOutTiles, tile = at % kOutTiles * 8;
      const long long to = first_row + down * kWarpRows + r;
      if (to < rows && column + tile < columns) run(to * columns + column + tile, own + r * kOutPitch + tile);
    }
  };
  typedef Pack<TYPE, 8> Eight;
  if (kResidual) {
    each_pack([&](long long at, Element* staged) {
      *reinterpret_cast<Eight*>(staged) = *reinterpret_cast<const Eight*>(residual + at);
    });
    warp_sync();
  }
#pragma unroll
  for (int n = 0; n < kOutTiles; ++n) {
    const int at = n * 8 + lane % 4 * 2;
    const bool valid = column + at < columns;
    float value_bias[2], gate_bias[2];
    load_bias(bias, column + at + (kGeglu && GATE_FIRST ? columns : 0), valid, value_bias);
    if (kGeglu) load_bias(bias, column + at + (GATE_FIRST ? 0 : columns), valid, gate_bias);
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned* const staged = reinterpret_cast<unsigned*>(own + (t * 16 + half * 8 + lane / 4) * kOutPitch + at);
        float y[2], more[2] = {0.f, 0.f};
        if (kResidual) to_floats<TYPE>(*staged, more[0], more[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (kGeglu) {
            const float value = sum[t][kValues + kStep * n][2 * half + i] + value_bias[i];
            y[i] = value * gelu(sum[t][kGates + kStep * n][2 * half + i] + gate_bias[i]);
          } else {
            y[i] = sum[t][n][2 * half + i] + value_bias[i] + more[i];
          }
        }
        *staged = pair_of<TYPE>(y[0], y[1]);
      }
  }
  warp_sync();
  each_pack([&](long long at, const Element* staged) {
    *reinterpret_cast<Eight*>(out + at) = *reinterpret_cast<const Eight*>(staged);
  });
}
