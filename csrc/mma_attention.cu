// Attention by mma.sync, for any card with tensor cores from compute capability 7.5 on. Compile-time parameters:
// mma_attention.h.

#define INT8 0
#include "mma.h"
#include "mma_attention.h"

extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS)
    mma_attention(Element* __restrict__ out, const Element* __restrict__ q, const Element* __restrict__ k,
                  const Element* __restrict__ v, int heads, int queries, int keys, int rounds, float scale,
                  long long q_image, int q_row, int q_head, long long k_image, int k_row, int k_head, long long v_image,
                  int v_row, int v_head, long long out_image, int out_row, int out_head) {
  pdl_wait();
  const Strides of_q = {q_image, q_row, q_head}, of_k = {k_image, k_row, k_head}, of_v = {v_image, v_row, v_head};
  const Strides of_out = {out_image, out_row, out_head};
  attend(out, q, k, nullptr, v, heads, queries, keys, rounds, scale, of_q, of_k, of_v, of_out, 0);
}
