// Stands for the GPU if a C++ compiler of the host builds a kernel, for tests: threads of a block take turns on one
// thread of the host, each until it meets the others, blocks one after the other. Threads of a warp meet at a shuffle,
// those of a block at __syncthreads, which must be reached by all of them, as on a GPU: it is an error if they are not.
// From one meeting to the next they go in ascending order and in descending order by turns, so that what is read next to
// who writes it shows.

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static
#define SHARED_MEMORY(Type, name) Type* const name = reinterpret_cast<Type*>(cpu::shared)

struct cpu_index {
  unsigned x, y, z;
};
static cpu_index threadIdx, blockIdx, blockDim, gridDim;

namespace cpu {
enum State { READY, IN_WARP, IN_BLOCK, ENDED };
struct Thread {
  ucontext_t begun;
  jmp_buf left;
  State state;
  bool started;
  alignas(16) unsigned char stack[64 << 10];
};
static Thread threads[1024];
static ucontext_t caller;
static jmp_buf back;
static unsigned char* shared;
static float lanes[1024];

// A thread lets others go on until all have come as far.
inline void barrier_wait(State where) {
  Thread& me = threads[threadIdx.x];
  me.state = where;
  if (!_setjmp(me.left)) _longjmp(back, 1);
}
}  // namespace cpu

inline void __syncthreads() { cpu::barrier_wait(cpu::IN_BLOCK); }

inline void __syncwarp() { cpu::barrier_wait(cpu::IN_WARP); }

inline void __threadfence() {}

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
  cpu::barrier_wait(cpu::IN_WARP);
  const float theirs = cpu::lanes[me ^ (unsigned)lanes];
  cpu::barrier_wait(cpu::IN_WARP);
  return theirs;
}

inline unsigned shuffle_xor(unsigned x, int lanes) { return bits_of_float(shuffle_xor(float_of_bits(x), lanes)); }

inline bool any_of_warp(bool x) {
  unsigned any = x;
  for (int lanes = 16; lanes > 0; lanes /= 2) any |= shuffle_xor(any, lanes);
  return any;
}

inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return (unsigned long long)((unsigned __int128)x * y >> 64);
}

// by itself, not with an addition behind it
inline float rounded_product(float x, float y) {
  volatile const float product = x * y;
  return product;
}

inline float exp_2(float x) { return std::exp2(x); }
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
    threads[threadIdx.x].state = ENDED;
    _longjmp(back, 1);
  }
};
template <class... Args>
void (*Launch<Args...>::kernel)(Args...);
template <class... Args>
void** Launch<Args...>::args;

inline void go_on(unsigned number) {
  Thread& thread = threads[number];
  threadIdx = {number, 0, 0};
  if (_setjmp(back)) return;
  if (thread.started) _longjmp(thread.left, 1);
  thread.started = true;
  swapcontext(&caller, &thread.begun);
}

// Lets threads that may go on do so, until all of them are in one state; false if they come to different ones.
inline bool advance(unsigned first, unsigned count, bool descending, State& state) {
  for (unsigned i = 0; i < count; ++i) go_on(first + (descending ? count - 1 - i : i));
  state = threads[first].state;
  for (unsigned i = 0; i < count; ++i)
    if (threads[first + i].state != state) return false;
  return true;
}

inline bool run_block(unsigned count, bool descending) {
  State state = READY;
  while (state != ENDED) {
    bool in_warps = descending;
    for (unsigned i = 0; i < count; i += 32) {
      State reached;
      do {
        if (!advance(descending ? count - 32 - i : i, 32, in_warps, reached)) return false;
        in_warps = !in_warps;
      } while (reached == IN_WARP);
      if (i && reached != state) return false;
      state = reached;
    }
    descending = !descending;
  }
  return true;
}

// Shared memory is poisoned. Returns 0, or an error code: -1 for a block that no GPU takes, -2 if threads of a block
// or a warp wait for others that have ended or wait elsewhere.
template <class... Args>
int launch(void (*kernel)(Args...), void** args, const unsigned* grid, unsigned count, unsigned bytes) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {count, 1, 1};
  alignas(16) static unsigned char memory[163 << 10];
  std::memset(memory, 0xff, sizeof memory);
  shared = memory;
  if (count > 1024 || count % 32 || bytes > sizeof memory) return -1;
  Launch<Args...>::kernel = kernel;
  Launch<Args...>::args = args;
  bool descending = false;
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = {x, y, z};
        for (unsigned number = 0; number < count; ++number) {
          Thread& thread = threads[number];
          getcontext(&thread.begun);
          thread.begun.uc_stack.ss_sp = thread.stack;
          thread.begun.uc_stack.ss_size = sizeof thread.stack;
          makecontext(&thread.begun, Launch<Args...>::run, 0);
          thread.state = READY;
          thread.started = false;
        }
        if (!run_block(count, descending)) return -2;
        descending = !descending;
      }
  return 0;
}
}  // namespace cpu
