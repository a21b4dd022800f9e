// Linear layers and 3x3 convolutions by mma.sync, with what follows them in the epilogue, for tensor cores from compute
// capability 7.5 on.
//
// out (M, N) = a (M, K) b (N, K)^T + bias, after CUTLASS's multistage GEMM. A block has DOWN by ACROSS warps, each of
// which computes 16 HIGH rows and WIDTH / ACROSS columns. Each stage of shared memory holds 32 of K. The order of
// the four 16 bytes of a row changes with every second row, so that neither ldmatrix nor the copies meet a bank twice.
// With SLICES = 2 there are twice as many warps and twice as much of K in a stage: each half of the warps computes the
// products of its 32 of K, and the sums are added up at the end (CUTLASS's sliced K). So a block may have more warps,
// or each of them larger parts, where a multiprocessor has a single one.
//
// Compile-time parameters: TYPE, kFloat16 or kBFloat16, the latter from 8.0 on; DOWN; ACROSS; HIGH; WIDTH, a multiple
// of 8 ACROSS; STAGES, 2 or more; RESIDENT, blocks of a multiprocessor; SLICES, 1, or 2 if HIGH is even; CONV,
// whether a is an image (N, H, W, C) that stands for the matrix of its 3x3 patches, with padding 1; HALF_SUMS, in
// float16, for cards on which such sums take half the time (GeForce): the products of a slice's stage are added up in
// float16, of a / 16 so that they may be large, and the stages in float32; EPILOGUE:
//
//   0  nothing else
//   1  a residual is added, (M, N), which `out` may overwrite
//   2  GEGLU: of 2 N columns the first N are values, the others gates (GATE_FIRST: the other way around); TANH as in
//      gelu.h. Eight values and eight gates lie next to each other in shared memory, so that one thread has both.

#include "mma.h"

#include "gelu.h"

// Whether what a thread loads is held in registers for half a step, where there is no cp.async: until it has come, the
// products of that half are computed.
#ifndef HELD
#if defined(SFAST_CPU) || __CUDA_ARCH__ >= 800
#define HELD 0
#else
#define HELD 1
#endif
#endif

typedef Stored<TYPE>::Bits Element;
constexpr int kSliceThreads = 32 * DOWN * ACROSS, kThreads = SLICES * kSliceThreads, kDepth = 32, kChunks = kDepth / 8;
constexpr int kWarpRows = 16 * HIGH, kRows = kWarpRows * DOWN, kColumns = WIDTH / ACROSS;
constexpr bool kResidual = EPILOGUE == 1, kGeglu = EPILOGUE == 2;
constexpr int kTiles = kColumns / 8, kLoads = kSliceThreads / kChunks;  // rows that a slice's threads load at once
constexpr int kOutTiles = kGeglu ? kTiles / 2 : kTiles, kOutColumns = kOutTiles * 8, kOutPitch = kOutColumns + 8;
constexpr int kStep = kGeglu ? 2 : 1, kValues = kGeglu && GATE_FIRST, kGates = kGeglu && !GATE_FIRST;  // tiles of 8
constexpr int kSlice = (kRows + WIDTH) * kDepth, kStage = SLICES * kSlice, kStepDepth = SLICES * kDepth;
constexpr int kOutHigh = HIGH / SLICES, kOutRows = 16 * kOutHigh;  // of the result that a warp stores
static_assert(kColumns % 8 == 0 && HIGH <= kTiles && kRows % kLoads == 0 && kLoads % 8 == 0);
static_assert((SLICES == 1 || SLICES == 2) && HIGH % SLICES == 0 && (!kGeglu || kTiles % 2 == 0));
static_assert(!HALF_SUMS || TYPE == kFloat16);

// Where the first of 8 neighbours of a row is in shared memory, in elements from the row's beginning.
__device__ __forceinline__ int place(int row, int chunk) { return (chunk ^ row / 2 % kChunks) * 8; }

// Two neighbours of a bias, or zeros.
__device__ __forceinline__ void load_bias(const Element* bias, int column, bool valid, float (&to)[2]) {
  to[0] = to[1] = 0.f;
  if (bias && valid) to_floats<TYPE>(*reinterpret_cast<const unsigned*>(bias + column), to[0], to[1]);
}

