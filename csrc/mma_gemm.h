// out (M, N) = a (M, K) b (N, K)^T with what follows it, by mma.sync, after CUTLASS's multistage GEMM: what mma_gemm.cu,
// mma_gemm8.cu and mma_conv8.cu share. After mma.h.
//
// A block has DOWN by ACROSS warps, each of which computes 16 HIGH rows and WIDTH / ACROSS columns. Each stage of
// shared memory holds 64 bytes of each row of a and b: 32 of K in half precision, 64 in 8 bits. A fragment of an
// operand has the same bytes in both, in the same lanes. The order of the four 16 bytes of a row changes with every
// second row, so that neither ldmatrix nor the copies meet a bank twice. With SLICES = 2 there are twice as many warps
// and twice as much of K in a stage: each half of the warps computes the products of its 64 bytes, and the sums are
// added up at the end (CUTLASS's sliced K). So a block may have more warps, or each of them larger parts, if a
// multiprocessor has a single one.
//
// Compile-time parameters: TYPE, of the result, kFloat16 or kBFloat16; INT8, whether operands are in 8 bits and sums
// in int32, else operands are of TYPE and sums in float32; DOWN; ACROSS; HIGH; WIDTH, a multiple of 8 ACROSS; STAGES,
// 2 or more; RESIDENT, blocks of a multiprocessor; SLICES, 1, or 2 if HIGH is even; CONV, whether a is an image (N, H,
// W, C) that stands for the matrix of its 3x3 patches, with padding 1; HALF_SUMS, in float16, for cards on which such
// sums take half the time (GeForce): the products of a slice's stage are added up in float16, of a / 16 so that they
// may be large, and the stages in float32; EPILOGUE:
//
//   0  nothing else
//   1  a residual is added, (M, N), which `out` may overwrite
//   2  GEGLU: of 2 N columns the first N are values, the others gates (GATE_FIRST: the other way around); TANH as in
//      gelu.h. Eight values and eight gates lie next to each other in shared memory, so that one thread has both.
//
// In 8 bits a code of an image stands for its distance from the image's zero, -127 to 0, which is what the image is padded
// with: the sums of a row's nine taps are then too large by the zero times the sum of the weight's codes.
//
// In 8 bits the products take half the time, and what else a block does counts twice as much. So its scales and biases
// are loaded into shared memory while the first stage comes, and the residual during the last step, to where stages
// have been read: the ring of stages begins where the last step has the first of them.

#define COARSE INT8
#include "gelu.h"

typedef Stored<TYPE>::Bits Element;
#if INT8
typedef signed char Operand;
typedef int Sum;
#else
typedef Element Operand;
typedef float Sum;
#endif
typedef Pack<TYPE, 8> Eight;
struct alignas(16) Four {
  Sum of[4];
};

constexpr int kSliceThreads = 32 * DOWN * ACROSS, kThreads = SLICES * kSliceThreads;
constexpr int kBytes = sizeof(Operand), kChunk = 16 / kBytes, kChunks = 4, kDepth = kChunks * kChunk;
constexpr int kWarpRows = 16 * HIGH, kRows = kWarpRows * DOWN, kColumns = WIDTH / ACROSS;
constexpr bool kResidual = EPILOGUE == 1, kGeglu = EPILOGUE == 2, kZeros = INT8 && CONV;
constexpr int kTiles = kColumns / 8, kLoads = kSliceThreads / kChunks;  // rows that a slice's threads load at once
constexpr int kOutTiles = kGeglu ? kTiles / 2 : kTiles, kOutColumns = kOutTiles * 8, kOutPitch = kOutColumns + 8;
constexpr int kStep = kGeglu ? 2 : 1, kValues = kGeglu && GATE_FIRST, kGates = kGeglu && !GATE_FIRST;  // tiles of 8
constexpr int kSlice = (kRows + WIDTH) * kDepth, kStage = SLICES * kSlice, kStepDepth = SLICES * kDepth;
constexpr int kOutHigh = HIGH / SLICES, kOutRows = 16 * kOutHigh;  // of the result that a warp stores
static_assert(kColumns % 8 == 0 && HIGH <= kTiles && kRows % kLoads == 0 && kLoads % 8 == 0);
static_assert((SLICES == 1 || SLICES == 2) && HIGH % SLICES == 0 && (!kGeglu || kTiles % 2 == 0));
static_assert(!HALF_SUMS || (TYPE == kFloat16 && !INT8));

// Dynamic shared memory, in bytes: the stages; what slices give each other, in their place; the result, in their place
// or behind what slices give; in 8 bits, behind all of it, factors of rows and columns, and the bias.
constexpr int most(int x, int y) { return x > y ? x : y; }
constexpr int kRing = STAGES * kStage * kBytes, kGiven = SLICES == 1 ? 0 : kOutHigh * kTiles * kThreads * 16;
constexpr int kResult = kThreads / 32 * kOutRows * kOutPitch * 2, kBehind = most(kStage * kBytes, kGiven);
constexpr bool kEarly = INT8 && kResidual && kBehind + kResult <= kRing;  // whether the residual has room next to a stage
constexpr int kResultAt = kEarly ? kBehind : 0, kVectorsAt = most(most(kRing, kGiven), kResult);
constexpr int kVectors = kOutColumns * ACROSS;  // columns of the block's result

