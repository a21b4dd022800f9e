// int8 codes of a row, and the rotation in front of them; to be included after elements.h.
//
// scale = the largest magnitude of a row / 127, code = value / scale, rounded to the nearest, ties to even. A row of
// zeros, or of nothing above 1e-30, has scale 1; one that holds NaN or infinity has a scale that is NaN. Both have codes
// of zeros.

// The larger magnitude, as bits. Unsigned integers order magnitudes, infinity after all numbers and NaN after infinity.
__device__ __forceinline__ unsigned larger(unsigned bits, unsigned others) { return bits > others ? bits : others; }

template <int Count>
__device__ __forceinline__ unsigned largest_of(unsigned so_far, const float (&values)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) so_far = larger(so_far, bits_of_float(values[i]) & 0x7fffffffu);
  return so_far;
}

// The largest of so many neighbouring threads of a warp, a power of 2, in each of them.
template <int Lanes>
__device__ __forceinline__ unsigned largest_of_lanes(unsigned bits) {
#pragma unroll
  for (int lanes = Lanes / 2; lanes > 0; lanes /= 2) bits = larger(bits, shuffle_xor(bits, lanes));
  return bits;
}

// The largest of so many threads of a row, a part of a warp or whole warps; `room` is memory for a word of each warp.
template <int Threads>
__device__ __forceinline__ unsigned largest_of_row(unsigned bits, unsigned* room) {
  bits = largest_of_lanes<(Threads < 32 ? Threads : 32)>(bits);
  if (Threads <= 32) return bits;
  const int warp = threadIdx.x / 32, first = threadIdx.x / Threads * (Threads / 32);
  if (threadIdx.x % 32 == 0) room[warp] = bits;
  __syncthreads();
  bits = 0;
#pragma unroll
  for (int i = 0; i < Threads / 32; ++i) bits = larger(bits, room[first + i]);
  return bits;
}

struct RowScale {
  float scale;
  float inverse;
  unsigned mask;  // of the codes: none, or all bits
};

// Of a row whose values are `unit` times those that the magnitude and the codes are taken of.
__device__ __forceinline__ RowScale row_scale(unsigned largest, float unit) {
  const float magnitude = float_of_bits(largest) * unit;
  const bool finite = largest < 0x7f800000u, any = finite && magnitude >= 1e-30f;
  RowScale row;
  row.scale = any ? magnitude / 127.f : finite ? 1.f : float_of_bits(0x7fc00000u);
  row.inverse = any ? 127.f / float_of_bits(largest) : 0.f;
  row.mask = any ? 0xffffffffu : 0u;
  return row;
}

// The code in the lowest byte: the sum has no bits below the integer, so that the addition rounds.
__device__ __forceinline__ unsigned code_of(float value, float inverse) {
  return bits_of_float(value * inverse + 12582912.f);
}

// The codes of four values, the first in the lowest byte.
__device__ __forceinline__ unsigned codes_of(const float* values, const RowScale& row) {
  const unsigned low = (code_of(values[0], row.inverse) & 0xffu) | code_of(values[1], row.inverse) << 8;
  const unsigned high = (code_of(values[2], row.inverse) & 0xffu) | code_of(values[3], row.inverse) << 8;
  return ((low & 0xffffu) | high << 16) & row.mask;
}

template <int Words>
struct alignas(4 * Words) Codes {
  unsigned of[Words];
};

// Stores the codes of as many values as one access takes; `to` is aligned to their number.
template <int Count>
__device__ __forceinline__ void store_codes(signed char* to, const float (&values)[Count], const RowScale& row) {
  if constexpr (Count % 4 == 0) {
    Codes<Count / 4> codes;
#pragma unroll
    for (int i = 0; i < Count / 4; ++i) codes.of[i] = codes_of(values + 4 * i, row);
    *reinterpret_cast<Codes<Count / 4>*>(to) = codes;
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] = (signed char)(code_of(values[i], row.inverse) & row.mask);
  }
}

// Multiplies groups of 64, 128 or 256 neighbours of a row by the Walsh-Hadamard matrix in its natural order, without its
// factor of 1 / sqrt(group). A thread has eight neighbours, the threads of a group are neighbours in a warp.
__device__ __forceinline__ void rotate(float (&values)[8], int group) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i & step) continue;
      const float first = values[i], second = values[i + step];
      values[i] = first + second;
      values[i + step] = first - second;
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    if (8 * lanes >= group) continue;
    const float sign = threadIdx.x & lanes ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = shuffle_xor(values[i], lanes) + sign * values[i];
  }
}

__device__ __forceinline__ float unit_of(int group) {
  return group == 256 ? 0.0625f : group == 128 ? 0.08838834764831845f : group == 64 ? 0.125f : 1.f;
}
