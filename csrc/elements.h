// Elements of tensors on any card from compute capability 7.0 on: float16, bfloat16 or float32 in memory, float32 in
// registers. No header of CUDA is needed: conversions are PTX, or integer arithmetic. csrc/cpu.h stands for the GPU where
// a C++ compiler of the host builds a kernel for its tests.

#ifdef SFAST_CPU
#include "cpu.h"
#else
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

__device__ __forceinline__ float float_of_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned bits_of_float(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float rounded_product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
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

// `Count` elements that one thread loads or stores at once: 16 bytes at most in one access, aligned to them.
template <int Type, int Count>
struct alignas(Count * sizeof(typename Stored<Type>::Bits) < 16 ? Count * sizeof(typename Stored<Type>::Bits) : 16) Pack {
  typename Stored<Type>::Bits of[Count];
};

template <int Type, int Count>
__device__ __forceinline__ void unpack(const Pack<Type, Count>& pack, float (&to)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) to[i] = to_float<Type>(pack.of[i]);
}

// Loads without conversion: what is loaded long before its use takes half of the registers so.
template <int Type, int Count>
__device__ __forceinline__ void load(const typename Stored<Type>::Bits* from, Pack<Type, Count>& to) {
  to = *reinterpret_cast<const Pack<Type, Count>*>(from);
}

template <int Type, int Count>
__device__ __forceinline__ void load(const typename Stored<Type>::Bits* from, float (&to)[Count]) {
  unpack(*reinterpret_cast<const Pack<Type, Count>*>(from), to);
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

template <int Type, int Count>
__device__ __forceinline__ Pack<Type, Count> packed(const float (&from)[Count]) {
  Pack<Type, Count> pack;
  if constexpr (sizeof(typename Stored<Type>::Bits) == 2 && Count % 2 == 0) {
#pragma unroll
    for (int i = 0; i < Count; i += 2) {
      const unsigned bits = pair_of<Type>(from[i], from[i + 1]);
      pack.of[i] = (unsigned short)bits;
      pack.of[i + 1] = (unsigned short)(bits >> 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) pack.of[i] = from_float<Type>(from[i]);
  }
  return pack;
}

template <int Type, int Count>
__device__ __forceinline__ void store(typename Stored<Type>::Bits* to, const float (&from)[Count]) {
  *reinterpret_cast<Pack<Type, Count>*>(to) = packed<Type>(from);
}

// Rounds to a type and back.
template <int Type>
__device__ __forceinline__ float rounded(float x) {
  return to_float<Type>(from_float<Type>(x));
}

// The sum over the threads of a warp, in each of them.
__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}