// An image, and the sizes of a convolution's result: the image has `stride` times as many rows and columns (rounded up).
// In 8 bits zeros has one of each image.
struct Image {
  int channels, result_height, result_width, height, width, stride;
  const float* zeros;
};

// Where a thread is in its block, and what its warp computes.
struct Place {
  int slice, warp, lane, down, across, first_row, first_column;
  unsigned of_slice;  // unsigned: a division costs no register
};
__device__ __forceinline__ Place own_place() {
  Place own;
  own.slice = SLICES == 1 ? 0 : threadIdx.x / kSliceThreads;
  own.of_slice = threadIdx.x - own.slice * kSliceThreads;
  own.warp = own.of_slice / 32, own.lane = threadIdx.x % 32;
  own.down = own.warp / ACROSS, own.across = own.warp % ACROSS;
  own.first_row = blockIdx.y * kRows, own.first_column = blockIdx.x * kOutColumns * ACROSS;
  return own;
}

// Where 16 bytes of a row are in shared memory, in operands from the row's beginning.
__device__ __forceinline__ int place(int row, int chunk) { return (chunk ^ row / 2 % kChunks) * kChunk; }

// 16 bytes of equal words.
__device__ __forceinline__ Eight alike(unsigned word) {
  Eight all;
#pragma unroll
  for (int i = 0; i < 4; ++i) all.pairs[i] = word;
  return all;
}

template <bool Value>
struct Flag {
  static constexpr bool value = Value;
};

