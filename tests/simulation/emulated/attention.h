// Attention as CUDA chooses it, by the type, the mask and the sizes, over the CPU's fused kernel.
// Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, without cuDNN.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

#include <limits>
#include <optional>
#include <vector>

#include "lending.h"

namespace emulated {

using Mask = std::optional<Tensor>;

struct Attention {
  const Tensor &query, &key, &value;
  const Mask& mask;
  double dropout;
  bool causal, grouped;

  bool fits() const {
    const bool dense = query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && query.size(0) == key.size(0) &&
        query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type();
    const bool lengths = dense && query.size(2) > 0 && key.size(2) > 0;
    // The CPU's kernel has no dropout.
    return lengths && dropout == 0 && query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1;
  }
  bool has_low_precision() const {
    return query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  }
  bool has_one_width() const { return query.size(3) == key.size(3) && query.size(3) == value.size(3); }

  bool flash() const {
    const bool heads = query.size(1) == key.size(1) || (grouped && query.size(1) % key.size(1) == 0);
    return at::globalContext().userEnabledFlashSDP() && !mask.has_value() && has_low_precision() && has_one_width() &&
        query.size(3) <= 256 && heads && !(causal && query.size(2) != key.size(2));
  }
  bool efficient() const {
    const int64_t aligned = has_low_precision() ? 8 : 4;
    return at::globalContext().userEnabledMemEfficientSDP() &&
        (has_low_precision() || query.scalar_type() == at::kFloat) && has_one_width() && query.size(3) % aligned == 0 &&
        query.size(1) == key.size(1) && !(mask.has_value() && mask->requires_grad());
  }
};

inline int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask, double dropout,
                      bool causal, std::optional<double>, bool grouped) {
  const Attention asked{query, key, value, mask, dropout, causal, grouped};
  auto backend = sdp::SDPBackend::math;
  if (asked.fits() && asked.flash()) backend = sdp::SDPBackend::flash_attention;
  else if (asked.fits() && asked.efficient()) backend = sdp::SDPBackend::efficient_attention;
  else TORCH_CHECK(at::globalContext().userEnabledMathSDP(), "No available kernel. Aborting execution.");
  return static_cast<int64_t>(backend);
}

// Heads of keys and values, once for each head of queries that shares them.
inline Tensor repeated(const Tensor& shared, const Tensor& query) {
  const auto times = query.size(1) / shared.size(1);
  return times == 1 ? shared : shared.repeat_interleave(times, 1);
}

inline Tensor summed(const Tensor& gradient, const Tensor& shared) {
  const auto times = gradient.size(1) / shared.size(1);
  return times == 1 ? gradient : gradient.unflatten(1, {shared.size(1), times}).sum(2);
}

inline std::pair<Tensor, Tensor> attend(const Arguments& given, const Mask& mask, bool causal) {
  auto query = given[0].toTensor();
  for (size_t place = 0; place < 3; place++)
    TORCH_CHECK(given[place].toTensor().stride(-1) == 1, "Input tensor must have contiguous last dimension");
  auto key = repeated(given[1].toTensor(), query), value = repeated(given[2].toTensor(), query);
  const auto scale = given.back().toOptional<double>();
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, mask, scale);
  return {out, sums.to(at::kFloat)};
}

inline std::tuple<Tensor, Tensor, Tensor> attend_backward(const Arguments& given, const Tensor& out, const Tensor& sums,
                                                          const Mask& mask, bool causal) {
  auto query = given[1].toTensor(), key = given[2].toTensor(), value = given[3].toTensor();
  auto [d_query, d_key, d_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      given[0].toTensor(), query, repeated(key, query), repeated(value, query), out, sums, 0.0, causal, mask,
      given.back().toOptional<double>());
  return {d_query, summed(d_key, key), summed(d_value, value)};
}

// (query, key, value, dropout_p, is_causal, return_debug_mask, scale)
inline void flash(const c10::OperatorHandle&, const Arguments& given, Stack* stack) {
  auto [out, sums] = attend(given, std::nullopt, given[4].toBool());
  auto random = at::zeros({2}, at::kLong);
  torch::jit::drop(*stack, given.size());
  torch::jit::push(*stack, out, sums, Tensor(), Tensor(), out.size(2), given[1].toTensor().size(2), random,
                   at::empty({}, at::kLong), at::empty({0}, out.options()));
}

// (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, ...)
inline void flash_backward(const c10::OperatorHandle&, const Arguments& given, Stack* stack) {
  auto [d_query, d_key, d_value] =
      attend_backward(given, given[4].toTensor(), given[5].toTensor(), std::nullopt, given[11].toBool());
  torch::jit::drop(*stack, given.size());
  torch::jit::push(*stack, d_query, d_key, d_value);
}

inline Mask mask_of(const IValue& value) {
  return value.isTensor() && value.toTensor().defined() ? Mask(value.toTensor()) : std::nullopt;
}

// (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale); the kernel writes the sums of blocks
// of 32 queries, and infinity for those that are not there.
inline void efficient(const c10::OperatorHandle&, const Arguments& given, Stack* stack) {
  auto [out, sums] = attend(given, mask_of(given[3]), given[6].toBool());
  const auto queries = given[4].toBool() ? (out.size(2) + 31) / 32 * 32 : 0;
  auto padded = at::full({out.size(0), out.size(1), queries}, std::numeric_limits<float>::infinity(), at::kFloat);
  if (queries > 0) padded.narrow(2, 0, out.size(2)).copy_(sums);
  torch::jit::drop(*stack, given.size());
  torch::jit::push(*stack, out, padded, at::zeros({}, at::kLong), at::zeros({}, at::kLong));
}

// (grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
// is_causal, scale)
inline void efficient_backward(const c10::OperatorHandle&, const Arguments& given, Stack* stack) {
  if (!given[0].toTensor().defined()) {
    torch::jit::drop(*stack, given.size());
    torch::jit::push(*stack, Tensor(), Tensor(), Tensor(), Tensor());
    return;
  }
  auto out = given[5].toTensor();
  auto sums = given[6].toTensor().narrow(2, 0, out.size(2));
  auto [d_query, d_key, d_value] = attend_backward(given, out, sums, mask_of(given[4]), given[11].toBool());
  torch::jit::drop(*stack, given.size());
  torch::jit::push(*stack, d_query, d_key, d_value, Tensor());
}

const bool chooses = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
  return true;
}();

}  // namespace emulated
