// sfast_ext::linear_add: x @ weight.T + bias + residual as one cuBLASLt product.
//
// PyTorch's addmm adds either a bias or a matrix; cuBLASLt adds both while the sums are still in fp32 registers
// (beta = 1 with C = residual, and the bias in the epilogue), so the residual costs no pass of its own over memory
// and the result is rounded once.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Optional.h>
#include <torch/library.h>

#include <cublasLt.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace {

// what PyTorch itself allows cuBLASLt on Hopper; an algorithm that needs less gets less
constexpr size_t kWorkspaceLimit = size_t(32) << 20;

// alignments over this make no difference to cuBLASLt, and fewer keys mean fewer searches
constexpr uint64_t kMostAligned = 256;

// Numbers in messages by std::to_string: where the compiler brings a libstdc++ of its own, a stream of this library
// would look for its locale in torch's.
std::string words(at::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(sizes[i]);
  }
  return text + "]";
}

#define SFAST_CUBLAS_CHECK(call)                                                                \
  do {                                                                                          \
    const cublasStatus_t status_ = (call);                                                      \
    TORCH_CHECK(status_ == CUBLAS_STATUS_SUCCESS, "linear_add: ", #call, " returned ", std::to_string(int(status_))); \
  } while (0)

struct Destroy {
  void operator()(cublasLtMatmulDescOpaque_t* it) const { cublasLtMatmulDescDestroy(it); }
  void operator()(cublasLtMatrixLayoutOpaque_t* it) const { cublasLtMatrixLayoutDestroy(it); }
  void operator()(cublasLtMatmulPreferenceOpaque_t* it) const { cublasLtMatmulPreferenceDestroy(it); }
};
using Description = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy>;
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy>;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy>;

// A row-major matrix whose rows lie `stride` elements apart.
struct Rows {
  at::Tensor tensor;  // keeps the memory
  int64_t stride;

  const void* data() const { return tensor.data_ptr(); }
};

struct Algorithm {
  bool found;
  cublasLtMatmulAlgo_t algo;
  size_t workspace;
};

// device, M, N, K, dtype, bias?, row strides of x, weight, residual, and the alignments of the five pointers
using Key = std::array<int64_t, 14>;

// One handle for each device: cuBLASLt's are thread-safe, and belong to no stream. Never destroyed: at the end of
// the process the driver may be gone before any destructor of ours runs.
cublasLtHandle_t handle_of(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto& handles = *new std::map<c10::DeviceIndex, cublasLtHandle_t>();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = handles.find(device);
  if (known != handles.end()) {
    return known->second;
  }
  // what a new handle allocates would break a capture that is under way
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  cublasLtHandle_t handle = nullptr;
  SFAST_CUBLAS_CHECK(cublasLtCreate(&handle));
  handles.emplace(device, handle);
  return handle;
}

// The stride between rows of `x` read as (rows, columns); none where its rows do not lie evenly.
std::optional<int64_t> even_rows(const at::Tensor& x) {
  const int64_t columns = x.size(-1);
  if (columns > 1 && x.stride(-1) != 1) {
    return std::nullopt;
  }
  int64_t stride = 0, rows = 1;  // of the dimensions seen so far, from the last but one on
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) {
      continue;
    }
    if (rows == 1) {
      stride = x.stride(d);
    } else if (x.stride(d) != stride * rows) {
      return std::nullopt;
    }
    rows *= x.size(d);
  }
  if (rows == 1) {
    return columns;
  }
  // an expanded or overlapping matrix is none to cuBLASLt
  return stride >= columns ? std::optional<int64_t>(stride) : std::nullopt;
}

Rows as_rows(const at::Tensor& x) {
  const auto stride = even_rows(x);
  return stride ? Rows{x, *stride} : Rows{x.contiguous(), x.size(-1)};
}

uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  uint64_t found = kMostAligned;
  while (address % found != 0) {
    found /= 2;
  }
  return static_cast<uint32_t>(found);
}

Layout layout(cudaDataType_t type, int64_t rows, int64_t columns, int64_t stride) {
  cublasLtMatrixLayout_t it = nullptr;
  SFAST_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(
      &it, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), stride));
  return Layout(it);
}

template <typename Value>
void set(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute, Value value) {
  SFAST_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(description, attribute, &value, sizeof(value)));
}

template <typename Value>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
  SFAST_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

Algorithm search(
    cublasLtHandle_t handle,
    cublasLtMatmulDesc_t description,
    cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b,
    cublasLtMatrixLayout_t c,
    cublasLtMatrixLayout_t d,
    const std::array<uint32_t, 4>& aligned) {
  cublasLtMatmulPreference_t made = nullptr;
  SFAST_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&made));
  const Preference preference(made);
  set(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceLimit);
  // partial sums of a split K stay in fp32: the other schemes round them to the type of the result
  set(made, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned[0]);
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned[1]);
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned[2]);
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned[3]);
  cublasLtMatmulHeuristicResult_t result = {};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, description, a, b, c, d, made, 1, &result, &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) {
    return {false, {}, 0};
  }
  TORCH_CHECK(
      status == CUBLAS_STATUS_SUCCESS, "linear_add: cublasLtMatmulAlgoGetHeuristic returned ",
      std::to_string(int(status)));
  const bool found = count > 0 && result.state == CUBLAS_STATUS_SUCCESS;
  return {found, result.algo, found ? result.workspaceSize : 0};
}

