// What a warp does with tensor cores from compute capability 7.5 on: mma.sync, ldmatrix, and cp.async, which 7.5 replaces
// by plain copies. Names follow PTX. Lane l of a warp holds, with row = l / 4 and pair = l % 4:
//
//   a (16, K): rows `row` and `row` + 8 in turns, columns 2 pair, 2 pair + 1; then the same 8 columns on
//   b (K, 8): rows 2 pair, 2 pair + 1, then the same 8 rows on; column `row`
//   d (16, 8): d[0], d[1] in row `row`, d[2], d[3] in row `row` + 8; columns 2 pair, 2 pair + 1
//
// So the accumulators of two neighbouring tiles, rounded, are the operand a of the next product. In 8 bits, four neighbours
// take the place of two, and K is twice as long.
//
// Compile-time parameters: TYPE, kFloat16 or kBFloat16 (elements.h), operands of the latter from 8.0 on; TURING, whether
// it is 7.5, without cp.async and with smaller products of 8 bits (a test may say so).

#include "elements.h"

#ifndef TURING
#if defined(SFAST_CPU) || __CUDA_ARCH__ >= 800
#define TURING 0
#else
#define TURING 1
#endif
#endif

#ifdef SFAST_CPU
#include "mma_cpu.h"
#else

#if TYPE == 1
#define MMA_TYPES "f32.bf16.bf16.f32"
#else
#define MMA_TYPES "f32.f16.f16.f32"
#endif

// d += a b, with K = 8.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[2], unsigned b) {
  asm("mma.sync.aligned.m16n8k8.row.col." MMA_TYPES " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// d += a b, with K = 16.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b, unsigned next) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(next));
#else
  mma(d, {a[0], a[1]}, b);
  mma(d, {a[2], a[3]}, next);
#endif
}

#if TYPE == 0
// d += a b in float16, with K = 16; a word of d holds two neighbours of a row.
__device__ __forceinline__ void mma_halves(unsigned (&d)[2], const unsigned (&a)[4], unsigned b, unsigned next) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(next));
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(b));
  asm("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[2]), "r"(a[3]), "r"(next));
#endif
}

// Products of two float16 and two others.
__device__ __forceinline__ unsigned halves_product(unsigned x, unsigned y) {
  unsigned z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
#endif

// d += a b in int32, of 16 rows with K = 32 (8.0 and later), and of 8 rows with K = 16.
__device__ __forceinline__ void mma_of_16(int (&d)[4], const unsigned (&a)[4], unsigned b, unsigned next) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(next));
}
__device__ __forceinline__ void mma_of_8(int& d, int& next, unsigned a, unsigned b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
      : "+r"(d), "+r"(next)
      : "r"(a), "r"(b));
}

__device__ __forceinline__ unsigned smem_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// 8 x 8 matrices of shared memory, each row 16 bytes, whose addresses lanes 0 to 7 give for the first, and so on. A lane
// gets two neighbours of a row, or of a column if transposed.
__device__ __forceinline__ void ldmatrix(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(smem_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix(unsigned (&to)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(smem_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(smem_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(unsigned (&to)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(smem_address(row))
               : "memory");
}

// Begins to copy 16 bytes to shared memory, zeros if not `valid`; nothing is read then.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
#else
  const uint4 zeros = {0, 0, 0, 0};
  *static_cast<uint4*>(to) = valid ? *static_cast<const uint4*>(from) : zeros;
#endif
}

// Ends a group of copies.
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until of this thread's groups at most the last Pending are under way.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#endif
}

__device__ __forceinline__ void warp_sync() { __syncwarp(); }
__device__ __forceinline__ bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
#endif

// d += a b in int32, of operands in 8 bits, with K = 32.
__device__ __forceinline__ void mma(int (&d)[4], const unsigned (&a)[4], unsigned b, unsigned next) {
#if TURING
  mma_of_8(d[0], d[1], a[0], b);
  mma_of_8(d[2], d[3], a[1], b);
  mma_of_8(d[0], d[1], a[2], next);
  mma_of_8(d[2], d[3], a[3], next);
#else
  mma_of_16(d, a, b, next);
#endif
}
