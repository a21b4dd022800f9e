// Stands for the GPU where a C++ compiler of the host builds a kernel, for tests: blocks run one after the other, and the
// threads of a block in turns in one thread of the host, each with a stack of its own. Threads of a warp meet at a
// shuffle, those of a block at __syncthreads, which must be reached by all of them.

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <memory>
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
static cpu_index threadIdx, blockIdx, blockDim, gridDim;

namespace cpu {
enum { kMostThreads = 1024, kStack = 64 << 10 };

struct Barrier {
  unsigned members, arrived, passed;
};

// A thread of a block, and the barrier where it waits; `turn` is how often others had passed it when it came.
struct Thread {
  ucontext_t context;
  const Barrier* at;
  unsigned turn;
  bool ended;

  bool waits() const { return at && at->passed == turn; }
};

static unsigned char* shared;
static Barrier block, warps[kMostThreads / 32];
static float lanes[kMostThreads];
static Thread threads[kMostThreads];
static ucontext_t scheduler;

inline void wait(Barrier& barrier) {
  Thread& me = threads[threadIdx.x];
  me.at = &barrier;
  me.turn = barrier.passed;
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.passed;
    return;
  }
  swapcontext(&me.context, &scheduler);
}
}  // namespace cpu

inline void __syncthreads() { cpu::wait(cpu::block); }

inline void pdl_wait() {}

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

inline void halves_to_floats(unsigned word, float& first, float& second) {
  first = half_to_float((unsigned short)word);
  second = half_to_float((unsigned short)(word >> 16));
}

inline float shuffle_xor(float x, int lanes) {
  const unsigned me = threadIdx.x;
  cpu::lanes[me] = x;
  cpu::wait(cpu::warps[me / 32]);
  const float theirs = cpu::lanes[me ^ (unsigned)lanes];
  cpu::wait(cpu::warps[me / 32]);
  return theirs;
}

// by itself, not with an addition behind it
inline float rounded_product(float x, float y) {
  volatile const float product = x * y;
  return product;
}

inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
inline int min(int x, int y) { return x < y ? x : y; }

namespace cpu {
template <class... Args, size_t... Number>
void call(void (*kernel)(Args...), void** args, std::index_sequence<Number...>) {
  kernel(*static_cast<typename std::remove_const<Args>::type*>(args[Number])...);
}

template <class... Args>
struct Launch {
  static void (*kernel)(Args...);
  static void** args;

  static void run() {
    call(kernel, args, std::index_sequence_for<Args...>());
    threads[threadIdx.x].ended = true;
  }
};
template <class... Args>
void (*Launch<Args...>::kernel)(Args...);
template <class... Args>
void** Launch<Args...>::args;

// Runs a block whose threads begin with `run`. Returns whether all of them ended: not where some wait for others that
// have ended or wait elsewhere.
inline bool run_block(void (*run)(), unsigned count, unsigned char* stacks) {
  block = {count, 0, 0};
  for (unsigned warp = 0; warp < count / 32; ++warp) warps[warp] = {32, 0, 0};
  for (unsigned i = 0; i < count; ++i) {
    threads[i].at = nullptr;
    threads[i].ended = false;
    getcontext(&threads[i].context);
    threads[i].context.uc_stack.ss_sp = stacks + (size_t)i * kStack;
    threads[i].context.uc_stack.ss_size = kStack;
    threads[i].context.uc_link = &scheduler;
    makecontext(&threads[i].context, run, 0);
  }
  unsigned left = count;
  for (bool moved = true; left && moved;) {
    moved = false;
    for (unsigned i = 0; i < count; ++i) {
      if (threads[i].ended || threads[i].waits()) continue;
      moved = true;
      threadIdx = {i, 0, 0};
      swapcontext(&scheduler, &threads[i].context);
      left -= threads[i].ended;
    }
  }
  return !left;
}

// Shared memory is poisoned. Returns 0, or an error code: -1 for a block that no GPU takes, -2 for a barrier that some
// threads never reach.
template <class... Args>
int launch(void (*kernel)(Args...), void** args, const unsigned* grid, unsigned count, unsigned bytes) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {count, 1, 1};
  alignas(16) static unsigned char memory[48 << 10];
  std::memset(memory, 0xff, sizeof memory);
  shared = memory;
  if (count > kMostThreads || count % 32 || bytes > sizeof memory) return -1;
  const std::unique_ptr<unsigned char[]> stacks(new unsigned char[(size_t)count * kStack]);
  Launch<Args...>::kernel = kernel;
  Launch<Args...>::args = args;
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        if (!run_block(Launch<Args...>::run, count, stacks.get())) return -2;
  return 0;
}
}  // namespace cpu
