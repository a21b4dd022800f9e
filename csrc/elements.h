// Elements of tensors on any card from compute capability 7.0 on: float16, bfloat16 or float32 in memory, float32 in
// registers. No header of CUDA is needed: conversions are PTX, or integer arithmetic. csrc/cpu.h stands for the GPU if
// a C++ compiler of the host builds a kernel for its tests.

#ifdef SFAST_CPU
#include "cpu.h"
#else
#if __CUDA_ARCH__ >= 900
// With PDL a kernel starts while those in front still write what it reads: its loads must be coherent.
#define __restrict__
#endif
#define SHARED_MEMORY(Type, name)                             \
  extern __shared__ __align__(16) unsigned char name##_raw[]; \
  Type* const name = reinterpret_cast<Type*>(name##_raw)

__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

__device__ __forceinline__ unsigned short float_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

// The two float16 of a word, the lower half first.
__device__ __forceinline__ void halves_to_floats(unsigned word, float& first, float& second) {
  asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.f32.f16 %0, low;\n\tcvt.f32.f16 %1, high;\n\t}"
      : "=f"(first), "=f"(second)
      : "r"(word));
}

// PDL (hopper.h), the first statement of a kernel: lets the next kernel be scheduled and waits for those in front.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float float_of_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned bits_of_float(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float rounded_product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
__device__ __forceinline__ unsigned shuffle_xor(unsigned x, int lanes) {
  return __shfl_xor_sync(0xffffffffu, x, lanes);
}
// 2^x, for x not above 0 or small.
__device__ __forceinline__ float exp_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Whether it is so for any lane of a warp.
__device__ __forceinline__ bool any_of_warp(bool x) { return __any_sync(0xffffffffu, x); }
#endif

enum { kFloat16, kBFloat16, kFloat32 };

template <int Type>
struct Stored {
  typedef unsigned short Bits;
};
template <>
struct Stored<kFloat32> {
  typedef float Bits;
};

template <int Type>
__device__ __forceinline__ float to_float(typename Stored<Type>::Bits bits);
template <>
__device__ __forceinline__ float to_float<kFloat16>(unsigned short bits) {
  return half_to_float(bits);
}
template <>
__device__ __forceinline__ float to_float<kBFloat16>(unsigned short bits) {
  return float_of_bits((unsigned)bits << 16);
}
template <>
__device__ __forceinline__ float to_float<kFloat32>(float x) {
  return x;
}

template <int Type>
__device__ __forceinline__ typename Stored<Type>::Bits from_float(float x);
template <>
__device__ __forceinline__ unsigned short from_float<kFloat16>(float x) {
  return float_to_half(x);
}
template <>
__device__ __forceinline__ unsigned short from_float<kBFloat16>(float x) {
  // to the nearest, ties to even; NaN stays NaN
  const unsigned bits = bits_of_float(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <>
__device__ __forceinline__ float from_float<kFloat32>(float x) {
  return x;
}

template <int Type>
__device__ __forceinline__ void to_floats(unsigned word, float& first, float& second);
template <>
__device__ __forceinline__ void to_floats<kFloat16>(unsigned word, float& first, float& second) {
  halves_to_floats(word, first, second);
}
template <>
__device__ __forceinline__ void to_floats<kBFloat16>(unsigned word, float& first, float& second) {
  first = float_of_bits(word << 16);
  second = float_of_bits(word & 0xffff0000);
}

// Rounds two elements at once, which Ampere and later do in one instruction.
template <int Type>
__device__ __forceinline__ unsigned pair_of(float first, float second) {
#if __CUDA_ARCH__ >= 800
  unsigned bits;
  if (Type == kFloat16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
#else
  return (unsigned)from_float<Type>(first) | (unsigned)from_float<Type>(second) << 16;
#endif
}

// `Count` elements that one thread loads or stores at once: 16 bytes at most in one access, aligned to them. Elements of
// two bytes are kept in pairs: to take one out of its word would cost as much as its conversion.
template <int Type, int Count, bool Paired = sizeof(typename Stored<Type>::Bits) == 2 && Count % 2 == 0>
struct alignas(Count * sizeof(typename Stored<Type>::Bits) < 16 ? Count * sizeof(typename Stored<Type>::Bits) : 16) Pack {
  typename Stored<Type>::Bits of[Count];

  __device__ __forceinline__ void to(float (&values)[Count]) const {
#pragma unroll
    for (int i = 0; i < Count; ++i) values[i] = to_float<Type>(of[i]);
  }

  __device__ __forceinline__ void from(const float (&values)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; ++i) of[i] = from_float<Type>(values[i]);
  }
};
template <int Type, int Count>
struct alignas(Count * 2 < 16 ? Count * 2 : 16) Pack<Type, Count, true> {
  unsigned pairs[Count / 2];

  __device__ __forceinline__ void to(float (&values)[Count]) const {
#pragma unroll
    for (int i = 0; i < Count; i += 2) to_floats<Type>(pairs[i / 2], values[i], values[i + 1]);
  }

  __device__ __forceinline__ void from(const float (&values)[Count]) {
#pragma unroll
    for (int i = 0; i < Count; i += 2) pairs[i / 2] = pair_of<Type>(values[i], values[i + 1]);
  }
};

// Loads without conversion: what is loaded long before its use takes half of the registers so.
template <int Type, int Count>
__device__ __forceinline__ void load(const typename Stored<Type>::Bits* from, Pack<Type, Count>& to) {
  to = *reinterpret_cast<const Pack<Type, Count>*>(from);
}

template <int Type, int Count>
__device__ __forceinline__ void load(const typename Stored<Type>::Bits* from, float (&to)[Count]) {
  reinterpret_cast<const Pack<Type, Count>*>(from)->to(to);
}

template <int Type, int Count>
__device__ __forceinline__ void store(typename Stored<Type>::Bits* to, const float (&from)[Count]) {
  Pack<Type, Count> pack;
  pack.from(from);
  *reinterpret_cast<Pack<Type, Count>*>(to) = pack;
}

// Rounds to a type and back.
template <int Type>
__device__ __forceinline__ float rounded(float x) {
  return to_float<Type>(from_float<Type>(x));
}

// The sum over so many neighbouring threads of a warp, a power of 2, in each of them.
template <int Lanes>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int lanes = Lanes / 2; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}
