// Combines the partial results of four warpgroups that attended the same 64 queries to disjoint keys (split KV): online
// softmax states are rescaled to a common maximum and added in shared memory.

constexpr int kPair = 1, kTaken = 4;  // named barriers: a writer and its reader; the buffers are free

// A warpgroup's state: accumulators by thread; by row the maximum and the sum of exponentials.
template <int SUMS>
struct Part {
  float sum[SUMS][128];
  float2 row[64];
};

// Maximum and sum of exponentials of the two rows of a thread, the same in all four lanes of a row.
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

// Warpgroup 0 ends with the result. before, after: whether the previous and the next work item combine too, and so
// share the buffers.
template <int SUMS>
__device__ __forceinline__ void split_kv_combine(Part<SUMS>* parts, int warpgroup, float (&sum)[SUMS], Rows& rows,
                                                 bool before, bool after) {
  if (warpgroup >= 2) {
    if (before) asm volatile("bar.sync %0, 384;" ::"n"(kTaken) : "memory");
    leave(parts[warpgroup - 2], sum, rows);
    asm volatile("bar.arrive %0, 256;" ::"r"(kPair + warpgroup - 2) : "memory");
    return;
  }
  asm volatile("bar.sync %0, 256;" ::"r"(kPair + warpgroup) : "memory");
  add(parts[warpgroup], sum, rows);
  if (warpgroup == 1) {
    __syncwarp();  // all lanes have read the buffer that is overwritten next
    leave(parts[1], sum, rows);
    asm volatile("bar.arrive %0, 256;" ::"n"(kPair + 2) : "memory");
  } else {
    asm volatile("bar.sync %0, 256;" ::"n"(kPair + 2) : "memory");
    add(parts[1], sum, rows);
    if (after) asm volatile("bar.arrive %0, 384;" ::"n"(kTaken) : "memory");
  }
}
