// PTX wrappers for Hopper kernels: mbarriers, TMA, wgmma, thread block clusters, programmatic dependent launch (PDL).
// Names follow CUTLASS and PTX.
//
// Compile-time parameters: BF16 (0 is float16); WIDTH, the N of `wgmma`, if that is used; KIND, the type of its
// operands if they have 8 bits: 0 int8 with int32 sums, 1 float8 e4m3 with float32 sums.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
  u64 words[16];
};

#if BF16
#define TYPE "bf16"
#else
#define TYPE "f16"
#endif

__device__ __forceinline__ u32 smem_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

// Arrives at an mbarrier of block `rank` of the cluster. It orders wgmma's reads of shared memory, which have
// completed, so the default CTA scope is enough; cluster scope costs about 1000 clocks.
__device__ __forceinline__ void mbarrier_arrive(u32 barrier, u32 rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Arrives at an mbarrier of this block.
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes this thread's writes to shared memory visible to the async proxy (TMA, wgmma).
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Full and empty mbarriers of a ring of stages. A stage is full once the producer's TMA loads have landed, and empty
// once `readers` consumer warps have arrived.
__device__ __forceinline__ void mbarrier_init_ring(u32 full, u32 empty, int stages, u32 readers) {
  for (int i = 0; i < stages; ++i) {
    mbarrier_init(full + 8 * i, 1);
    mbarrier_init(empty + 8 * i, readers);
  }
}

// Makes initialised mbarriers visible to the cluster (after the next cluster or block sync) and to the async proxy.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_async_proxy();
}

// PDL: allows the next kernel, if launched with programmatic stream serialization, to be scheduled as this one's blocks
// exit. One thread of each block calls it.
__device__ __forceinline__ void pdl_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// PDL: waits until the preceding kernels have completed and their writes are visible; a no-op without PDL. Every thread
// that reads what they write, or writes what they access, calls it first.
__device__ __forceinline__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// 1 in one lane of a converged warp, else 0.
__device__ __forceinline__ u32 elect_one() {
  u32 elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected;
}

// Predicated rather than branched on `elected`: TMA instructions take uniform registers.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 elected, u32 barrier, u32 bytes) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %2, 0;\n"
      "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1; }" ::"r"(barrier),
      "r"(bytes), "r"(elected)
      : "memory");
}

// TMA load of a 2D box at (k, row), innermost coordinate first, to shared memory.
__device__ __forceinline__ void tma_load(u32 elected, u32 to, const TensorMap* map, u32 barrier, int k, int row) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0;\n"
      "@p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4]; }" ::"r"(to),
      "l"(map), "r"(k), "r"(row), "r"(barrier), "r"(elected)
      : "memory");
}

// TMA load of a 4D box: (channel, x, y, image) of an NHWC tensor, or (column, head, key, image) of keys and values.
__device__ __forceinline__ void tma_load(u32 elected, u32 to, const TensorMap* map, u32 barrier, int first, int second,
                                         int third, int image) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %7, 0;\n"
      "@p cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6]; }" ::"r"(to),
      "l"(map), "r"(first), "r"(second), "r"(third), "r"(image), "r"(barrier), "r"(elected)
      : "memory");
}

// Loads a 2D box into the L2 cache. Later writes of other kernels are seen there, so it may be called before
// `pdl_wait`.
__device__ __forceinline__ void tma_prefetch(u32 elected, const TensorMap* map, int k, int row) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %3, 0;\n"
      "@p cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}]; }" ::"l"(map),
      "r"(k), "r"(row), "r"(elected)
      : "memory");
}

// TMA load to the same shared memory offset in both blocks of a cluster of two (multicast).
__device__ __forceinline__ void tma_load_multicast(u32 elected, u32 to, const TensorMap* map, u32 barrier, int k,
                                                   int row) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "@p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5; }" ::"r"(to),
      "l"(map), "r"(k), "r"(row), "r"(barrier), "h"((unsigned short)3), "r"(elected)
      : "memory");
}

// Bulk copy to shared memory; addresses and bytes are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

// TMA store of a 2D box.
__device__ __forceinline__ void tma_store(const TensorMap* map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column),
               "r"(row), "r"(from)
               : "memory");
}