// a: rows of `depth` elements, or an image; b: rows of `depth` elements; out, residual: rows of `columns`. All are
// aligned to 16 bytes, the bias to 4; depth, and channels of an image, are multiples of 32 SLICES, columns of 8.
// height, width: of the result, `stride` times as many in the image (rounded up).
extern "C" __global__ void __launch_bounds__(kThreads, RESIDENT)
    mma_gemm(Element* out, const Element* __restrict__ a, const Element* __restrict__ b,
             const Element* __restrict__ bias, const Element* residual, int rows, int columns, int depth, int channels,
             int height, int width, int image_height, int image_width, int stride) {
  pdl_wait();
  SHARED_MEMORY(Element, shared);
  const int slice = SLICES == 1 ? 0 : threadIdx.x / kSliceThreads;
  const unsigned of_slice = threadIdx.x - slice * kSliceThreads;  // unsigned: a division costs no register
  const int warp = of_slice / 32, lane = threadIdx.x % 32, down = warp / ACROSS, across = warp % ACROSS;
  const int first_row = blockIdx.y * kRows, first_column = blockIdx.x * kOutColumns * ACROSS;

  // what this thread loads: a chunk of every kLoads-th row, of its slice
  const int chunk = threadIdx.x % kChunks, row = of_slice / kChunks;
  const int in_depth = slice * kDepth + chunk * 8;
  constexpr int kOfA = kRows / kLoads, kOfB = (WIDTH + kLoads - 1) / kLoads;
  constexpr unsigned kBytes = sizeof(Element);
  unsigned from_a[kOfA];               // bytes from the beginning of a, of a convolution's middle tap
  unsigned taps[(kOfA + 2) / 3] = {};  // CONV: which of the nine are inside, of three rows each
#pragma unroll
  for (int i = 0; i < kOfA; ++i) {
    // rows and columns behind the last one are loaded from it, and not stored
    const int at = min(first_row + i * kLoads + row, rows - 1);
    if (CONV) {
      const int y = at / width % height * stride, x = at % width * stride, image = at / width / height;
      from_a[i] = (((image * image_height + y) * image_width + x) * channels + in_depth) * kBytes;
      unsigned of_row = 0, all = 0;
#pragma unroll
      for (int t = 0; t < 3; ++t) of_row |= (unsigned)((unsigned)(x + t - 1) < (unsigned)image_width) << t;
#pragma unroll
      for (int t = 0; t < 3; ++t) all |= (unsigned)(y + t - 1) < (unsigned)image_height ? of_row << 3 * t : 0;
      taps[i / 3] |= all << 9 * (i % 3);
    } else {
      from_a[i] = (at * depth + in_depth) * kBytes;
    }
  }
  unsigned from_b[kOfB];
#pragma unroll
  for (int i = 0; i < kOfB; ++i) {
    const int at = i * kLoads + row, of_value = min(first_column + (kGeglu ? at / 16 * 8 + at % 8 : at), columns - 1);
    from_b[i] = ((of_value + (kGeglu && at / 8 % 2 ? columns : 0)) * depth + in_depth) * kBytes;
  }

  // of what is loaded next
  int tap = 0, channel = 0;
  const char* next_a = reinterpret_cast<const char*>(CONV ? a - (long long)(image_width + 1) * channels : a);
  const char* next_b = reinterpret_cast<const char*>(b);
  typedef Pack<TYPE, 8> Eight;
#if HELD
  Eight held[kOfA + kOfB];
#endif
  auto copy = [&](Element* to, const char* from, bool valid, int number) {
#if HELD
    held[number] = Eight();
    if (valid) held[number] = *reinterpret_cast<const Eight*>(from);
#else
    copy_async(to, from, valid);
#endif
  };
  // where this slice is in a stage, and there, what this thread loads
  const int own = slice * kSlice, own_row = own + row * kDepth + place(row, chunk);
  auto load = [&](int stage) {
    Element* const to = shared + stage * kStage + own_row;
#pragma unroll
    for (int i = 0; i < kOfA; ++i)
      copy(to + i * kLoads * kDepth, next_a + from_a[i], CONV ? taps[i / 3] >> tap >> 9 * (i % 3) & 1 : true, i);
#pragma unroll
    for (int i = 0; i < kOfB; ++i) {
      if ((i + 1) * kLoads > WIDTH && i * kLoads + row >= WIDTH) break;
      copy(to + (kRows + i * kLoads) * kDepth, next_b + from_b[i], true, kOfA + i);
    }
    next_a += kStepDepth * kBytes;
    next_b += kStepDepth * kBytes;
    if (CONV && (channel += kStepDepth) == channels) {
      channel = 0;
      if (++tap % 3 == 0) next_a += (long long)(image_width - 3) * channels * kBytes;
    }
  };
  auto store = [&](int stage) {
#if HELD
    Element* const to = shared + stage * kStage + own_row;
#pragma unroll
    for (int i = 0; i < kOfA; ++i) *reinterpret_cast<Eight*>(to + i * kLoads * kDepth) = held[i];
#pragma unroll
    for (int i = 0; i < kOfB; ++i) {
      if ((i + 1) * kLoads > WIDTH && i * kLoads + row >= WIDTH) break;
      *reinterpret_cast<Eight*>(to + (kRows + i * kLoads) * kDepth) = held[kOfA + i];
    }
#endif
  };

  const int steps = depth / kStepDepth;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < steps) load(i), store(i);
    copy_async_commit();
  }

  float sum[HIGH][kTiles][4] = {};
  const int a_row = own + (down * kWarpRows + lane % 16) * kDepth, a_chunk = lane / 16;
  const int b_row = own + (kRows + across * kColumns + lane / 16 * 8 + lane % 8) * kDepth, b_chunk = lane / 8 % 2;
  const int last_b_row = own + (kRows + across * kColumns + (kTiles - 1) * 8 + lane % 8) * kDepth;
  unsigned of_a[2][HIGH][4], of_b[2][kTiles][2];  // the operands of a product, and of the next
  // A tile of the left operand, and with an even number one or two of the right one.
  auto load_operands = [&](int number, const Element* from, int k) {
    if (number < HIGH) {
      ldmatrix(of_a[k][number], from + a_row + place(lane, 2 * k + a_chunk) + number * 16 * kDepth);
#if HALF_SUMS
#pragma unroll
      for (int i = 0; i < 4; ++i) of_a[k][number][i] = halves_product(of_a[k][number][i], 0x2c002c00);  // 1 / 16, twice
#endif
    }
    const int at = place(lane, 2 * k + b_chunk);
    if (number % 2 == 0 && number + 1 < kTiles) {
      unsigned two[4];
      ldmatrix(two, from + b_row + at + number * 8 * kDepth);
      of_b[k][number][0] = two[0], of_b[k][number][1] = two[1];
      of_b[k][number + 1][0] = two[2], of_b[k][number + 1][1] = two[3];
    } else if (number + 1 == kTiles && kTiles % 2) {
      ldmatrix(of_b[k][number], from + last_b_row + at);
    }
  };

  copy_async_wait<STAGES - 2>();
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) load_operands(n, shared, 0);
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
#if HALF_SUMS
    unsigned part[HIGH][kTiles][2] = {};
