// Attention by mma.sync whose products of queries and keys are of 8-bit integers, for any card with tensor cores from
// compute capability 7.5 on; the keys by quantise_keys.cu. Compile-time parameters: mma_attention.h.

#define INT8 1
#define ONCE 0
#include "mma.h"
#include "quantise.h"
#include "mma_attention.h"

// k: (images, heads, keys, kDepth), dense; factors: (images, heads, key_factors), of which as many are loaded as stages
// hold.
extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    mma_attention8(Element* __restrict__ out, const Element* __restrict__ q, const signed char* __restrict__ k,
                   const float* __restrict__ factors, const Element* __restrict__ v, int heads, int queries, int keys,
                   int key_factors, float scale, long long q_image, int q_row, int q_head, long long v_image, int v_row,
                   int v_head, long long out_image, int out_row, int out_head) {
  pdl_wait();
  const Strides of_q = {q_image, q_row, q_head}, of_v = {v_image, v_row, v_head};
  const Strides of_k = {(long long)heads * keys * kDepth, kDepth, keys * kDepth};
  const Strides of_out = {out_image, out_row, out_head};
  attend(out, q, k, factors, v, heads, queries, keys, 1, scale, of_q, of_k, of_v, of_out, key_factors);
}