// Waits until this thread's TMA stores have read shared memory.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Loads a tensor map into the cache of the copy engine.
__device__ __forceinline__ void prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ float2 load_two(u32 from) {
  float2 two;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(from) : "memory");
  return two;
}

__device__ __forceinline__ u32 load_one(u32 from) {
  u32 one;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(one) : "r"(from) : "memory");
  return one;
}

// wgmma matrix descriptor: rows of 128 bytes with 128-byte swizzle, groups of eight rows contiguous. The layout is one
// of bytes: 64 values of 16 bits or 128 of 8 bits. An instruction reads 32 bytes of each row.
__device__ __forceinline__ u64 wgmma_descriptor(u32 at) { return u64(1u << 30 | 64) << 32 | (1 << 16 | at >> 4); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from moving accesses of accumulators across (CUTLASS' warpgroup_fence_operand): wgmma is
// asynchronous.
template <int N>
__device__ __forceinline__ void fence_operand(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N>
__device__ __forceinline__ void fence_operand(int (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

template <typename T, int M, int N>
__device__ __forceinline__ void fence_operand(T (&d)[M][N]) {
#pragma unroll
  for (int i = 0; i < M; ++i) fence_operand(d[i]);
}

#ifdef WIDTH

#define R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define R1 R0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R2 R1 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R3 R2 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define R4                                                                                                         \
  R3 ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, " \
     "%61, %62, %63"
#define R5 R4 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define R6 R5 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define R7 R6 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define R8 R7 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#ifndef KIND
typedef float Sum;
#define REGISTER "+f"
#define INSTRUCTION "k16.f32." TYPE "." TYPE
#define IMMEDIATES ", 1, 1, 0, 0"
#elif KIND == 0
typedef int Sum;
#define REGISTER "+r"
#define INSTRUCTION "k32.s32.s8.s8"
#define IMMEDIATES ""
#else
typedef float Sum;
#define REGISTER "+f"
#define INSTRUCTION "k32.f32.e4m3.e4m3"
#define IMMEDIATES ", 1, 1"
#endif
#define EIGHT(i)                                                                                                     \
  REGISTER(d[i]), REGISTER(d[i + 1]), REGISTER(d[i + 2]), REGISTER(d[i + 3]), REGISTER(d[i + 4]), REGISTER(d[i + 5]), \
      REGISTER(d[i + 6]), REGISTER(d[i + 7])
#define SIXTEEN(i) EIGHT(i), EIGHT(i + 8)
#if WIDTH == 80
#define NAMES R3
#define SUMS SIXTEEN(0), SIXTEEN(16), EIGHT(32)
#define OPERANDS "%40, %41"
#define KEEP "%42"
#elif WIDTH == 128
#define NAMES R4
#define SUMS SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
#define OPERANDS "%64, %65"
#define KEEP "%66"
#elif WIDTH == 160
#define NAMES R5
#define SUMS SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64)
#define OPERANDS "%80, %81"
#define KEEP "%82"
#elif WIDTH == 192
#define NAMES R6
#define SUMS SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80)
#define OPERANDS "%96, %97"
#define KEEP "%98"
#elif WIDTH == 224
#define NAMES R7
#define SUMS SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96)
#define OPERANDS "%112, %113"
#define KEEP "%114"
#elif WIDTH == 256
#define NAMES R8
#define SUMS SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112)
#define OPERANDS "%128, %129"
#define KEEP "%130"
#endif
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

// d (64, WIDTH) += a (64, K) b (WIDTH, K)^T, K being 32 bytes, both operands in shared memory; keep = 0 overwrites d.
__device__ __forceinline__ void wgmma(Sum (&d)[WIDTH / 2], u64 a, u64 b, int keep) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " KEEP
               ", 0;\n"
               "wgmma.mma_async.sync.aligned.m64n" TEXT(WIDTH) INSTRUCTION " {" NAMES "}, " OPERANDS
                                                               ", p" IMMEDIATES "; }"
               : SUMS
               : "l"(a), "l"(b), "r"(keep));
}

#endif

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float2 unpack(u32 both) {
  float2 y;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32." TYPE " %0, l; cvt.f32." TYPE " %1, h; }"
      : "=f"(y.x), "=f"(y.y)
      : "r"(both));
  return y;
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Cluster barrier with release/acquire semantics.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Cluster barrier without memory ordering.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
