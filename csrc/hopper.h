// What kernels for Hopper are made of: barriers, the copy engine, products of warp groups, clusters of blocks.
//
// What is given: BF16; WIDTH, where products are to be by `multiply`.

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

__device__ __forceinline__ u32 address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (!done);
}

// At a barrier of the block `rank` of the cluster. What it orders are reads by wgmma, which have ended: no more than the
// scope of a block is asked for, as a cluster's takes a thousand clocks.
__device__ __forceinline__ void arrive(u32 barrier, u32 rank) {
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
               "r"(rank)
               : "memory");
}

// At one of this block.
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void initialise(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// What this thread wrote to shared memory is there for the copy engine.
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barriers of so many slots: a slot is full when one thread's copies have come, and free when `readers` have said so.
__device__ __forceinline__ void initialise_ring(u32 full, u32 free, int slots, u32 readers) {
  for (int i = 0; i < slots; ++i) {
    initialise(full + 8 * i, 1);
    initialise(free + 8 * i, readers);
  }
}

// What one thread has initialised counts for all of the cluster, once they have met, and for the copy engine.
__device__ __forceinline__ void initialised() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  show_to_copies();
}

// The next kernel's blocks may take the places of this one's as these end, where it was launched to begin early. By a
// thread of each block.
__device__ __forceinline__ void next_may_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// From here on what the kernels in front have written is there, and what they read may be written: where this one was
// launched to begin early they had not all ended before. By each thread that reads or writes such.
__device__ __forceinline__ void after_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// One lane of a whole warp.
__device__ __forceinline__ u32 elected() {
  u32 mine;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(mine));
  return mine;
}

// Predicated, not branched: the copy engine's instruction wants uniform registers.
__device__ __forceinline__ void expect(u32 mine, u32 barrier, u32 bytes) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %2, 0;\n"
      "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1; }" ::"r"(barrier),
      "r"(bytes), "r"(mine)
      : "memory");
}

// From where a map says to shared memory; a row of it is what a map calls its second coordinate.
__device__ __forceinline__ void copy(u32 mine, u32 to, const TensorMap* map, u32 barrier, int term, int row) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0;\n"
      "@p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4]; }" ::"r"(to),
      "l"(map), "r"(term), "r"(row), "r"(barrier), "r"(mine)
      : "memory");
}

// Of a map over images, of which three coordinates lie within each: channels, columns and rows, or a head's columns, heads
// and keys.
__device__ __forceinline__ void copy(u32 mine, u32 to, const TensorMap* map, u32 barrier, int first, int second, int third,
                                     int image) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %7, 0;\n"
      "@p cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4, %5}], [%6]; }" ::"r"(to),
      "l"(map), "r"(first), "r"(second), "r"(third), "r"(image), "r"(barrier), "r"(mine)
      : "memory");
}

// To the same place in both blocks of a pair.
__device__ __forceinline__ void copy_to_both(u32 mine, u32 to, const TensorMap* map, u32 barrier, int term, int row) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %6, 0;\n"
      "@p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2, %3}], [%4], %5; }" ::"r"(to),
      "l"(map), "r"(term), "r"(row), "r"(barrier), "h"((unsigned short)3), "r"(mine)
      : "memory");
}

// Rows of 128 bytes in shared memory for wgmma, swizzled over their width, groups of eight of them following each other.
__device__ __forceinline__ u64 operand(u32 at) { return u64(1u << 30 | 64) << 32 | (1 << 16 | at >> 4); }

__device__ __forceinline__ void open() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void await() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps the compiler from moving what reads or writes these across: products change them behind its back.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int M, int N>
__device__ __forceinline__ void pin(float (&d)[M][N]) {
#pragma unroll
  for (int i = 0; i < M; ++i) pin(d[i]);
}

#ifdef WIDTH

#define R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define R1 R0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define R2 R1 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R3 R2 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define R4 R3 ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R5 R4 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define R6 R5 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define R7 R6 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define R8 R7 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
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

// d (64, WIDTH) += a (64, 16) b (WIDTH, 16)^T; with keep = 0 instead of it.
__device__ __forceinline__ void multiply(float (&d)[WIDTH / 2], u64 a, u64 b, int keep) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " KEEP ", 0;\n"
               "wgmma.mma_async.sync.aligned.m64n" TEXT(WIDTH) "k16.f32." TYPE "." TYPE " {" NAMES "}, " OPERANDS
               ", p, 1, 1, 0, 0; }"
               : SUMS
               : "l"(a), "l"(b), "r"(keep));
}

#endif

__device__ __forceinline__ u32 packed(float low, float high) {
  u32 both;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float2 unpacked(u32 both) {
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

// Where all blocks of a cluster have come; with what they have written, or just so.
__device__ __forceinline__ void meet_written() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
