// csrc/mma.h on a CPU (csrc/cpu.h). Copies that begin are made when they are waited for.

namespace cpu {
static unsigned words[1024][6];
static const void* rows[1024];

struct Copy {
  void* to;
  const void* from;
  bool valid;
  int group;
};
static Copy copies[1024][256];
static int copying[1024], groups[1024];

inline unsigned short element(const unsigned* words, int i) { return (unsigned short)(words[i / 2] >> (16 * (i % 2))); }

// Element (row, k) of a, and (k, column) of b, from the lanes that hold them.
inline unsigned short of_a(unsigned warp, int row, int k) {
  const unsigned lane = warp + row % 8 * 4 + k % 8 / 2;
  return element(words[lane], 4 * (k / 8) + 2 * (row / 8) + k % 2);
}
inline unsigned short of_b(unsigned warp, int k, int column) {
  return element(words[warp + column * 4 + k % 8 / 2] + 4, 2 * (k / 8) + k % 2);
}

template <int Depth>
void product(float (&d)[4], float (*value)(unsigned short)) {
  barrier_wait(IN_WARP);
  const unsigned warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < Depth; ++k) d[i] += value(of_a(warp, row, k)) * value(of_b(warp, k, column));
  }
  barrier_wait(IN_WARP);
}

// Of operands in 8 bits: byte k % 16 of a row is in lane k % 16 / 4 of those that hold the row.
inline int byte_of(unsigned word, int i) { return (signed char)(word >> 8 * (i % 4)); }

template <int Rows>
void product8(int* const (&d)[Rows / 4]) {
  barrier_wait(IN_WARP);
  const unsigned warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  for (int i = 0; i < Rows / 4; ++i) {
    const unsigned of_row = warp + lane / 4 * 4, of_column = warp + (lane % 4 * 2 + i % 2) * 4;
    for (int k = 0; k < 2 * Rows; ++k) {
      const int left = byte_of(words[of_row + k % 16 / 4][i / 2 + k / 16 * 2], k);
      *d[i] += left * byte_of(words[of_column + k % 16 / 4][4 + k / 16], k);
    }
  }
  barrier_wait(IN_WARP);
}

template <int Count>
void matrices(unsigned (&to)[Count], const void* row, bool transposed) {
  rows[threadIdx.x] = row;
  barrier_wait(IN_WARP);
  const unsigned warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  for (int i = 0; i < Count; ++i) {
    unsigned short pair[2];
    for (int j = 0; j < 2; ++j) {
      const int across = lane % 4 * 2 + j, down = lane / 4;
      const void* const from = rows[warp + 8 * i + (transposed ? across : down)];
      pair[j] = static_cast<const unsigned short*>(from)[transposed ? down : across];
    }
    std::memcpy(&to[i], pair, 4);
  }
  barrier_wait(IN_WARP);
}
}  // namespace cpu

inline void mma(float (&d)[4], const unsigned (&a)[2], unsigned b) {
  unsigned* const mine = cpu::words[threadIdx.x];
  mine[0] = a[0], mine[1] = a[1], mine[4] = b;
  cpu::product<8>(d, to_float<TYPE>);
}

inline void mma(float (&d)[4], const unsigned (&a)[4], unsigned b, unsigned next) {
  unsigned* const mine = cpu::words[threadIdx.x];
  std::memcpy(mine, a, sizeof a);
  mine[4] = b, mine[5] = next;
  cpu::product<16>(d, to_float<TYPE>);
}

inline void mma_halves(unsigned (&d)[2], const unsigned (&a)[4], unsigned b, unsigned next) {
  float sum[4];
  to_floats<TYPE>(d[0], sum[0], sum[1]);
  to_floats<TYPE>(d[1], sum[2], sum[3]);
  mma(sum, a, b, next);
  for (int i = 0; i < 2; ++i) d[i] = pair_of<TYPE>(sum[2 * i], sum[2 * i + 1]);
}

inline void mma_of_16(int (&d)[4], const unsigned (&a)[4], unsigned b, unsigned next) {
  unsigned* const mine = cpu::words[threadIdx.x];
  std::memcpy(mine, a, sizeof a);
  mine[4] = b, mine[5] = next;
  cpu::product8<16>({&d[0], &d[1], &d[2], &d[3]});
}

inline void mma_of_8(int& d, int& next, unsigned a, unsigned b) {
  unsigned* const mine = cpu::words[threadIdx.x];
  mine[0] = a, mine[4] = b;
  cpu::product8<8>({&d, &next});
}

inline unsigned halves_product(unsigned x, unsigned y) {
  float a[2], b[2];
  to_floats<TYPE>(x, a[0], a[1]);
  to_floats<TYPE>(y, b[0], b[1]);
  return pair_of<TYPE>(a[0] * b[0], a[1] * b[1]);
}

inline void ldmatrix(unsigned (&to)[4], const void* row) { cpu::matrices(to, row, false); }
inline void ldmatrix(unsigned (&to)[2], const void* row) { cpu::matrices(to, row, false); }
inline void ldmatrix_transposed(unsigned (&to)[4], const void* row) { cpu::matrices(to, row, true); }
inline void ldmatrix_transposed(unsigned (&to)[2], const void* row) { cpu::matrices(to, row, true); }

inline void copy_async(void* to, const void* from, bool valid) {
  const unsigned me = threadIdx.x;
  cpu::copies[me][cpu::copying[me]++] = {to, from, valid, cpu::groups[me]};
}

inline void copy_async_commit() { ++cpu::groups[threadIdx.x]; }

template <int Pending>
inline void copy_async_wait() {
  const unsigned me = threadIdx.x;
  int kept = 0;
  for (int i = 0; i < cpu::copying[me]; ++i) {
    const cpu::Copy copy = cpu::copies[me][i];
    if (copy.group >= cpu::groups[me] - Pending)
      cpu::copies[me][kept++] = copy;
    else if (copy.valid)
      std::memcpy(copy.to, copy.from, 16);
    else
      std::memset(copy.to, 0, 16);
  }
  cpu::copying[me] = kept;
}

inline void warp_sync() { cpu::barrier_wait(cpu::IN_WARP); }

inline bool any_lane(bool x) {
  float sum = x;
  for (int lanes = 1; lanes < 32; lanes *= 2) sum += shuffle_xor(sum, lanes);
  return sum > 0;
}
