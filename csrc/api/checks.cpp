// SPDX-License-Identifier: Apache-2.0
#include "checks.h"

#include <stdexcept>
#include <utility>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

namespace gdn::api {
namespace {

using torch::headeronly::ScalarType;

const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Bool: return "bool";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Short: return "int16";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::UInt32: return "uint32";
    default: return "another dtype";
  }
}

std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  return (tensor.is_cuda() ? "cuda:" : "device ") + std::to_string(static_cast<int>(tensor.get_device_index()));
}

// Plain strings, no streams: an extension must not depend on which C++ library's locale the process has set up.
std::string describe(const Tensor& tensor) {
  std::string text = std::string(dtype_name(tensor.scalar_type())) + " [";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + "] on " + device_name(tensor);
}

std::string sizes_text(std::initializer_list<int64_t> sizes) {
  std::string text;
  for (int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return text;
}

bool is_io_dtype(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

DType to_dtype(ScalarType dtype) {
  if (dtype == ScalarType::Float) return DType::kFloat32;
  return dtype == ScalarType::BFloat16 ? DType::kBFloat16 : DType::kFloat16;
}

bool has_sizes(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  if (tensor.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t i = 0;
  for (int64_t size : sizes) {
    if (tensor.size(i++) != size) return false;
  }
  return true;
}

constexpr int64_t kMaxDims = 5;   // of a tensor that an op takes

// Walking the dims from the smallest stride up, each must step over everything below it. At most kMaxDims.
bool elements_overlap(const Tensor& tensor) {
  std::pair<int64_t, int64_t> steps[kMaxDims];   // stride, size; kept sorted
  int count = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) == 0) return false;
    if (tensor.size(i) == 1) continue;
    int place = count++;
    const std::pair<int64_t, int64_t> step{tensor.stride(i), tensor.size(i)};
    for (; place > 0 && step < steps[place - 1]; --place) steps[place] = steps[place - 1];
    steps[place] = step;
  }
  int64_t extent = 0;   // offset of the last element of what has been walked
  for (int i = 0; i < count; ++i) {
    if (steps[i].first <= extent) return true;
    extent += steps[i].first * (steps[i].second - 1);
  }
  return false;
}

// Where its elements are. A tensor without any has no address, but it is given: a pool of no slots makes every row padding.
void* data_of(const Tensor& tensor) {
  alignas(16) static char nowhere[16];
  void* const data = tensor.data_ptr();
  return data == nullptr ? nowhere : data;
}

View view_of(const Tensor& tensor) {
  View view{data_of(tensor), to_dtype(tensor.scalar_type()), {0, 0, 0, 0}};
  const int64_t left_out = tensor.dim() > 4 ? tensor.dim() - 4 : 0;   // a slower fifth dim is the caller's
  for (int64_t i = left_out; i < tensor.dim(); ++i) view.stride[i - left_out] = tensor.stride(i);
  return view;
}

bool is_index_dtype(ScalarType dtype) { return dtype == ScalarType::Int || dtype == ScalarType::Long; }

IndexView index_view(const Tensor& tensor) {
  return {data_of(tensor), tensor.stride(0), tensor.scalar_type() == ScalarType::Long};
}

}  // namespace

Checker::Checker(const char* op, const char* anchor_name, const Tensor& anchor)
    : op_(op), anchor_name_(anchor_name), on_cuda_(anchor.is_cuda()), device_index_(anchor.get_device_index()) {
  require(anchor.is_cpu() || anchor.is_cuda(), anchor_name, "on a CPU or CUDA device", anchor);
}

void Checker::require(bool ok, std::string_view message) const {
  if (!ok) throw std::runtime_error(std::string(op_) + ": " + std::string(message));
}

void Checker::require(bool ok, const char* name, std::string_view accepted, const Tensor& got) const {
  if (!ok) require(false, std::string(name) + " must be " + std::string(accepted) + ", got " + describe(got));
}

void Checker::require_same_device(const char* name, const Tensor& tensor) const {
  const bool same = on_cuda_ ? tensor.is_cuda() && tensor.get_device_index() == device_index_ : tensor.is_cpu();
  if (same) return;
  const std::string device = on_cuda_ ? "cuda:" + std::to_string(device_index_) : std::string("cpu");
  require(false, name, "on " + device + " like " + anchor_name_, tensor);
}

void Checker::require_dim(const char* name, const Tensor& tensor, int64_t dim, const char* dims) const {
  require(tensor.dim() == dim, name, dims, tensor);
}

void Checker::require_same_dtype(const char* name, const Tensor& tensor, const char* other_name,
                                 const Tensor& other) const {
  if (tensor.scalar_type() == other.scalar_type()) return;
  require(false, name, std::string(dtype_name(other.scalar_type())) + " like " + other_name, tensor);
}

void Checker::require_apart(const char* name, const Tensor& written, const char* input_name,
                            const Tensor& input) const {
  const bool apart = written.numel() == 0 || written.data_ptr() != input.data_ptr();
  require(apart, name, std::string("memory of its own, not ") + input_name + "'s", written);
}

void Checker::require_dtype(const char* name, const Tensor& tensor, DType dtype) const {
  require(is_io_dtype(tensor.scalar_type()) && to_dtype(tensor.scalar_type()) == dtype, name,
          dtype == DType::kFloat32 ? "float32" : (dtype == DType::kBFloat16 ? "bfloat16" : "float16"), tensor);
}