// x (..., K), weight (N, K), bias (N) or none, residual (..., N) -> a new contiguous (..., N).
at::Tensor linear_add(
    const at::Tensor& x,
    const at::Tensor& weight,
    const c10::optional<at::Tensor>& bias,  // std::optional by another name, but for torch before 2.4
    const at::Tensor& residual) {
  const bool biased = bias.has_value() && bias->defined();
  const auto dtype = x.scalar_type();
  TORCH_CHECK(x.is_cuda(), "linear_add: x is on ", x.device().str(), ", not on a GPU");
  TORCH_CHECK(
      dtype == at::kHalf || dtype == at::kBFloat16, "linear_add: takes float16 and bfloat16, not ", dtype);
  TORCH_CHECK(
      weight.scalar_type() == dtype && residual.scalar_type() == dtype &&
          (!biased || bias->scalar_type() == dtype),
      "linear_add: x is ", dtype, "; weight, bias and residual must be so too");
  TORCH_CHECK(
      weight.device() == x.device() && residual.device() == x.device() &&
          (!biased || bias->device() == x.device()),
      "linear_add: x is on ", x.device().str(), "; weight, bias and residual must be there too");
  TORCH_CHECK(weight.dim() == 2, "linear_add: weight has ", std::to_string(weight.dim()), " dimensions, not 2");
  const int64_t n = weight.size(0), k = weight.size(1);
  TORCH_CHECK(
      x.dim() >= 1 && x.size(-1) == k, "linear_add: x is ", words(x.sizes()), ", weight ",
      words(weight.sizes()));
  TORCH_CHECK(
      !biased || (bias->dim() == 1 && bias->size(0) == n), "linear_add: bias is not (", std::to_string(n), ")");
  auto size = x.sizes().vec();
  size.back() = n;
  TORCH_CHECK(
      residual.sizes() == c10::IntArrayRef(size), "linear_add: residual is ", words(residual.sizes()), ", not ",
      words(size));

  const c10::cuda::CUDAGuard guard(x.device());
  if (residual.numel() == 0) {
    return at::empty(size, x.options());
  }
  if (k == 0) {
    return biased ? residual.add(*bias).contiguous() : residual.clone(at::MemoryFormat::Contiguous);
  }
  const int64_t m = residual.numel() / n;
  const Rows input = as_rows(x), matrix = as_rows(weight), added = as_rows(residual);
  const at::Tensor vector = biased ? bias->contiguous() : at::Tensor();
  at::Tensor out = at::empty(size, x.options());

  // cuBLASLt's matrices are column-major, and a row-major matrix read so is its transpose. In its terms this is
  // out.T (N, M) = weight (N, K) @ x.T (K, M) + residual.T (N, M), with the bias along the N rows.
  const auto type = dtype == at::kHalf ? CUDA_R_16F : CUDA_R_16BF;
  cublasLtMatmulDesc_t made = nullptr;
  SFAST_CUBLAS_CHECK(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const Description description(made);
  set(made, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);  // weight as it lies is (K, N)
  set(made, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);  // x as it lies is (K, M)
  if (biased) {
    set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    // set before the search: its alignment is part of the question
    set(made, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(vector.data_ptr()));
  }
  const Layout a = layout(type, k, n, matrix.stride);
  const Layout b = layout(type, k, m, input.stride);
  const Layout c = layout(type, n, m, added.stride);
  const Layout d = layout(type, n, m, n);

  const auto device = x.device().index();
  const cublasLtHandle_t handle = handle_of(device);
  const std::array<uint32_t, 4> aligned = {
      alignment(matrix.data()), alignment(input.data()), alignment(added.data()), alignment(out.data_ptr())};
  const Key key = {
      device, m, n, k, static_cast<int64_t>(dtype), biased, input.stride, matrix.stride, added.stride,
      aligned[0], aligned[1], aligned[2], aligned[3], biased ? alignment(vector.data_ptr()) : 0};
  static std::mutex mutex;
  static auto& algorithms = *new std::map<Key, Algorithm>();
  Algorithm chosen;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    auto known = algorithms.find(key);
    if (known == algorithms.end()) {
      const Algorithm found = search(handle, made, a.get(), b.get(), c.get(), d.get(), aligned);
      known = algorithms.emplace(key, found).first;
    }
    chosen = known->second;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      chosen.found, "linear_add: cuBLASLt has no algorithm for M, N, K = ", words({m, n, k}), " in ", dtype);

  // From the caching allocator, like any temporary: in a capture it is the graph's, else this stream's.
  at::Tensor workspace;
  if (chosen.workspace > 0) {
    workspace = at::empty({static_cast<int64_t>(chosen.workspace)}, x.options().dtype(at::kByte));
  }
  const float one = 1.0f;
  SFAST_CUBLAS_CHECK(cublasLtMatmul(
      handle, made, &one, matrix.data(), a.get(), input.data(), b.get(), &one, added.data(), c.get(),
      out.data_ptr(), d.get(), &chosen.algo, chosen.workspace > 0 ? workspace.data_ptr() : nullptr,
      chosen.workspace, c10::cuda::getCurrentCUDAStream(device)));
  return out;
}

}  // namespace

TORCH_LIBRARY(sfast_ext, library) {
  library.def("linear_add(Tensor x, Tensor weight, Tensor? bias, Tensor residual) -> Tensor");
}

TORCH_LIBRARY_IMPL(sfast_ext, CUDA, library) {
  library.impl("linear_add", &linear_add);
}
