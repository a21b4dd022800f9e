// Sums over the channel groups of a group norm, across a warp. The layout is that of wgmma's accumulators: of columns 8
// j to 8 j + 7 a lane holds two, at 8 j + 2 (lane % 4).
//
// Compile-time parameters: WIDTH, columns (N) of a tile; GROUP, columns of a group, even; a tile has 1, 2, 4, 8 or 16.

constexpr int kGroups = WIDTH / GROUP;
constexpr int kSet = kGroups < 4 ? kGroups : 4, kEights = WIDTH / 8 * kSet / kGroups;  // groups reduced at a time

// Reduce-scatter of LEFT numbers over a warp: v[0] becomes the sum of number lane * kSet / 32. Each step exchanges the
// half of the remaining numbers that the other lane continues with.
template <int LEFT, int MASK>
__device__ __forceinline__ void lane_reduce(float (&v)[kSet], int lane) {
  if constexpr (LEFT > 1) {
#pragma unroll
    for (int i = 0; i < LEFT / 2; ++i) {
      const float other = lane & MASK ? v[i] : v[i + LEFT / 2], own = lane & MASK ? v[i + LEFT / 2] : v[i];
      v[i] = own + __shfl_xor_sync(~0u, other, MASK);
    }
  } else {
    v[0] += __shfl_xor_sync(~0u, v[0], MASK);
  }
  if constexpr (MASK > 1) lane_reduce<(LEFT > 1 ? LEFT / 2 : 1), MASK / 2>(v, lane);
}

// Per-group sums of a warp's part of a tile; of(j) is a thread's sum over its two columns of 8 j to 8 j + 7.
template <typename Of>
__device__ __forceinline__ void group_reduce(float (&sums)[kGroups], int lane, Of of) {
  constexpr int kPairs = GROUP / 2;
#pragma unroll
  for (int set = 0; set < kGroups / kSet; ++set) {
    float v[kSet];
#pragma unroll
    for (int i = 0; i < kSet; ++i) v[i] = 0.f;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const int first = 4 * j / kPairs, last = (4 * j + 3) / kPairs;
      const float here = of(set * kEights + j);
      if (first == last) {
        v[first] += here;
      } else {
        const bool before = 4 * j + (lane & 3) < last * kPairs;
        v[first] += before ? here : 0.f;
        v[last] += before ? 0.f : here;
      }
    }
    lane_reduce<kSet, 16>(v, lane);
    sums[set * kSet + lane * kSet / 32] = v[0];
  }
}
