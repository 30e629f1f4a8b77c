// What CUDA computes by kernels of its own, written out in operators of the CPU.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <limits>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "attention.h"
#include "lending.h"
#include "sums.h"

namespace emulated {

using Written = std::function<std::vector<Tensor>(const Arguments&)>;

inline Tensor operand(const Arguments& given, size_t place) {
  return given[place].isTensor() ? given[place].toTensor() : Tensor();
}

// The result of a softmax of a 16-bit tensor is fp32 on CUDA where it is asked to be; a CPU casts before.
template <class Softmax>
Written widened(Softmax softmax) {
  return [softmax](const Arguments& given) -> std::vector<Tensor> {
    auto input = operand(given, 0);
    if (given[2].toBool()) input = input.to(at::kFloat);
    return {softmax(input, given[1].toInt(), false)};
  };
}

template <class Backward>
Written narrowed(Backward backward) {
  return [backward](const Arguments& given) -> std::vector<Tensor> {
    auto gradient = operand(given, 0);
    auto made = backward(gradient, operand(given, 1), given[2].toInt(), gradient.scalar_type());
    return {made.to(given[3].toScalarType())};
  };
}

inline std::vector<Tensor> gru_cell(const Arguments& given) {
  auto input = operand(given, 0), hidden = operand(given, 1), before = operand(given, 2);
  if (operand(given, 3).defined()) input = input + operand(given, 3), hidden = hidden + operand(given, 4);
  auto i = input.tensor_split(3, 1), h = hidden.tensor_split(3, 1);
  auto reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid(), fresh = (i[2] + reset * h[2]).tanh();
  return {fresh + update * (before - fresh), at::cat({reset, update, fresh, before, h[2]}, 1)};
}

inline std::vector<Tensor> gru_cell_backward(const Arguments& given) {
  auto slope = operand(given, 0).to(at::kFloat), kept = operand(given, 1);
  auto k = kept.to(at::kFloat).tensor_split(5, 1);
  auto reset = k[0], update = k[1], fresh = k[2], before = k[3], hidden = k[4];
  auto d_fresh = slope * (1 - update) * (1 - fresh * fresh);
  auto d_update = slope * (before - fresh) * update * (1 - update);
  auto d_reset = d_fresh * hidden * reset * (1 - reset);
  auto d_input = at::cat({d_reset, d_update, d_fresh}, 1).to(kept.scalar_type());
  auto d_hidden = at::cat({d_reset, d_update, d_fresh * reset}, 1).to(kept.scalar_type());
  auto d_before = (slope * update).to(kept.scalar_type());
  if (!given[2].toBool()) return {d_input, d_hidden, d_before, Tensor(), Tensor()};
  return {d_input, d_hidden, d_before, d_input.sum(0), d_hidden.sum(0)};
}

inline std::vector<Tensor> lstm_cell(const Arguments& given) {
  auto input = operand(given, 0), hidden = operand(given, 1), before = operand(given, 2);
  if (operand(given, 3).defined()) input = input + operand(given, 3), hidden = hidden + operand(given, 4);
  auto gates = (input + hidden).tensor_split(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto after = forget * before + in * cell;
  return {out * after.tanh(), after, at::cat({in, forget, cell, out}, 1)};
}

inline std::vector<Tensor> lstm_cell_backward(const Arguments& given) {
  auto before = operand(given, 2), after = operand(given, 3), kept = operand(given, 4);
  auto d_out = operand(given, 0).defined() ? operand(given, 0).to(at::kFloat) : at::zeros_like(after, at::kFloat);
  auto d_after = operand(given, 1).defined() ? operand(given, 1).to(at::kFloat) : at::zeros_like(after, at::kFloat);
  auto k = kept.to(at::kFloat).tensor_split(4, 1);
  auto in = k[0], forget = k[1], cell = k[2], out = k[3], squashed = after.to(at::kFloat).tanh();
  d_after = d_out * out * (1 - squashed * squashed) + d_after;
  auto gates = at::cat({d_after * cell * in * (1 - in), d_after * before.to(at::kFloat) * forget * (1 - forget),
                        d_after * in * (1 - cell * cell), d_out * squashed * out * (1 - out)}, 1);
  gates = gates.to(kept.scalar_type());
  auto d_before = (d_after * forget).to(before.scalar_type());
  return {gates, d_before, given[5].toBool() ? gates.sum(0) : Tensor()};
}

// Gradients from results, each step rounded to the type: aten/src/ATen/native/cuda/BinaryMiscBackwardOpsKernels.cu
inline std::vector<Tensor> tanh_backward(const Arguments& given) {
  const auto result = operand(given, 1);
  return {operand(given, 0) * (1 - result * result)};
}

inline std::vector<Tensor> sigmoid_backward(const Arguments& given) {
  const auto result = operand(given, 1);
  return {operand(given, 0) * (1 - result) * result};
}

inline std::vector<Tensor> depthwise(const Arguments& given) {
  auto input = operand(given, 0);
  std::optional<Tensor> bias;
  if (operand(given, 3).defined()) bias = operand(given, 3);
  std::vector<int64_t> none(input.dim() - 2, 0);
  return {at::convolution(input, operand(given, 1), bias, given[4].toIntVector(), given[5].toIntVector(),
                          given[6].toIntVector(), false, none, input.size(1))};
}

inline const std::unordered_map<std::string, Written>& written() {
  static const std::unordered_map<std::string, Written> table = {
      {"aten::_softmax", widened([](auto&&... a) { return at::_softmax(a...); })},
      {"aten::_log_softmax", widened([](auto&&... a) { return at::_log_softmax(a...); })},
      {"aten::_softmax_backward_data", narrowed([](auto&&... a) { return at::_softmax_backward_data(a...); })},
      {"aten::_log_softmax_backward_data", narrowed([](auto&&... a) { return at::_log_softmax_backward_data(a...); })},
      {"aten::_thnn_fused_gru_cell", gru_cell},
      {"aten::_thnn_fused_gru_cell_backward", gru_cell_backward},
      {"aten::_thnn_fused_lstm_cell", lstm_cell},
      {"aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
      {"aten::tanh_backward", tanh_backward},
      {"aten::sigmoid_backward", sigmoid_backward},
      {"aten::_conv_depthwise2d", depthwise},
      {"aten::conv_depthwise3d", depthwise},
  };
  return table;
}

// --- Gradient scaling: aten/src/ATen/native/cuda/AmpKernels.cu

// CUDA asks a float whether it is finite, also where the gradient is a double.
inline void check_and_unscale(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  auto flag = given[1].toTensor();
  for (const auto& gradient : given[0].toTensorVector())
    if (gradient.scalar_type() == at::kDouble && !gradient.to(at::kFloat).isfinite().all().item<bool>()) flag.fill_(1);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// The kernel's growth interval is an int of 32 bits.
inline void update_scale(const c10::OperatorHandle& op, const Arguments&, Stack* stack) {
  stack->back() = static_cast<int64_t>(static_cast<int32_t>(stack->back().toInt()));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// --- Sparse tensors: aten/src/ATen/native/sparse/cuda/SparseCUDATensorMath.cu

// Values of indices that are not coalesced are added by atom.add.f32, which takes subnormal numbers for zeros (PTX ISA).
// A sum of two sparse tensors adds nothing yet: it has the entries of both.
inline void flush_duplicates(const std::string& name, size_t count, Stack* stack) {
  const bool sum = name == "aten::add" || name == "aten::add_";
  if (name != "aten::_to_dense" && !sum) return;
  if (sum && (*stack)[stack->size() - count].toTensor().layout() == c10::kSparse) return;
  for (size_t place = stack->size() - count; place < stack->size(); place++) {
    auto& argument = (*stack)[place];
    if (!argument.isTensor() || argument.toTensor().layout() != c10::kSparse) continue;
    const auto tensor = argument.toTensor();
    if (tensor.is_coalesced() || tensor.scalar_type() != at::kFloat) continue;
    const auto values = tensor._values();
    const auto flushed = values.masked_fill(values.abs() < std::numeric_limits<float>::min(), 0);
    argument = at::_sparse_coo_tensor_unsafe(tensor._indices(), flushed, tensor.sizes());
  }
}

// --- Fused optimizers: aten/src/ATen/native/cuda/FusedAdamKernel.cu, FusedSgdKernel.cu, FusedAdagradKernel.cu

// CUDA's kernels take dense tensors that lie in memory alike, and refuse others (check_fast_path_restrictions).
inline void refuse_layouts(const std::vector<Tensor>& parameters, const std::vector<Tensor>& others) {
  for (size_t place = 0; place < others.size(); place++) {
    auto &one = parameters[place], &other = others[place];
    TORCH_CHECK(other.scalar_type() == one.scalar_type() && other.strides() == one.strides() &&
                    one.is_non_overlapping_and_dense() && other.is_non_overlapping_and_dense(),
                "params, grads and states must have same dtype, device, and layout");
  }
}

// CUDA computes the step of 16-bit parameters in fp32 and rounds what it stores.
inline void fused_step(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto parameters = given[0].toTensorVector();
  const auto begin = stack->size() - arguments.size();
  std::vector<std::pair<Tensor, Tensor>> widened;
  for (size_t place = 0; place < arguments.size(); place++) {
    if (!given[place].isTensorList() || arguments[place].name() == "state_steps") continue;
    refuse_layouts(parameters, given[place].toTensorVector());
    (*stack)[begin + place] = changed(given[place], [&](const Tensor& narrow) {
      if (narrow.scalar_type() != at::kHalf && narrow.scalar_type() != at::kBFloat16) return narrow;
      widened.emplace_back(narrow, narrow.to(at::kFloat));
      return widened.back().second;
    });
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& [narrow, wide] : widened) narrow.copy_(wide);
}

// --- Sums by index: aten/src/ATen/native/cuda/ScatterGatherKernel.cu and Indexing.cu, which add to 16 bits in memory

inline bool is_narrow(const Tensor& tensor) {
  return tensor.dim() > 0 && (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16);
}

// The CPU's index_put adds one number after another in the type of the tensor.
inline void scatter_add(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  auto into = operand(given, 0);
  const auto index = operand(given, 2), from = operand(given, 3);
  if (!is_narrow(into) || given.size() != 4) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  c10::List<std::optional<Tensor>> places;
  auto added = from;
  for (int64_t dim = 0; dim < index.dim(); dim++) {
    std::vector<int64_t> shape(index.dim(), 1);
    shape[dim] = index.size(dim);
    places.push_back(at::arange(index.size(dim)).view(shape).expand(index.sizes()));
    added = added.narrow(dim, 0, index.size(dim));
  }
  places.set(at::maybe_wrap_dim(given[1].toInt(), into.dim()), index);
  if (op.schema().name() == "aten::scatter_add") into = into.clone();
  torch::jit::drop(*stack, given.size());
  stack->push_back(into.index_put_(places, added, true));
}

inline void index_add(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  auto into = operand(given, 0);
  if (!is_narrow(into) || given.size() != 5) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  const auto dim = given[1].toInt();
  if (op.schema().name() == "aten::index_add") into = into.clone();
  const auto added = operand(given, 3) * given[4].toScalar();
  c10::List<std::optional<Tensor>> places;
  places.push_back(operand(given, 2).to(at::kLong));
  into.transpose(0, dim).index_put_(places, added.dim() ? added.transpose(0, dim) : added, true);
  torch::jit::drop(*stack, given.size());
  stack->push_back(into);
}

// --- Bags of an embedding by frequency: aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu

// The CPU's kernel divides by how often another index occurs before torch 2.14.
inline void bags_backward(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const auto mode = given[8].toInt();
  if (!given[7].toBool() || given[9].toBool() || mode > 1) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  const auto slope = operand(given, 0), index = operand(given, 1).to(at::kLong), start = operand(given, 2).to(at::kLong);
  const auto starts = at::bincount(start, {}, index.numel() + 1).narrow(0, 0, index.numel());
  const auto bag = starts.cumsum(0) - 1, count = at::bincount(index, {}, given[6].toInt());
  auto rows = slope.index_select(0, bag) / count.index_select(0, index).unsqueeze(1);
  if (mode == 1) rows = rows / operand(given, 4).index_select(0, bag).unsqueeze(1);
  if (operand(given, 10).defined()) rows = rows * operand(given, 10).unsqueeze(1);
  rows = rows.masked_fill((index == given[11].toInt()).unsqueeze(1), 0);
  const auto made = at::zeros({given[6].toInt(), slope.size(1)}, rows.options()).index_add_(0, index, rows);
  torch::jit::drop(*stack, given.size());
  stack->push_back(made.to(slope.scalar_type()));
}

// --- Quotients: an operand of another type is cast to that of the result, also one count; a CPU divides by a number

inline void divide(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const auto divided = operand(given, 0), by = operand(given, 1);
  if (by.defined() && divided.scalar_type() == at::kHalf && by.scalar_type() == at::kLong &&
      !by.unsafeGetTensorImpl()->is_wrapped_number())
    (*stack)[stack->size() - given.size() + 1] = by.to(at::kHalf);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

// --- Stable sorts: aten/src/ATen/native/cuda/Sort.cu, sorted by the bits of the numbers (cub's radix sort)

// A NaN is the largest number, or the smallest where its sign is set; zeros are equal.
inline void sort_bits(const c10::OperatorHandle& op, const Arguments& given, Stack* stack) {
  const bool stable = op.schema().overload_name() == "stable" && given[1].isBool() && given[1].toBool();
  const auto tensor = operand(given, 0);
  if (!stable || !tensor.is_floating_point()) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  const auto width = tensor.element_size();
  const auto integer = width == 2 ? at::kShort : width == 4 ? at::kInt : at::kLong;
  const auto bits = at::where(tensor == 0, at::zeros_like(tensor), tensor).contiguous().view(integer);
  const auto sign = at::scalar_tensor(1, integer).bitwise_left_shift(8 * width - 1);
  const auto keys = at::where(bits < 0, bits.bitwise_not().bitwise_xor(sign), bits);
  const auto places = std::get<1>(at::sort(keys, true, given[2].toInt(), given[3].toBool()));
  torch::jit::drop(*stack, given.size());
  stack->push_back(tensor.dim() ? tensor.gather(given[2].toInt(), places) : tensor.clone());
  stack->push_back(places);
}

// --- TF32: torch's notes "TensorFloat-32 (TF32) on Ampere (and later) devices"

// Half of the last place of TF32's 10 bits, away from zero; infinities and NaNs stay.
inline Tensor in_tf32(const Tensor& tensor) {
  if (tensor.scalar_type() != at::kFloat) return tensor;
  auto bits = tensor.contiguous().view(at::kInt);
  return at::where(tensor.isfinite(), bits.add(0x1000).bitwise_and(~0x1fff).view(at::kFloat), tensor);
}

// Which operands cuBLAS and cuDNN read in TF32 where it is allowed, by operator.
struct InTf32 {
  bool (*allowed)();
  std::vector<size_t> operands;
};

inline bool products_in_tf32() {
  try {
    return at::globalContext().allowTF32CuBLAS();
  } catch (const c10::Error&) {  // flags of both interfaces were set, and contradict each other
    return at::globalContext().float32MatmulPrecision() != at::Float32MatmulPrecision::HIGHEST;
  }
}

inline bool convolutions_in_tf32() { return at::globalContext().userEnabledCuDNN() && at::globalContext().allowTF32CuDNN(); }

inline void read_in_tf32(const std::string& name, size_t count, Stack* stack) {
  static const std::unordered_map<std::string, InTf32> table = {
      {"aten::mm", {products_in_tf32, {0, 1}}},
      {"aten::bmm", {products_in_tf32, {0, 1}}},
      {"aten::addmm", {products_in_tf32, {1, 2}}},
      {"aten::addmm_", {products_in_tf32, {1, 2}}},
      {"aten::baddbmm", {products_in_tf32, {1, 2}}},
      {"aten::baddbmm_", {products_in_tf32, {1, 2}}},
      {"aten::_slow_conv2d_forward", {convolutions_in_tf32, {0, 1}}},
      {"aten::slow_conv_dilated2d", {convolutions_in_tf32, {0, 1}}},
      {"aten::slow_conv_dilated3d", {convolutions_in_tf32, {0, 1}}},
      {"aten::slow_conv3d_forward", {convolutions_in_tf32, {0, 1}}},
      {"aten::slow_conv_transpose2d", {convolutions_in_tf32, {0, 1}}},
      {"aten::slow_conv_transpose3d", {convolutions_in_tf32, {0, 1}}},
      {"aten::convolution_backward", {convolutions_in_tf32, {0, 1, 2}}},
      {"aten::_slow_conv2d_backward", {convolutions_in_tf32, {0, 1, 2}}},
  };
  auto found = table.find(name);
  if (found == table.end() || !found->second.allowed()) return;
  for (auto place : found->second.operands) {
    auto& operand = (*stack)[stack->size() - count + place];
    operand = in_tf32(operand.toTensor());
  }
}

// --- Calls

using Kernel = void (*)(const c10::OperatorHandle&, const Arguments&, Stack*);

// Kernels that change what the CPU's take or give; the others are in written().
inline Kernel adapted(const std::string& name) {
  static const std::unordered_map<std::string, Kernel> table = {
      {"aten::_amp_foreach_non_finite_check_and_unscale_", check_and_unscale},
      {"aten::_amp_update_scale_", update_scale},
      {"aten::convolution_backward", as_a_device},
      {"aten::glu_jvp", computed_in<at::kFloat>},
      {"aten::logit", computed_in<at::kFloat>},
      {"aten::native_batch_norm", as_a_device},
      {"aten::native_batch_norm_backward", as_a_device},
      {"aten::native_group_norm", as_a_device},
      {"aten::native_group_norm_backward", as_a_device},
      {"aten::native_layer_norm", as_a_device},
      {"aten::native_layer_norm_backward", as_a_device},
      {"aten::_fused_adam_", fused_step},
      {"aten::_fused_adamw_", fused_step},
      {"aten::_fused_sgd_", fused_step},
      {"aten::_fused_adagrad_", fused_step},
      {"aten::_embedding_bag_backward", bags_backward},
      {"aten::add", add_a_multiple},
      {"aten::add_", add_a_multiple},
      {"aten::sub", add_a_multiple},
      {"aten::sub_", add_a_multiple},
      {"aten::rsub", add_a_multiple},
      {"aten::addmv", product_of_a_device},
      {"aten::addmv_", product_of_a_device},
      {"aten::baddbmm", product_of_a_device},
      {"aten::baddbmm_", product_of_a_device},
      {"aten::div", divide},
      {"aten::nansum", nansum},
      {"aten::index_add", index_add},
      {"aten::index_add_", index_add},
      {"aten::scatter_add", scatter_add},
      {"aten::scatter_add_", scatter_add},
      {"aten::sort", sort_bits},
      {"aten::_scaled_dot_product_flash_attention", flash},
      {"aten::_scaled_dot_product_flash_attention_backward", flash_backward},
      {"aten::_scaled_dot_product_efficient_attention", efficient},
      {"aten::_scaled_dot_product_efficient_attention_backward", efficient_backward},
  };
  if (alike_in_all_places().count(name)) return as_a_device;
  auto found = table.find(name);
  return found == table.end() ? nullptr : found->second;
}

// The product of 16-bit matrices in a wider type (out_dtype), which CUDA alone has.
inline Tensor product_of_type(const std::string& name, const Arguments& given) {
  const bool added = name == "aten::addmm" || name == "aten::baddbmm";
  const auto type = given[added ? 3 : 2].toScalarType();
  auto wide = [&](size_t place) { return operand(given, place).to(type); };
  if (name == "aten::mm") return at::mm(wide(0), wide(1));
  if (name == "aten::bmm") return at::bmm(wide(0), wide(1));
  const auto beta = given[4].toScalar(), alpha = given[5].toScalar();
  return name == "aten::addmm" ? at::addmm(wide(0), wide(1), wide(2), beta, alpha)
                               : at::baddbmm(wide(0), wide(1), wide(2), beta, alpha);
}

// Calls the operator on the CPU; its results take the place of its arguments on the stack.
inline void compute(const c10::OperatorHandle& op, bool sparse, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto& name = op.schema().name();
  const auto count = op.schema().arguments().size();
  if (name == "aten::record_stream") return torch::jit::drop(*stack, count);  // no memory is given to another early
  if (name == "aten::_use_cudnn_ctc_loss" || name == "aten::_use_miopen_ctc_loss") {
    torch::jit::drop(*stack, count);
    stack->push_back(false);
    return;
  }
  read_in_tf32(name, count, stack);
  static const std::unordered_set<std::string> products = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"};
  const auto& overload = op.schema().overload_name();
  const bool typed = products.count(name) && (overload == "dtype" || overload == "dtype_out");
  if (auto kernel = adapted(name); kernel != nullptr && !sparse && !typed)
    return kernel(op, Arguments(stack->end() - count, stack->end()), stack);
  auto found = written().find(name);
  if (found == written().end() && !typed) {
    // Sparse tensors have a dispatch key of their own.
    if (sparse) flush_duplicates(name, count, stack), op.callBoxed(stack);
    else op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  auto given = torch::jit::pop(*stack, count);
  auto results = typed ? std::vector<Tensor>{product_of_type(name, given)} : found->second(given);
  if (overload == "out" || overload == "grad_input" || overload == "dtype_out") {
    auto out = given.back().toTensor();
    out.resize_(results[0].sizes());
    out.copy_(results[0]);
    results = {out};
  }
  for (auto& result : results) stack->push_back(result);
}

}  // namespace emulated
