// Kernels whose sums and statistics a device keeps in fp32, and a CPU in the type of 16-bit tensors; and those that give
// equal elements equal results on a device, and on a CPU where both are in vectors or both are not.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include "lending.h"

namespace emulated {

constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

inline bool is_short(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  const auto type = value.toTensor().scalar_type();
  return type == at::kHalf || type == at::kBFloat16;
}

// CUDA's kernels of norms compute in fp32 and keep statistics in it (aten/src/ATen/native/cuda/Normalization.cuh and
// layer_norm_kernel.cu); a CPU rounds the statistics, and the sums of a gradient, to 16 bits.
inline void norm_in_fp32(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const auto& name = op.schema().name();
  const bool backward = name.find("backward") != std::string::npos;
  const auto& input = given[backward ? 1 : 0].toTensor();
  Stack wide(given);
  bool any = false;
  for (auto& value : wide) {
    if (!is_short(value)) continue;
    any = true;
    value = value.toTensor().to(at::kFloat);
  }
  if (!any) return op.redispatchBoxed(kCpu, stack);
  const Stack before(wide);
  op.redispatchBoxed(kCpu, &wide);
  if (!backward && name == "aten::native_batch_norm") {
    for (auto place : {3, 4}) {  // running statistics, updated in place
      if (is_short(given[place])) given[place].toTensor().copy_(before[place].toTensor());
    }
  }
  const size_t weight = name == "aten::native_batch_norm_backward" ? 2 : name == "aten::native_layer_norm_backward" ? 5 : 4;
  for (size_t place = 0; place < wide.size(); place++) {
    const auto& made = wide[place].toTensor();
    if (!made.defined() || (!backward && place > 0)) continue;
    const bool of_weight = backward && place > 0 && given[weight].isTensor() && given[weight].toTensor().defined();
    wide[place] = made.to(of_weight ? given[weight].toTensor().scalar_type() : input.scalar_type());
  }
  torch::jit::drop(*stack, given.size());
  for (auto& made : wide) stack->push_back(std::move(made));
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

// CUDA's kernels of these compute 16-bit numbers in fp32. The CPU's of glu in forward mode has none of them, and those of
// logit round their bounds.
template <at::ScalarType Wide>
void computed_in(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const auto narrow = std::find_if(given.begin(), given.end(), is_short);
  if (narrow == given.end()) return op.redispatchBoxed(kCpu, stack);
  const auto type = narrow->toTensor().scalar_type();
  const bool mixed = std::any_of(given.begin(), given.end(), [type](const auto& one) {
    return one.isTensor() && one.toTensor().defined() && one.toTensor().scalar_type() != type;
  });
  if (mixed) return op.redispatchBoxed(kCpu, stack);
  Stack wide(given);
  for (auto& value : wide) {
    if (is_short(value)) value = value.toTensor().to(Wide);
  }
  op.redispatchBoxed(kCpu, &wide);
  torch::jit::drop(*stack, given.size());
  const auto result = wide[0].toTensor();
  const bool into = op.schema().arguments().back().is_out(), in_place = op.schema().name().back() == '_';
  if (!into && !in_place) return stack->push_back(result.to(type));
  const auto written = into ? given.back().toTensor() : given[0].toTensor();
  if (into && written.sizes() != result.sizes()) written.resize_(result.sizes());
  stack->push_back(written.copy_(result));
}

// The kernels of a device are the same for each element, those of a CPU for each that is in no vector: so all operands are
// given gaps. BinaryRemainderKernel.cu calls fmod, which is exact, and erf and rsqrt are those of CUDA's library in fp32,
// good to 2 units in the last place. ActivationSoftshrinkKernel.cu rounds lambda to the type, forward and backward.
inline const std::unordered_set<std::string>& alike_in_all_places() {
  static const std::unordered_set<std::string> names = {
      "aten::elu_backward", "aten::erf", "aten::erf_", "aten::fmod", "aten::gelu", "aten::hardswish_backward",
      "aten::hardtanh_backward", "aten::logit_backward", "aten::remainder", "aten::rsqrt", "aten::rsqrt_",
      "aten::softshrink", "aten::softshrink_backward"};
  return names;
}

inline bool is_computed_in_double(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::erf", "aten::erf_", "aten::fmod", "aten::remainder", "aten::rsqrt", "aten::rsqrt_"};
  return names.count(name);
}

inline void element_by_element(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const auto& name = op.schema().name();
  if (is_computed_in_double(name)) return computed_in<at::kDouble>(op, given, stack);
  Stack apart(given);
  for (size_t place = 0; place < apart.size(); place++) {
    if (apart[place].isScalar() && name.rfind("aten::softshrink", 0) == 0)
      apart[place] = at::scalar_tensor(apart[place].toScalar(), given[0].toTensor().scalar_type()).item();
    if (!apart[place].isTensor() || op.schema().arguments()[place].is_out()) continue;
    auto operand = apart[place].toTensor();
    if (name == "aten::logit_backward" && is_short(apart[place])) operand = operand.to(at::kFloat);
    apart[place] = at::stack({operand, operand}, -1).select(-1, 0);
  }
  op.redispatchBoxed(kCpu, &apart);
  torch::jit::drop(*stack, given.size());
  const auto result = apart[0].toTensor();
  if (given.back().isTensor() && op.schema().arguments().back().is_out()) stack->push_back(result);
  else stack->push_back(at::empty_like(given[0].toTensor()).copy_(result));
}

// A CPU rounds a multiple to 16 bits before it adds it, where it takes elements one by one.
inline void add_a_multiple(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const bool with_factor = given.size() > 2 && given[2].isScalar() && !given[2].toScalar().equal(1);
  with_factor ? computed_in<at::kFloat>(op, given, stack) : op.redispatchBoxed(kCpu, stack);
}

// oneDNN, which a CPU takes for large bfloat16 products, knows no alpha of 0.
inline void product_of_a_device(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const bool without = given.size() > 4 && given[4].isScalar() && given[4].toScalar().equal(0);
  without ? computed_in<at::kFloat>(op, given, stack) : op.redispatchBoxed(kCpu, stack);
}

// A CPU keeps the sum over each of several dimensions in 16 bits.
inline void nansum(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  given[3].isNone() ? computed_in<at::kFloat>(op, given, stack) : op.redispatchBoxed(kCpu, stack);
}

// Calls the CPU's kernel of the operator, with those sums in fp32 and those elements alike.
inline void as_a_device(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const auto& name = op.schema().name();
  if (name.rfind("aten::native_", 0) == 0 && name.find("_norm") != std::string::npos) norm_in_fp32(op, given, stack);
  else if (name == "aten::convolution_backward") convolution_backward(op, given, stack);
  else if (alike_in_all_places().count(name)) element_by_element(op, given, stack);
  else op.redispatchBoxed(kCpu, stack);
}

}  // namespace emulated
