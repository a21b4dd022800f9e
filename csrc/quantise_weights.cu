// Weights as int8 with a scale for each output row, after a rotation of groups of neighbours; only rows whose digest
// differs from that of the last time are written; for any card.
//
// A warp reads a row at a time. The digest of an unchanged row is all that it computes. A changed row is read again, from
// the cache, for its largest magnitude and for its codes. Its digest is erased before its codes are written and stored
// after them: a launch that ends early leaves no digest of codes that are not there.
//
// Digest: a row is read in packs of eight elements, two 64-bit words. Each word is added by exclusive or to a key of its
// place, the 128 bits of the product of the two are folded to 64 by exclusive or, and the sums of all packs and of what
// else the codes depend on are added, modulo 2^64; 0 becomes 1. `digest_of_rows` of quantise_weights.py does the same.
//
// Compile-time parameters: TYPE, that of the weights, float16 or bfloat16 (elements.h); WARPS, of a block; BLOCKS, of a
// multiprocessor; LOADS, of a lane at a time.

#include "elements.h"
#include "quantise.h"

typedef unsigned long long Word;
typedef Pack<TYPE, 8> Access;

#define ENTRIES 88
#define KEY_FIRST 0x9e3779b97f4a7c15ull
#define KEY_SECOND 0xd1b54a32d192ed03ull
#define START_FIRST 0xa0761d6478bd642full
#define START_SECOND 0xe7037ed1a0b428dbull
#define SEED 0x8ebc6af09c88c6e3ull

// A parameter by value: a CUDA graph keeps it. `first` is the number of the first row of each weight, and of all rows.
struct Table {
  Word weights[ENTRIES], rows[ENTRIES], scales[ENTRIES], digests[ENTRIES];
  int first[ENTRIES + 1], strides[ENTRIES];
  unsigned short columns[ENTRIES], groups[ENTRIES];
  // a bit for each weight: rows are read and written by whole accesses; it is that of a 3x3 convolution, of which sums
  // of the codes of its rows, in float32, are stored behind all of its scales
  int aligned[(ENTRIES + 31) / 32], summed[(ENTRIES + 31) / 32];
};

struct Row {
  const unsigned short* weight;
  signed char* out;
  int columns;
  bool aligned;
};

// So many accesses of a lane, 256 columns apart; zeros behind the end of the row.
template <int Count>
__device__ __forceinline__ void load_packs(const Row& row, int column, Access (&packs)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) packs[i] = Access();
  if (row.aligned) {
#pragma unroll
    for (int i = 0; i < Count; ++i)
      if (column + 256 * i < row.columns) load(row.weight + column + 256 * i, packs[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < Count; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (column + 256 * i + j < row.columns)
        packs[i].pairs[j / 2] |= (unsigned)row.weight[column + 256 * i + j] << 16 * (j % 2);
}

__device__ __forceinline__ Word digest_of(const Access& pack, Word first, Word second) {
  const Word a = ((Word)pack.pairs[1] << 32 | pack.pairs[0]) ^ first;
  const Word b = ((Word)pack.pairs[3] << 32 | pack.pairs[2]) ^ second;
  return a * b ^ __umul64hi(a, b);
}

__device__ __forceinline__ Word digest_of(const Row& row, int group, int lane) {
  Word sum = 0, first = START_FIRST + lane * KEY_FIRST, second = START_SECOND + lane * KEY_SECOND;
  for (int column = 8 * lane; column < row.columns; column += 256 * LOADS) {
    Access packs[LOADS];
    load_packs(row, column, packs);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (column + 256 * i < row.columns) sum += digest_of(packs[i], first, second);
      first += 32 * KEY_FIRST;
      second += 32 * KEY_SECOND;
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const unsigned low = shuffle_xor((unsigned)sum, lanes), high = shuffle_xor((unsigned)(sum >> 32), lanes);
    sum += (Word)high << 32 | low;
  }
  sum += SEED * (((Word)row.columns << 16 | group) * 2 + TYPE);
  return sum ? sum : 1;
}

// The values of a lane, rotated; all lanes of a warp come here.
__device__ __forceinline__ void values_of(const Row& row, int group, int column, float (&values)[8]) {
  Access packs[1];
  load_packs(row, column, packs);
  packs[0].to(values);
  if (group) rotate(values, group);
}

// Adds the codes of a lane to the sums of their taps, of so many channels each.
__device__ __forceinline__ void add_to_taps(const float (&values)[8], const RowScale& found, int column, int channels,
                                            float (&taps)[9]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float code = (signed char)(code_of(values[i], found.inverse) & found.mask);
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
      const bool here = column + i >= tap * channels && column + i < (tap + 1) * channels;
      taps[tap] += here ? code : 0.f;
    }
  }
}

