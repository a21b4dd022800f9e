// What follows the sums of mma_gemm.h, which includes it: factors, zeros, bias, residual and GEGLU, in float32, and the
// result by whole rows.

// In shared memory: of each of the block's rows a factor, of its columns, values first, a factor and a bias; of an
// image's rows the zero too, of columns the sum of the weight's codes.
struct Vectors {
  float row_scales[kRows], column_scales[WIDTH], bias[WIDTH];
#if INT8 && CONV
  int row_zeros[kRows], column_sums[WIDTH];
#endif

  // The column of the result at one of its places, and how far that of the product is from it.
  static __device__ __forceinline__ int offset(int at, int columns) {
    return kGeglu && (at >= kVectors) != GATE_FIRST ? columns : 0;
  }

  // Loads them, by all threads; what is behind the last row or column is not used. alike: rows that share a factor.
  // Zeros stand behind the factors of all images, sums behind those of all columns.
  __device__ __forceinline__ void load(const Place& own, const float* __restrict__ of_rows,
                                       const float* __restrict__ of_columns, const Element* __restrict__ of_bias,
                                       int rows, int columns, int alike = 1) {
#pragma unroll
    for (int first = 0; first < kRows; first += kThreads) {
      const int i = first + threadIdx.x;
      if (kRows % kThreads == 0 || i < kRows) {
        const int at = min(own.first_row + i, rows - 1) / alike;
        row_scales[i] = of_rows[at];
#if INT8 && CONV
        row_zeros[i] = (int)of_rows[rows / alike + at];
#endif
      }
    }
#pragma unroll
    for (int first = 0; first < WIDTH; first += kThreads) {
      const int i = first + threadIdx.x, of_part = i < kVectors ? i : i - kVectors;
      const int at = min(own.first_column + of_part, columns - 1) + offset(i, columns);
      if (i < WIDTH) column_scales[i] = of_columns[at];
#if INT8 && CONV
      if (i < WIDTH) column_sums[i] = (int)of_columns[columns + at];
#endif
      if (i < WIDTH) bias[i] = of_bias ? to_float<TYPE>(of_bias[at]) : 0.f;
    }
  }
};

// Two neighbours of a bias, or zeros.
__device__ __forceinline__ void load_bias(const Element* bias, int column, bool valid, float (&to)[2]) {
  to[0] = to[1] = 0.f;
  if (bias && valid) to_floats<TYPE>(*reinterpret_cast<const unsigned*>(bias + column), to[0], to[1]);
}

__device__ __forceinline__ void load_two(const float* from, float (&to)[2]) {
  const Pack<kFloat32, 2> two = *reinterpret_cast<const Pack<kFloat32, 2>*>(from);
  to[0] = two.of[0], to[1] = two.of[1];
}

// The product of a sum, with its bias.
__device__ __forceinline__ float with_bias(Sum sum, float of_row, float of_column, float bias) {
  return INT8 ? fmaf((float)sum * of_row, of_column, bias) : sum + bias;
}

// Where a warp's part of the result is in shared memory, through which whole rows are read and written.
__device__ __forceinline__ Element* result_of(void* shared) {
  return reinterpret_cast<Element*>(static_cast<char*>(shared) + kResultAt) + threadIdx.x / 32 * kOutRows * kOutPitch;
}

// Runs for each 16 bytes of a warp's part of the result, with their places in the result and in shared memory.
template <class Run>
__device__ __forceinline__ void each_pack(void* shared, const Place& own, int rows, int columns, Run run) {
  constexpr int kPacks = kOutRows * kOutTiles;
  const int column = own.first_column + own.across * kOutColumns;
  const int top = own.first_row + own.down * kWarpRows + own.slice * kOutRows;
  Element* const staging = result_of(shared);
#pragma unroll 5
  for (int i = 0; i < (kPacks + 31) / 32; ++i) {
    const int at = i * 32 + own.lane, row = at / kOutTiles, tile = at % kOutTiles * 8;
    if ((kPacks % 32 == 0 || at < kPacks) && top + row < rows && column + tile < columns)
      run((top + row) * columns + column + tile, reinterpret_cast<Eight*>(staging + row * kOutPitch + tile));
  }
}

// Stores a warp's part of the result. vectors: in 8 bits, has the bias too.
__device__ __forceinline__ void store(const Sum (&sum)[HIGH][kTiles][4], void* shared, const Place& own, Element* out,
                                      const Element* __restrict__ bias, const Element* residual, const Vectors* vectors,
                                      int rows, int columns) {
  Element* const staging = result_of(shared);
  const int of_block = own.across * kOutColumns, column = own.first_column + of_block, lane = own.lane;
  const int top = own.down * kWarpRows + own.slice * kOutRows + lane / 4;
  float of_row[kOutHigh][2] = {};
#pragma unroll
  for (int t = 0; t < kOutHigh; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (INT8) of_row[t][half] = vectors->row_scales[top + t * 16 + half * 8];
  if (kResidual && !kEarly) {
    auto copy = [&](int at, Eight* staged) { *staged = *reinterpret_cast<const Eight*>(residual + at); };
    each_pack(shared, own, rows, columns, copy);
    warp_sync();
  }
#pragma unroll
  for (int n = 0; n < kOutTiles; ++n) {
    const int at = n * 8 + lane % 4 * 2;
    float value_bias[2], gate_bias[2], value_scale[2] = {}, gate_scale[2] = {};
#if INT8 && CONV
    const int sums[2] = {vectors->column_sums[of_block + at], vectors->column_sums[of_block + at + 1]};
#endif
    if (INT8) {
      load_two(vectors->column_scales + of_block + at, value_scale), load_two(vectors->bias + of_block + at, value_bias);
      const int gate = kVectors + of_block + at;
      if (kGeglu) load_two(vectors->column_scales + gate, gate_scale), load_two(vectors->bias + gate, gate_bias);
    } else {
      const bool valid = column + at < columns;
      load_bias(bias, column + at + Vectors::offset(0, columns), valid, value_bias);
      if (kGeglu) load_bias(bias, column + at + Vectors::offset(kVectors, columns), valid, gate_bias);
    }
#pragma unroll
    for (int t = 0; t < kOutHigh; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned* const staged = reinterpret_cast<unsigned*>(staging + (t * 16 + half * 8 + lane / 4) * kOutPitch + at);
        float y[2], more[2] = {0.f, 0.f};
        if (kResidual) to_floats<TYPE>(*staged, more[0], more[1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int of = 2 * half + i;
          const float factor = of_row[t][half];
          Sum own_sum = sum[t][kValues + kStep * n][of];
#if INT8 && CONV
          own_sum -= vectors->row_zeros[top + t * 16 + half * 8] * sums[i];
#endif
          const float value = with_bias(own_sum, factor, value_scale[i], value_bias[i]);
          if (kGeglu)
            y[i] = value * gelu(with_bias(sum[t][kGates + kStep * n][of], factor, gate_scale[i], gate_bias[i]));
          else
            y[i] = value + more[i];
        }
        *staged = pair_of<TYPE>(y[0], y[1]);
      }
  }
  warp_sync();
  auto copy = [&](int at, const Eight* staged) { *reinterpret_cast<Eight*>(out + at) = *staged; };
  each_pack(shared, own, rows, columns, copy);
}
