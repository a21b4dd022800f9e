// Four groups of warps that have attended to the same 64 rows of queries, each to some of the keys, add up what they have.

constexpr int kPair = 1, kTaken = 4;  // barriers: of a group and another that adds to it; of what they leave it in

// What a group has: sums of each thread, and of each row its maximum and the sum of its probabilities.
template <int SUMS>
struct Part {
  float sum[SUMS][128];
  float2 row[64];
};

// Of two rows that a thread has sums of, the maxima, and the sums of all their probabilities, in all four lanes.
struct Rows {
  float most[2], all[2];
};

template <int SUMS>
__device__ __forceinline__ void leave(Part<SUMS>& to, const float (&sum)[SUMS], const Rows& rows) {
  const int thread = threadIdx.x & 127, row = thread / 32 * 16 + (thread & 31) / 4;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) to.sum[i][thread] = sum[i];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if ((thread & 3) == 0) to.row[row + 8 * half] = make_float2(rows.most[half], rows.all[half]);
}

template <int SUMS>
__device__ __forceinline__ void add(const Part<SUMS>& from, float (&sum)[SUMS], Rows& rows) {
  const int thread = threadIdx.x & 127, row = thread / 32 * 16 + (thread & 31) / 4;
  float own[2], its[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 other = from.row[row + 8 * half];
    const float most = fmaxf(rows.most[half], other.x);
    own[half] = exp_2(rows.most[half] - most);
    its[half] = exp_2(other.x - most);
    rows.most[half] = most;
    rows.all[half] = rows.all[half] * own[half] + other.y * its[half];
  }
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sum[i] = sum[i] * own[(i >> 1) & 1] + from.sum[i][thread] * its[(i >> 1) & 1];
}

// Group 0 has all of it in the end. before, after: whether the groups do so just before and after this.
template <int SUMS>
__device__ __forceinline__ void add_up(Part<SUMS>* parts, int group, float (&sum)[SUMS], Rows& rows, bool before,
                                       bool after) {
  if (group >= 2) {
    if (before) asm volatile("bar.sync %0, 384;" ::"n"(kTaken) : "memory");
    leave(parts[group - 2], sum, rows);
    asm volatile("bar.arrive %0, 256;" ::"r"(kPair + group - 2) : "memory");
    return;
  }
  asm volatile("bar.sync %0, 256;" ::"r"(kPair + group) : "memory");
  add(parts[group], sum, rows);
  if (group == 1) {
    __syncwarp();  // which has read what it writes to
    leave(parts[1], sum, rows);
    asm volatile("bar.arrive %0, 256;" ::"n"(kPair + 2) : "memory");
  } else {
    asm volatile("bar.sync %0, 256;" ::"n"(kPair + 2) : "memory");
    add(parts[1], sum, rows);
    if (after) asm volatile("bar.arrive %0, 384;" ::"n"(kTaken) : "memory");
  }
}
