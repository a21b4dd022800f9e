// GELU in float32 (Hendrycks and Gimpel 2016), on any card; after elements.h.
//
// Compile-time parameter: TANH, by tanh instead of erf.

__device__ __forceinline__ float gelu(float x) {
#if TANH
  // 0.5 (1 + tanh u) = 1 / (1 + exp(-2 u))
  return x / (1.f + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
#else
  // x * Phi(x), log2 of Phi on the negative side by a polynomial, relative error 1e-5: erff takes more time than the
  // memory
  const float z = fminf(fabsf(x), 8.f);
  float log = fmaf(7.070178753565415e-08f, z, -3.5380496683501406e-06f);
  log = fmaf(log, z, 7.800359890097752e-05f);
  log = fmaf(log, z, -0.001010911539196968f);
  log = fmaf(log, z, 0.008718260563910007f);
  log = fmaf(log, z, -0.05423998460173607f);
  log = fmaf(log, z, -0.45830774307250977f);
  log = fmaf(log, z, -1.1512657403945923f);
  const float below = exp2f(fmaf(log, z, -1.f));
  return x * (x < 0.f ? below : 1.f - below);
#endif
}
