// Digests of the rows of weights, by which quantise_weights.cu knows those that changed, and their comparison by
// products that run before the weights are read.
//
// Digest: a row is read in packs of eight elements, two 64-bit words. Each word is added by exclusive or to a key of its
// place, the 128 bits of the product of the two are folded to 64 by exclusive or, and the sums of all packs and of what
// else the codes depend on are added, modulo 2^64; 0 becomes 1. `digest_of_rows` of quantise_weights.py does the same.

typedef unsigned long long Word;

#define KEY_FIRST 0x9e3779b97f4a7c15ull
#define KEY_SECOND 0xd1b54a32d192ed03ull
#define START_FIRST 0xa0761d6478bd642full
#define START_SECOND 0xe7037ed1a0b428dbull
#define SEED 0x8ebc6af09c88c6e3ull

__device__ __forceinline__ Word digest_of_words(Word a, Word b) { return a * b ^ __umul64hi(a, b); }

// type: of the weights, as TYPE in elements.h.
__device__ __forceinline__ Word digest_of_sum(Word sum, int columns, int group, int type) {
  sum += SEED * (((Word)columns << 16 | group) * 2 + type);
  return sum ? sum : 1;
}

// Rows that are taken at once.
__device__ __forceinline__ int rows_at_once(int columns) { return columns > 1280 ? 1 : 2; }

#if AHEAD
// Weights of later products, whose rows are compared by warps that have nothing else to do. `first` counts what is taken
// at once, in the order of the weights; counts: rows. Rows are aligned to 16 bytes and a multiple of 8 elements.
struct Ahead {
  Word weights[AHEAD], digests[AHEAD];
  int first[AHEAD + 1], counts[AHEAD], strides[AHEAD];
  unsigned short columns[AHEAD], groups[AHEAD];
  int type;
};

// Compares rows, and erases the digests of those that changed, until all are taken or there is something in `*stop`.
// By all lanes of a warp. taken: how many times rows were taken, by all blocks, or null.
__device__ __forceinline__ void compare_ahead(const Ahead& ahead, unsigned* taken, volatile int* stop, int lane) {
  constexpr int kLoads = 4;
  while (taken != nullptr && *stop == 0) {
    unsigned number = 0;
    if (lane == 0) number = atomicAdd(taken, 1);
    number = __shfl_sync(~0u, number, 0);
    if (number >= (unsigned)ahead.first[AHEAD]) return;
    int entry = 0;
#pragma unroll 1
    while ((unsigned)ahead.first[entry + 1] <= number) ++entry;
    const int columns = ahead.columns[entry], at_once = rows_at_once(columns);
    const int begin = (int)(number - ahead.first[entry]) * at_once, end = min(begin + at_once, ahead.counts[entry]);
#pragma unroll 1
    for (int row = begin; row < end; ++row) {
      Word* const digest = reinterpret_cast<Word*>(ahead.digests[entry]) + row;
      const Word before = *digest, weight = ahead.weights[entry] + 2 * (long long)row * ahead.strides[entry];
      Word sum = 0;
#pragma unroll 1
      for (int pack = lane; 8 * pack < columns; pack += 32 * kLoads) {
        uint4 packs[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          if (8 * (pack + 32 * i) < columns)
            asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(packs[i].x), "=r"(packs[i].y), "=r"(packs[i].z), "=r"(packs[i].w)
                         : "l"(weight + 16 * (pack + 32 * i)));
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
          if (8 * (pack + 32 * i) < columns)
            sum += digest_of_words(
                ((Word)packs[i].y << 32 | packs[i].x) ^ (START_FIRST + (pack + 32 * i) * KEY_FIRST),
                ((Word)packs[i].w << 32 | packs[i].z) ^ (START_SECOND + (pack + 32 * i) * KEY_SECOND));
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      if (lane == 0 && digest_of_sum(sum, columns, ahead.groups[entry], ahead.type) != before) *digest = 0;
    }
  }
}
#endif
