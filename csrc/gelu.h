// GELU in float32 (Hendrycks and Gimpel 2016), on any card; after elements.h.
//
// Compile-time parameters: TANH, by tanh instead of erf; COARSE, to 1e-5 of the largest value in place of 1e-5 of each:
// 8 bits need no more.

#ifndef COARSE
#define COARSE 0
#endif

__device__ __forceinline__ float gelu(float x) {
#if TANH
  // 0.5 (1 + tanh u) = 1 / (1 + exp(-2 u))
  return x / (1.f + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
#else
  // x * Phi(x), log2 of 2 Phi on the negative side by a polynomial: erff takes more time than the memory. In a product's
  // epilogue each instruction counts: x (1 - Phi(-x)) for positive x is x less what the same negative one has.
#if COARSE
  const float z = fminf(fabsf(x), 6.f);
  float log = fmaf(0.004161655006612697f, z, -0.04573538492561349f);
  log = fmaf(log, z, -0.4649305696555002f);
  log = fmaf(log, z, -1.1495669276362062f);
#else
  const float z = fminf(fabsf(x), 8.f);
  float log = fmaf(7.070178753565415e-08f, z, -3.5380496683501406e-06f);
  log = fmaf(log, z, 7.800359890097752e-05f);
  log = fmaf(log, z, -0.001010911539196968f);
  log = fmaf(log, z, 0.008718260563910007f);
  log = fmaf(log, z, -0.05423998460173607f);
  log = fmaf(log, z, -0.45830774307250977f);
  log = fmaf(log, z, -1.1512657403945923f);
#endif
  return 0.5f * fmaf(-z, exp_2(log * z), x + fabsf(x));
#endif
}
