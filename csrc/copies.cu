// Copies several tensors in one launch: a call's inputs to the static inputs of a CUDA graph.
//
// Compile-time parameter: CAPACITY, the capacity of the table.

struct Copy {
  char* to;
  const char* from;
  long long bytes;
};

struct Copies {
  Copy of[CAPACITY];
};

template <typename Word>
__device__ void copy(const Copy& one) {
  const long long words = one.bytes / sizeof(Word), stride = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < words; i += stride)
    ((Word*)one.to)[i] = ((const Word*)one.from)[i];
}

// blockIdx.y selects the tensor, blockIdx.x strides over its words; bytes = 0 copies nothing.
extern "C" __global__ void copies(const __grid_constant__ Copies copies) {
  const Copy one = copies.of[blockIdx.y];
  const unsigned long long all = (unsigned long long)one.to | (unsigned long long)one.from | one.bytes;
  if (all % 16 == 0)
    copy<uint4>(one);
  else if (all % 4 == 0)
    copy<unsigned>(one);
  else
    copy<char>(one);
}
