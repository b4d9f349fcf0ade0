// SPDX-License-Identifier: Apache-2.0
// From torch tensors to views: every check of the package, with one wording:
//     op: name must be <what is accepted>, got <dtype> [shape] on <device>
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include "../common/params.h"
#include "../cpu/ops.h"

namespace gdn::api {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The checks of one call: knows the op's name, and the device that every tensor must share with the anchor.
class Checker {
 public:
  Checker(const char* op, const char* anchor_name, const Tensor& anchor);

  // Raises "op: name must be accepted, got <tensor>" unless ok.
  void require(bool ok, const char* name, std::string_view accepted, const Tensor& got) const;
  // Raises "op: message" unless ok: for what no single tensor shows.
  void require(bool ok, std::string_view message) const;

  // A float tensor of these sizes, read. `dims` names them for the message: "[B, T, Hk, K]". Missing optional: not given. Of
  // five dims the view has the last four.
  View view(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes, const char* dims) const;
  View view(const char* name, const OptionalTensor& tensor, std::initializer_list<int64_t> sizes, const char* dims) const;
  // The same, written: no two of its elements may share memory.
  View written(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes, const char* dims) const;
  // A float tensor of any sizes.
  View pool(const char* name, const Tensor& tensor, bool is_written) const;

  // int32 or int64 [length], any stride.
  IndexView index(const char* name, const OptionalTensor& tensor, int64_t length) const;
  // int32 or int64 [rows, columns], any strides; a size below 0 may be any.
  TableView table(const char* name, const Tensor& tensor, int64_t rows, int64_t columns = -1) const;
  // cu_seqlens: int32 or int64 [N + 1]. On the CPU its values are checked too: ascending, within [0, total].
  IndexView offsets(const OptionalTensor& cu_seqlens, int64_t total) const;
  // bool [length], any stride.
  FlagView flags(const char* name, const OptionalTensor& tensor, int64_t length) const;

  void require_dim(const char* name, const Tensor& tensor, int64_t dim, const char* dims) const;
  void require_same_dtype(const char* name, const Tensor& tensor, const char* other_name, const Tensor& other) const;
  void require_dtype(const char* name, const Tensor& tensor, DType dtype) const;

  // A written tensor that begins where an input begins: the backends read and write in different orders.
  void require_apart(const char* name, const Tensor& written, const char* input_name, const Tensor& input) const;
  void require_same_device(const char* name, const Tensor& tensor) const;

  bool on_cuda() const { return on_cuda_; }
  int32_t device_index() const { return device_index_; }

 private:
  void require_no_overlap(const char* name, const Tensor& tensor) const;

  const char* op_;
  const char* anchor_name_;
  bool on_cuda_;
  int32_t device_index_;
};

// N of a call: sequences of cu_seqlens, else batch rows. Raises when cu_seqlens comes with B > 1.
int64_t num_sequences(const Checker& check, const OptionalTensor& cu_seqlens, int64_t B);

// Rows and slots have to match when no slots are given: row n is slot n.
void require_pool(const Checker& check, const char* name, const Tensor& pool, bool has_slots, int64_t N);

// Runs body on the threads of torch's pool; the shape that the CPU backend asks for.
void parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);

// The CUDA side of a call: current stream of the tensors' device, error to exception.
void launch(const Checker& check, const char* (*op)(const void* params, void* stream), const void* params);

// Memory that a CUDA op needs for itself: `bytes` of it, on the tensors' device, until the call has run. None for 0.
OptionalTensor allocate_workspace(const Tensor& anchor, int64_t bytes);

// The same of an op that says what it needs; nothing on the CPU. `params` gets its address.
template <class Params, int64_t (*bytes_on_cuda)(const Params&)>
OptionalTensor add_workspace(const Checker& check, const Tensor& anchor, Params& params) {
#if defined(CUDA_KERNEL)
  if (!check.on_cuda()) return std::nullopt;
  const torch::stable::accelerator::DeviceGuard guard(check.device_index());   // sizes depend on the device that will compute
  OptionalTensor workspace = allocate_workspace(anchor, bytes_on_cuda(params));
  params.workspace = workspace ? workspace->mutable_data_ptr() : nullptr;
  return workspace;
#else
  return std::nullopt;
#endif
}

// Runs an op on the backend that holds its tensors.
template <class Params, void (*on_cpu)(const Params&, cpu::ParallelFor), const char* (*on_cuda)(const Params&, void*)>
void run(const Checker& check, const Params& params) {
  if (!check.on_cuda()) return on_cpu(params, parallel_for);
#if defined(CUDA_KERNEL)
  launch(check, [](const void* p, void* stream) { return on_cuda(*static_cast<const Params*>(p), stream); }, &params);
#else
  check.require(false, "this build has no CUDA backend; load the CUDA variant");
#endif
}

}  // namespace gdn::api