#endif
    const int next = stage + 1 == STAGES ? 0 : stage + 1, before = stage ? stage - 1 : STAGES - 1;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (k == 0) {
        if (step + STAGES - 1 < steps) load(before);
        copy_async_commit();
      } else {
        if (step + STAGES - 1 < steps) store(before);
        copy_async_wait<STAGES - 2>();
        __syncthreads();
      }
      // behind the last step a stage is loaded that is not used
      const Element* const from = shared + (k ? next : stage) * kStage;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        load_operands(n, from, 1 - k);
#pragma unroll
        for (int t = 0; t < HIGH; ++t)
#if HALF_SUMS
          mma_halves(part[t][n], of_a[k][t], of_b[k][n][0], of_b[k][n][1]);
#else
          mma(sum[t][n], of_a[k][t], of_b[k][n][0], of_b[k][n][1]);
#endif
      }
    }
    stage = next;
#if HALF_SUMS
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int t = 0; t < HIGH; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float one, two;
          to_floats<TYPE>(part[t][n][half], one, two);
          sum[t][n][2 * half] = fmaf(one, 16.f, sum[t][n][2 * half]);
          sum[t][n][2 * half + 1] = fmaf(two, 16.f, sum[t][n][2 * half + 1]);
        }
#endif
  }

  copy_async_wait<0>();
  __syncthreads();
  if (SLICES == 2) {
    // each slice stores half of a warp's rows, and gives the other slice its sums of the other half
    typedef Pack<kFloat32, 4> Four;
    Four* const given = reinterpret_cast<Four*>(shared);
    const int other = threadIdx.x + (slice ? -kSliceThreads : kSliceThreads);
#pragma unroll
    for (int t = 0; t < kOutHigh; ++t)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        Four four;
#pragma unroll
        for (int i = 0; i < 4; ++i) four.of[i] = slice ? sum[t][n][i] : sum[HIGH - kOutHigh + t][n][i];
        given[(t * kTiles + n) * kThreads + threadIdx.x] = four;
      }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kOutHigh; ++t)
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const Four four = given[(t * kTiles + n) * kThreads + other];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sum[t][n][i] = (slice ? sum[HIGH - kOutHigh + t][n][i] : sum[t][n][i]) + four.of[i];
      }
    __syncthreads();
  }

  // through shared memory, so that whole rows are read and written
  Element* const staging = shared + threadIdx.x / 32 * kOutRows * kOutPitch;
  const int column = first_column + across * kOutColumns, top = first_row + down * kWarpRows + slice * kOutRows;
  auto each_pack = [&](auto run) {
    constexpr int kPacks = kOutRows * kOutTiles;
#pragma unroll 5
    for (int i = 0; i < (kPacks + 31) / 32; ++i) {
      const int at = i * 32 + lane, of_row = at / kOutTiles, tile = at % kOutTiles * 8;
      if ((kPacks % 32 == 0 || at < kPacks) && top + of_row < rows && column + tile < columns)
        run((top + of_row) * columns + column + tile, reinterpret_cast<Eight*>(staging + of_row * kOutPitch + tile));
    }
  };
  if (kResidual) {
    each_pack([&](int at, Eight* staged) { *staged = *reinterpret_cast<const Eight*>(residual + at); });
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
    for (int t = 0; t < kOutHigh; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned* const staged = reinterpret_cast<unsigned*>(staging + (t * 16 + half * 8 + lane / 4) * kOutPitch + at);
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
  each_pack([&](int at, const Eight* staged) { *reinterpret_cast<Eight*>(out + at) = *staged; });
}