// sum += a b^T, of this thread's warp. depth: of a row, in operands; it, or channels of an image, is a multiple of
// kStepDepth. begun: runs while the first stages come; early: during the last step, if kEarly.
template <class Begun, class Early>
__device__ __forceinline__ void multiply(Sum (&sum)[HIGH][kTiles][4], Operand* shared, const Place& own,
                                         const Operand* __restrict__ a, const Operand* __restrict__ b, int rows,
                                         int columns, int depth, const Image& image, Begun begun, Early early) {
  // what this thread loads: a chunk of every kLoads-th row, of its slice
  const int chunk = threadIdx.x % kChunks, row = own.of_slice / kChunks;
  const int in_depth = own.slice * kDepth + chunk * kChunk;
  constexpr int kOfA = kRows / kLoads, kOfB = (WIDTH + kLoads - 1) / kLoads;
  unsigned from_a[kOfA];               // bytes from the beginning of a, of a convolution's middle tap
  // CONV: which of the nine are inside, of two rows each, and behind them, with kZeros, 7 bits of each row's zero
  unsigned taps[(kOfA + 1) / 2] = {};
#pragma unroll
  for (int i = 0; i < kOfA; ++i) {
    // rows and columns behind the last one are loaded from it, and not stored
    const int at = min(own.first_row + i * kLoads + row, rows - 1);
    if (CONV) {
      const int width = image.result_width, height = image.result_height;
      const int y = at / width % height * image.stride, x = at % width * image.stride, number = at / width / height;
      from_a[i] = (((number * image.height + y) * image.width + x) * image.channels + in_depth) * kBytes;
      unsigned of_row = 0, all = 0;
#pragma unroll
      for (int t = 0; t < 3; ++t) of_row |= (unsigned)((unsigned)(x + t - 1) < (unsigned)image.width) << t;
#pragma unroll
      for (int t = 0; t < 3; ++t) all |= (unsigned)(y + t - 1) < (unsigned)image.height ? of_row << 3 * t : 0;
      if (kZeros) taps[i / 2] |= (unsigned)((int)image.zeros[number] + 127) << (18 + 7 * (i % 2));
      taps[i / 2] |= all << 9 * (i % 2);
    } else {
      from_a[i] = (at * depth + in_depth) * kBytes;
    }
  }
  unsigned from_b[kOfB];
#pragma unroll
  for (int i = 0; i < kOfB; ++i) {
    const int at = i * kLoads + row, of_value = kGeglu ? at / 16 * 8 + at % 8 : at;
    const int column = min(own.first_column + of_value, columns - 1);
    from_b[i] = ((column + (kGeglu && at / 8 % 2 ? columns : 0)) * depth + in_depth) * kBytes;
  }

  // of what is loaded next
  int tap = 0, channel = 0;
  const char* next_a = reinterpret_cast<const char*>(CONV ? a - (long long)(image.width + 1) * image.channels : a);
  const char* next_b = reinterpret_cast<const char*>(b);
#if TURING
  Eight held[kOfA + kOfB];
#endif
  auto copy = [&](Operand* to, const char* from, bool valid, int number) {
    auto padding = [&] {
      const unsigned zero = (taps[number / 2] >> (18 + 7 * (number % 2)) & 127u) - 127u;
      return (zero & 0xffu) * 0x01010101u;
    };
#if TURING
    held[number] = Eight();
    if (valid) held[number] = *reinterpret_cast<const Eight*>(from);
    if (kZeros && !valid) held[number] = alike(padding());
#else
    if (!kZeros || valid) {
      copy_async(to, from, valid);
    } else {
      // by words: 16 bytes would take four registers
      const unsigned word = padding();
      volatile unsigned* const words = reinterpret_cast<volatile unsigned*>(to);
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = word;
    }
#endif
  };
  // where this slice is in a stage, and there, what this thread loads
  const int of_slice = own.slice * kSlice, own_row = of_slice + row * kDepth + place(row, chunk);
  auto load = [&](int stage) {
    Operand* const to = shared + stage * kStage + own_row;
#pragma unroll
    for (int i = 0; i < kOfA; ++i)
      copy(to + i * kLoads * kDepth, next_a + from_a[i], CONV ? taps[i / 2] >> tap >> 9 * (i % 2) & 1 : true, i);
#pragma unroll
    for (int i = 0; i < kOfB; ++i) {
      if ((i + 1) * kLoads > WIDTH && i * kLoads + row >= WIDTH) break;
      copy(to + (kRows + i * kLoads) * kDepth, next_b + from_b[i], true, kOfA + i);
    }
    next_a += kStepDepth * kBytes;
    next_b += kStepDepth * kBytes;
    if (CONV && (channel += kStepDepth) == image.channels) {
      channel = 0;
      if (++tap % 3 == 0) next_a += (long long)(image.width - 3) * image.channels * kBytes;
    }
  };
  auto store = [&](int stage) {
#if TURING
    Operand* const to = shared + stage * kStage + own_row;
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
  int stage = kEarly ? (STAGES - (steps - 1) % STAGES) % STAGES : 0;
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    const int to = kEarly && stage + i >= STAGES ? stage + i - STAGES : stage + i;
    if (i < steps) load(to), store(to);
    copy_async_commit();
  }
  begun();

  const int lane = own.lane;
  const int a_row = of_slice + (own.down * kWarpRows + lane % 16) * kDepth, a_chunk = lane / 16;
  const int b_row = of_slice + (kRows + own.across * kColumns + lane / 16 * 8 + lane % 8) * kDepth, b_chunk = lane / 8 % 2;
  const int last_b_row = of_slice + (kRows + own.across * kColumns + (kTiles - 1) * 8 + lane % 8) * kDepth;
  unsigned of_a[2][HIGH][4], of_b[2][kTiles][2];  // the operands of a product, and of the next
  // A tile of the left operand, and with an even number one or two of the right one.
  auto load_operands = [&](int number, const Operand* from, int k) {
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
  for (int n = 0; n < kTiles; ++n) load_operands(n, shared + stage * kStage, 0);
  auto turn = [&](int step, auto is_last) {
    constexpr bool kLast = decltype(is_last)::value;
#if HALF_SUMS
    unsigned part[HIGH][kTiles][2] = {};
#endif
    const int next = stage + 1 == STAGES ? 0 : stage + 1, before = stage ? stage - 1 : STAGES - 1;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (kLast) {
        // nothing is loaded
      } else if (k == 0) {
        if (step + STAGES - 1 < steps) load(before);
        copy_async_commit();
      } else {
        if (step + STAGES - 1 < steps) store(before);
        copy_async_wait<STAGES - 2>();
        __syncthreads();
      }
      // behind the last step, operands are loaded that are not used, unless the residual comes there
      const Operand* const from = shared + (k ? next : stage) * kStage;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if (!kLast || k == 0) load_operands(n, from, 1 - k);
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
  };
  for (int step = 0; step < steps - kEarly; ++step) turn(step, Flag<false>());
  if (kEarly) {
    early();
    copy_async_commit();
    turn(steps - 1, Flag<true>());
  }

  copy_async_wait<0>();
  __syncthreads();
}

// Each slice stores half of a warp's rows, and gives the other slice its sums of the other half: `sum` begins with those
// that this thread stores.
__device__ __forceinline__ void add_slices(Sum (&sum)[HIGH][kTiles][4], void* shared, const Place& own) {
  if (SLICES == 1) return;
  Four* const given = static_cast<Four*>(shared);
  const int other = threadIdx.x + (own.slice ? -kSliceThreads : kSliceThreads);
#pragma unroll
  for (int t = 0; t < kOutHigh; ++t)
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      Four four;
#pragma unroll
      for (int i = 0; i < 4; ++i) four.of[i] = own.slice ? sum[t][n][i] : sum[HIGH - kOutHigh + t][n][i];
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
        sum[t][n][i] = (own.slice ? sum[HIGH - kOutHigh + t][n][i] : sum[t][n][i]) + four.of[i];
    }
  __syncthreads();
}

#include "mma_epilogue.h"
