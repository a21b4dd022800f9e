// Stands for the GPU where a C++ compiler of the host builds a kernel, for tests: one thread of the host for each thread
// of a block, blocks one after the other. Threads of a warp meet at a shuffle, those of a block at __syncthreads, which
// must be reached by all of them, as on a GPU.

#include <pthread.h>

#include <cmath>
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static
#define SHARED_MEMORY(Type, name) Type* const name = reinterpret_cast<Type*>(cpu::shared)

struct cpu_index {
  unsigned x, y, z;
};
static thread_local cpu_index threadIdx, blockIdx;
static cpu_index blockDim, gridDim;

namespace cpu {
static unsigned char* shared;
static pthread_barrier_t block;
static pthread_barrier_t warps[32];
static float lanes[1024];
}  // namespace cpu

inline void __syncthreads() { pthread_barrier_wait(&cpu::block); }

inline float float_of_bits(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline unsigned bits_of_float(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float half_to_float(unsigned short bits) {
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return x;
}

inline unsigned short float_to_half(float x) {
  const _Float16 y = x;
  unsigned short bits;
  std::memcpy(&bits, &y, 2);
  return bits;
}

inline float shuffle_xor(float x, int lanes) {
  const unsigned me = threadIdx.x;
  pthread_barrier_t* const warp = &cpu::warps[me / 32];
  cpu::lanes[me] = x;
  pthread_barrier_wait(warp);
  const float theirs = cpu::lanes[me ^ (unsigned)lanes];
  pthread_barrier_wait(warp);
  return theirs;
}

// by itself, not with an addition behind it
inline float rounded_product(float x, float y) {
  volatile const float product = x * y;
  return product;
}

inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline int min(int x, int y) { return x < y ? x : y; }

namespace cpu {
template <class... Args, size_t... Number>
void call(void (*kernel)(Args...), void** args, std::index_sequence<Number...>) {
  kernel(*static_cast<typename std::remove_const<Args>::type*>(args[Number])...);
}

template <class... Args>
struct Launch {
  void (*kernel)(Args...);
  void** args;
  unsigned thread;
};

template <class... Args>
void* run(void* given) {
  const Launch<Args...>& launch = *static_cast<Launch<Args...>*>(given);
  threadIdx = {launch.thread, 0, 0};
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = {x, y, z};
        call(launch.kernel, launch.args, std::index_sequence_for<Args...>());
        pthread_barrier_wait(&block);
      }
  return nullptr;
}

// Shared memory is poisoned. Returns 0, or an error code: -1 for a block that no GPU takes, or the system's.
template <class... Args>
int launch(void (*kernel)(Args...), void** args, const unsigned* grid, unsigned threads, unsigned bytes) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {threads, 1, 1};
  alignas(16) static unsigned char memory[48 << 10];
  std::memset(memory, 0xff, sizeof memory);
  shared = memory;
  if (threads > 1024 || threads % 32 || bytes > sizeof memory) return -1;
  pthread_barrier_init(&block, nullptr, threads);
  for (unsigned warp = 0; warp < threads / 32; ++warp) pthread_barrier_init(&warps[warp], nullptr, 32);
  static Launch<Args...> launches[1024];
  static pthread_t running[1024];
  for (unsigned thread = 0; thread < threads; ++thread) {
    launches[thread] = {kernel, args, thread};
    const int failed = pthread_create(&running[thread], nullptr, run<Args...>, &launches[thread]);
    if (failed) return failed;
  }
  for (unsigned thread = 0; thread < threads; ++thread) pthread_join(running[thread], nullptr);
  pthread_barrier_destroy(&block);
  for (unsigned warp = 0; warp < threads / 32; ++warp) pthread_barrier_destroy(&warps[warp]);
  return 0;
}
}  // namespace cpu
