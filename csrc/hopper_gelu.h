// GELU in float32 by Hopper's approximate instructions; after hopper.h.
//
// Compile-time parameter: TANH, by tanh instead of erf.

__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float gelu(float x) {
#if TANH
  const float u = x * fmaf(x * x, 0.044715f, 1.f);
  return x * inverse(1.f + exp_2(u * (-2.f * 0.7978845608f * 1.4426950409f)));
#else
  // x - x * Q(x), Q the upper tail of the normal distribution by Abramowitz and Stegun 7.1.26, to 1e-7
  const float s = fminf(fabsf(x), 16.f), t = inverse(fmaf(s, 0.3275911f * 0.7071067812f, 1.f));
  float p = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
  p = fmaf(p, t, 0.5f * 1.421413741f);
  p = fmaf(p, t, 0.5f * -0.284496736f);
  p = fmaf(p, t, 0.5f * 0.254829592f);
  return fmaf(-s * t * p, exp_2(x * x * (-0.5f * 1.4426950409f)), fmaxf(x, 0.f));
#endif
}
