// Backward kernels whose sums a device keeps in fp32, and a CPU in the type of 16-bit tensors.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "lending.h"

namespace emulated {

constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

// A CPU rounds the sums of a batch norm where gradient and input differ in layout; CUDA's kernels keep them in fp32
// (aten/src/ATen/native/cuda/Normalization.cuh), and cuDNN's take the two in one layout.
inline void batch_norm_backward(const c10::OperatorHandle& op, Stack* stack) {
  const auto first = stack->end() - static_cast<int64_t>(op.schema().arguments().size());
  const auto format = first[1].toTensor().suggest_memory_format();
  for (auto place : {0, 1}) first[place] = first[place].toTensor().contiguous(format);
  op.redispatchBoxed(kCpu, stack);
}

// cuDNN adds up the weight gradient of 16-bit tensors in fp32; a CPU without 16-bit instructions adds samples up in 16.
inline void convolution_backward(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const auto type = given[2].toTensor().scalar_type();
  const auto mask = given.back().toBoolList();
  if (!mask.get(1) || (type != at::kHalf && type != at::kBFloat16)) return op.redispatchBoxed(kCpu, stack);
  Stack again(given);
  for (auto place : {0, 1, 2}) again[place] = given[place].toTensor().to(at::kFloat);
  again.back() = c10::List<bool>({false, true, false});
  op.redispatchBoxed(kCpu, &again);
  stack->back() = c10::List<bool>({mask.get(0), false, mask.get(2)});
  op.redispatchBoxed(kCpu, stack);
  (*stack)[stack->size() - 2] = again[1].toTensor().to(type);
}

// Calls the CPU's kernel of the operator, with those sums in fp32.
inline void sum_in_fp32(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const auto& name = op.schema().name();
  if (name == "aten::native_batch_norm_backward") batch_norm_backward(op, stack);
  else if (name == "aten::convolution_backward") convolution_backward(op, given, stack);
  else op.redispatchBoxed(kCpu, stack);
}

}  // namespace emulated
