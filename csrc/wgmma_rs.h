// wgmma with A in registers: the accumulator layout of one mma is the A layout of the next.

#define FOUR_OF(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN_OF(d, i) FOUR_OF(d, i), FOUR_OF(d, i + 4), FOUR_OF(d, i + 8), FOUR_OF(d, i + 12)

// d (64, N) += a (64, 16) b; keep = 0 overwrites d. b is N-major (rows of N) if TRANSPOSED, else K-major (N rows).
template <int TRANSPOSED>
__device__ __forceinline__ void wgmma_rs(float (&d)[20], const u32 (&a)[4], u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %25, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n40k16.f32." TYPE "." TYPE
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19},"
      " {%20, %21, %22, %23}, %24, p, 1, 1, %26; }"
      : SIXTEEN_OF(d, 0), FOUR_OF(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(TRANSPOSED));
}

template <int TRANSPOSED>
__device__ __forceinline__ void wgmma_rs(float (&d)[32], const u32 (&a)[4], u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23,"
      " %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; }"
      : SIXTEEN_OF(d, 0), SIXTEEN_OF(d, 16)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(TRANSPOSED));
}

template <int TRANSPOSED>
__device__ __forceinline__ void wgmma_rs(float (&d)[8], const u32 (&a)[4], u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE
      " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, %14; }"
      : FOUR_OF(d, 0), FOUR_OF(d, 4)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(TRANSPOSED));
}

template <int TRANSPOSED>
__device__ __forceinline__ void wgmma_rs(float (&d)[40], const u32 (&a)[4], u64 b, int keep) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %45, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32." TYPE "." TYPE
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21,"
      " %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39},"
      " {%40, %41, %42, %43}, %44, p, 1, 1, %46; }"
      : SIXTEEN_OF(d, 0), SIXTEEN_OF(d, 16), FOUR_OF(d, 32), FOUR_OF(d, 36)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(TRANSPOSED));
}