View Checker::view(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes,
                   const char* dims) const {
  require_same_device(name, tensor);
  require(is_io_dtype(tensor.scalar_type()), name, "float32, bfloat16 or float16", tensor);
  if (!has_sizes(tensor, sizes)) {
    require(false, name, std::string(dims) + " = [" + sizes_text(sizes) + "]", tensor);
  }
  return view_of(tensor);
}

void Checker::require_no_overlap(const char* name, const Tensor& tensor) const {
  require(!elements_overlap(tensor), name, "free of elements that share memory (it is written)", tensor);
}

View Checker::pool(const char* name, const Tensor& tensor, bool is_written) const {
  require_same_device(name, tensor);
  require(is_io_dtype(tensor.scalar_type()), name, "float32, bfloat16 or float16", tensor);
  if (is_written) require_no_overlap(name, tensor);
  return view_of(tensor);
}

View Checker::view(const char* name, const OptionalTensor& tensor, std::initializer_list<int64_t> sizes,
                   const char* dims) const {
  return tensor ? view(name, *tensor, sizes, dims) : View{nullptr, DType::kFloat32, {0, 0, 0, 0}};
}

View Checker::written(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes,
                      const char* dims) const {
  const View result = view(name, tensor, sizes, dims);
  require_no_overlap(name, tensor);
  return result;
}

IndexView Checker::index(const char* name, const OptionalTensor& tensor, int64_t length) const {
  if (!tensor) return {nullptr, 0, false};
  require_same_device(name, *tensor);
  require(is_index_dtype(tensor->scalar_type()), name, "int32 or int64", *tensor);
  require(tensor->dim() == 1 && tensor->size(0) == length, name,
          "[N] = [" + std::to_string(length) + "], one entry a sequence", *tensor);
  return index_view(*tensor);
}

TableView Checker::table(const char* name, const Tensor& tensor, int64_t rows, int64_t columns) const {
  require_same_device(name, tensor);
  require(is_index_dtype(tensor.scalar_type()), name, "int32 or int64", tensor);
  const bool fits = tensor.dim() == 2 && (rows < 0 || tensor.size(0) == rows) && (columns < 0 || tensor.size(1) == columns);
  if (!fits) {
    const std::string row_text = rows < 0 ? "any" : std::to_string(rows);
    const std::string column_text = columns < 0 ? "any" : std::to_string(columns);
    require(false, name, "of shape [" + row_text + ", " + column_text + "]", tensor);
  }
  return {{data_of(tensor), tensor.stride(1), tensor.scalar_type() == ScalarType::Long}, tensor.stride(0)};
}

IndexView Checker::offsets(const OptionalTensor& cu_seqlens, int64_t total) const {
  if (!cu_seqlens) return {nullptr, 0, false};
  require_same_device("cu_seqlens", *cu_seqlens);
  require(is_index_dtype(cu_seqlens->scalar_type()), "cu_seqlens", "int32 or int64", *cu_seqlens);
  require(cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1, "cu_seqlens", "[N + 1]", *cu_seqlens);
  const IndexView offsets = index_view(*cu_seqlens);
  if (on_cuda_) return offsets;   // reading values would wait for the device; the kernels cut them to what is there
  int64_t previous = 0;
  for (int64_t n = 0; n < cu_seqlens->size(0); ++n) {
    const int64_t offset = offsets.at(n);
    if (offset < previous || offset > total) {
      require(false, "cu_seqlens must ascend within [0, " + std::to_string(total) + "], got " + std::to_string(offset) +
                         " at index " + std::to_string(n));
    }
    previous = offset;
  }
  return offsets;
}

FlagView Checker::flags(const char* name, const OptionalTensor& tensor, int64_t length) const {
  if (!tensor) return {nullptr, 0};
  require_same_device(name, *tensor);
  require(tensor->scalar_type() == ScalarType::Bool, name, "bool", *tensor);
  require(tensor->dim() == 1 && tensor->size(0) == length, name,
          "[N] = [" + std::to_string(length) + "], one entry a sequence", *tensor);
  return {static_cast<const uint8_t*>(tensor->data_ptr()), tensor->stride(0)};
}

int64_t num_sequences(const Checker& check, const OptionalTensor& cu_seqlens, int64_t B) {
  if (!cu_seqlens) return B;
  check.require(B == 1, "cu_seqlens needs one row of tokens, [1, total, ...], got " + std::to_string(B) + " rows");
  check.require(cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1, "cu_seqlens", "[N + 1]", *cu_seqlens);
  return cu_seqlens->size(0) - 1;
}

void require_pool(const Checker& check, const char* name, const Tensor& pool, bool has_slots, int64_t N) {
  if (has_slots || pool.size(0) == N) return;
  check.require(false, name, "one entry a sequence, " + std::to_string(N) + ", when slots is not given", pool);
}

void parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  torch::stable::parallel_for(begin, end, grain,
                              [&](int64_t first, int64_t last) { body(first, last, context); });
}

#if defined(CUDA_KERNEL)
void launch(const Checker& check, const char* (*op)(const void*, void*), const void* params) {
  const torch::stable::accelerator::DeviceGuard guard(check.device_index());
  void* stream = nullptr;
  const bool has_stream = aoti_torch_get_current_cuda_stream(check.device_index(), &stream) == AOTI_TORCH_SUCCESS;
  check.require(has_stream, "torch gives no current CUDA stream");
  const char* error = op(params, stream);
  check.require(error == nullptr, std::string("launch failed: ") + (error ? error : ""));
}
#endif

OptionalTensor allocate_workspace(const Tensor& anchor, int64_t bytes) {
  if (bytes == 0) return std::nullopt;
  return torch::stable::new_empty(anchor, {bytes}, torch::headeronly::ScalarType::Byte);
}

}  // namespace gdn::api
