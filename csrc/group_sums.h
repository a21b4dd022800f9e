// Sums over the groups of a group norm, of what a warp has of a tile: of columns 8 j to 8 j + 7 a lane has two, those at
// 8 j + 2 (lane % 4), as products of warp groups leave them.
//
// What is given: WIDTH, the columns of a tile; GROUP, those of a group, even, of which a tile has 1, 2, 4, 8 or 16.

constexpr int kGroups = WIDTH / GROUP;
constexpr int kSet = kGroups < 4 ? kGroups : 4, kEights = WIDTH / 8 * kSet / kGroups;  // groups that are summed at a time

// The sums over a warp's lanes of LEFT numbers: that of lane * kSet / 32 is left in v[0]. Each step sends the half of what
// is left that the other lane goes on with.
template <int LEFT, int MASK>
__device__ __forceinline__ void across_lanes(float (&v)[kSet], int lane) {
  if constexpr (LEFT > 1) {
#pragma unroll
    for (int i = 0; i < LEFT / 2; ++i) {
      const float other = lane & MASK ? v[i] : v[i + LEFT / 2], own = lane & MASK ? v[i + LEFT / 2] : v[i];
      v[i] = own + __shfl_xor_sync(~0u, other, MASK);
    }
  } else {
    v[0] += __shfl_xor_sync(~0u, v[0], MASK);
  }
  if constexpr (MASK > 1) across_lanes<(LEFT > 1 ? LEFT / 2 : 1), MASK / 2>(v, lane);
}

// Sums for all groups of what a warp has of its tile: of(j) is what a thread has of columns 8 j to 8 j + 7, two of them.
template <typename Of>
__device__ __forceinline__ void by_groups(float (&sums)[kGroups], int lane, Of of) {
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
    across_lanes<kSet, 16>(v, lane);
    sums[set * kSet + lane * kSet / 32] = v[0];
  }
}
