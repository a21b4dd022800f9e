// Rows as int8 with a scale each, after a rotation of groups of GROUP neighbours: as quantise_rows.cu, with tensor cores.
//
// The Walsh-Hadamard matrix is a product of one for each bit of a column's number in its group. Products with a matrix of
// 16 x 16, of values in half precision and signs, which are exact, do bits 2 to 5, and a thread has all columns that
// differ in the others: no value is shuffled. 256 columns are a warp's for 2 rows and 4 groups, and so on.
//
// Compile-time parameters: TYPE, that of the rows, kFloat16 or kBFloat16 (elements.h); GROUP, 64, 128 or 256; ROWS, those
// of a block, 1, 2, 4 or 8; WARPS, of a block, which have 8 / ROWS groups of each row; BLOCKS, of a multiprocessor.

#include "mma.h"
#include "quantise.h"

typedef Stored<TYPE>::Bits Element;

constexpr int kParts = GROUP / 64, kApart = 8 / ROWS;

struct alignas(16) Eight {
  unsigned of[4];
};

// The larger magnitude, or NaN if one is.
__device__ __forceinline__ float larger_magnitude(float x, float y) {
#ifdef SFAST_CPU
  return float_of_bits(larger(bits_of_float(x) & 0x7fffffffu, bits_of_float(y) & 0x7fffffffu));
#else
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(fabsf(x)), "f"(fabsf(y)));
  return z;
#endif
}

// A sign in the highest bit: of the parity of some bits.
__device__ __forceinline__ unsigned sign_of(int bits) { return (unsigned)((bits ^ bits >> 1) & 1) << 15; }

// x, out: (rows, columns), columns a multiple of GROUP; scales: (rows,).
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    rotate_rows(const Element* __restrict__ x, signed char* __restrict__ out, float* __restrict__ scales, int rows,
                int columns) {
  pdl_wait();
  __shared__ unsigned room[ROWS][WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, eighth = lane / 4, pair = lane % 4;
  const int first_row = blockIdx.x * ROWS, first = warp * kApart;
  // rows behind the last do the same as the last
  const int loads_row = min(first_row + eighth % ROWS, rows - 1), loads = first + eighth / ROWS;
  const bool there = loads * GROUP < columns;
  const Element* const from = x + (long long)loads_row * columns + loads * GROUP + pair * 8;
  Eight loaded[kParts][2];
#pragma unroll
  for (int part = 0; part < kParts; ++part)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      loaded[part][half] = {{0, 0, 0, 0}};
      if (there) loaded[part][half] = *reinterpret_cast<const Eight*>(from + part * 64 + half * 32);
    }

  // row m, column k of the matrix: bits 0 to 3 of m and k are bits 5, 3, 4 and 2 of a column
  const unsigned one = TYPE == kFloat16 ? 0x3c00u : 0x3f80u;
  const unsigned sign = sign_of(eighth / 2 & pair), other = sign ^ (unsigned)(eighth & 1) << 15;
  const unsigned signs = (one | sign) | (one | other) << 16;
  const unsigned matrix[4] = {signs, signs, signs, signs ^ 0x80008000u};
  // of a row and group: columns of each part by bits 0, 1 and 2
  float values[2][kParts][8];
  unsigned largest[2];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const unsigned(&low)[4] = loaded[part][0].of, (&high)[4] = loaded[part][1].of;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned b[2];
#pragma unroll
      for (int next = 0; next < 2; ++next) {
        const unsigned lower = low[2 * next + i / 2], upper = high[2 * next + i / 2];
        b[next] = i % 2 ? lower >> 16 | (upper & 0xffff0000u) : (lower & 0xffffu) | upper << 16;
      }
      float d[4] = {0.f, 0.f, 0.f, 0.f};
      mma(d, matrix, b[0], b[1]);
      values[0][part][i] = d[0], values[1][part][i] = d[1];
      values[0][part][4 + i] = d[2], values[1][part][4 + i] = d[3];
    }
  }
#pragma unroll
  for (int of = 0; of < 2; ++of) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
      for (int part = 0; part < kParts; ++part)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i & step) continue;
          const float value = values[of][part][i], next = values[of][part][i + step];
          values[of][part][i] = value + next, values[of][part][i + step] = value - next;
        }
#pragma unroll
    for (int step = 1; step < kParts; step *= 2)
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (part & step) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float value = values[of][part][i], next = values[of][part + step][i];
          values[of][part][i] = value + next, values[of][part + step][i] = value - next;
        }
      }
    float magnitude = 0.f;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int i = 0; i < 8; ++i) magnitude = larger_magnitude(magnitude, values[of][part][i]);
    largest[of] = bits_of_float(magnitude);
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) largest[of] = larger(largest[of], shuffle_xor(largest[of], lanes));
#pragma unroll
    for (int lanes = 2; lanes > 0; lanes /= 2)
      if (2 * lanes >= ROWS) largest[of] = larger(largest[of], shuffle_xor(largest[of], lanes));
  }
  if (ROWS == 1) largest[0] = largest[1] = larger(largest[0], largest[1]);
  if (WARPS > 1) {
#pragma unroll
    for (int of = 0; of < 2; ++of)
      if (2 * lane + of < ROWS) room[2 * lane + of][warp] = largest[of];
    __syncthreads();
  }
#pragma unroll
  for (int of = 0; of < 2; ++of) {
    const int own = 2 * pair + of, of_block = own % ROWS, group = first + own / ROWS;
    const int row = min(first_row + of_block, rows - 1);
    if (WARPS > 1) {
      largest[of] = 0;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) largest[of] = larger(largest[of], room[of_block][i]);
    }
    const RowScale found = row_scale(largest[of], unit_of(GROUP));
    signed char* const to = out + (long long)row * columns + group * GROUP + eighth / 2 * 8 + (eighth & 1) * 32;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (group * GROUP < columns) store_codes(to + part * 64, values[of][part], found);
    if (warp == 0 && eighth == 0 && own < ROWS) scales[row] = found.scale;
  }
}