// Writes the sums of the codes of a row `apart` floats from each other: of all taps, then for each place at the border
// of an image, row by row, of those that are inside; float32 holds them.
__device__ __forceinline__ void store_sums(float (&taps)[9], int lane, float* to, int apart) {
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) taps[tap] = sum_of_lanes<32>(taps[tap]);
  if (lane >= 9) return;
  float sum = 0.f;
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    const bool outside = (lane < 3 && tap < 3) || (lane >= 6 && tap >= 6) || (lane % 3 == 0 && tap % 3 == 0) ||
                         (lane % 3 == 2 && tap % 3 == 2);
    sum += outside ? 0.f : taps[tap];
  }
  to[(long long)apart * (lane == 4 ? 0 : 1 + lane - (lane > 4))] = sum;
}

// Writes the codes of a row, its scale and, if it is a convolution's, sums of its codes, the first of them and all others
// `apart` from what is in front; all lanes of a warp come here.
__device__ __noinline__ void quantise(Row row, int group, int lane, float* scale, int apart) {
  float values[8];
  unsigned largest = 0;
  for (int start = 0; start < row.columns; start += 256) {
    values_of(row, group, start + 8 * lane, values);
    largest = largest_of(largest, values);
  }
  const RowScale found = row_scale(largest_of_lanes<32>(largest), unit_of(group));
  float taps[9] = {};
  for (int start = 0; start < row.columns; start += 256) {
    const int column = start + 8 * lane;
    values_of(row, group, column, values);
    if (column >= row.columns) continue;
    if (apart) add_to_taps(values, found, column, row.columns / 9, taps);
    if (row.aligned) {
      store_codes(row.out + column, values, found);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i < row.columns) row.out[column + i] = (signed char)(code_of(values[i], found.inverse) & found.mask);
    }
  }
  if (lane == 0) *scale = found.scale;
  if (apart) store_sums(taps, lane, scale + apart, apart);
}

// rows: of all weights of the table.
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    quantise_weights(const __grid_constant__ Table table, int rows) {
  pdl_wait();
  const int lane = threadIdx.x % 32;
  int entry = 0;
  const int begin = blockIdx.x * WARPS + threadIdx.x / 32;
#pragma unroll
  for (int step = 64; step > 0; step /= 2)
    if (entry + step < ENTRIES && table.first[entry + step] <= begin) entry += step;
  for (int number = begin; number < rows; number += gridDim.x * WARPS) {
    while (number >= table.first[entry + 1]) ++entry;
    const long long index = number - table.first[entry];
    Word* const digest = reinterpret_cast<Word*>(table.digests[entry]) + index;
    const Word before = *digest;
    Row row;
    row.columns = table.columns[entry];
    row.weight = reinterpret_cast<const unsigned short*>(table.weights[entry]) + index * table.strides[entry];
    row.out = reinterpret_cast<signed char*>(table.rows[entry]) + index * row.columns;
    row.aligned = table.aligned[entry / 32] >> (entry % 32) & 1;
    const int group = table.groups[entry];
    const Word now = digest_of(row, group, lane);
    // a launch on another stream may have written it between the reads of two lanes
    if (!any_of_warp(now != before)) continue;
    if (lane == 0) *digest = 0;
    __threadfence();
    __syncwarp();
    float* const scale = reinterpret_cast<float*>(table.scales[entry]) + index;
    const bool summed = table.summed[entry / 32] >> (entry % 32) & 1;
    quantise(row, group, lane, scale, summed ? table.first[entry + 1] - table.first[entry] : 0);
    __threadfence();
    __syncwarp();
    if (lane == 0) *digest = now;
  }
}
