// Tensors on a card lent to the CPU for one call of an operator, and its results given back to the card.
#pragma once

#include <ATen/ATen.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "device.h"

namespace emulated {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

#define EMULATED_JOINED(prefix, type) prefix##type
#define EMULATED_SPARSE(type) EMULATED_JOINED(Sparse, type)
constexpr auto kKey = c10::DispatchKey::EMULATED_TYPE;
constexpr auto kSparseKey = c10::DispatchKey::EMULATED_SPARSE(EMULATED_TYPE);

using Arguments = std::vector<IValue>;  // on the CPU

inline at::SparseTensorImpl* sparse_impl(const Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

inline Tensor dense_like(const Tensor& like, c10::Storage storage, c10::DispatchKey key, bool inference) {
  c10::InferenceMode mode(inference);
  auto keys = c10::DispatchKeySet(key);
  if (like._is_zerotensor()) keys = keys.add(c10::DispatchKey::ZeroTensor);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  made._set_conj(like.is_conj());
  made._set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

inline Tensor sparse_like(const Tensor& like, Tensor indices, Tensor values, c10::DispatchKey key) {
  auto* from = sparse_impl(like);
  auto made = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), like.dtype());
  auto* impl = sparse_impl(made);
  impl->resize_(from->sparse_dim(), from->dense_dim(), like.sizes());
  impl->set_indices_and_values_unsafe(std::move(indices), std::move(values));
  impl->set_coalesced(from->coalesced());
  return made;
}

// One call of an operator: which tensors and memory on the cards stand for which on the CPU.
class Call {
 public:
  bool on_card() const { return !tensors_.empty(); }
  const std::vector<Tensor>& from_host() const { return from_host_; }
  const std::vector<std::pair<Tensor, Tensor>>& tensors() const { return tensors_; }

  // The card that new results lie on.
  c10::Device home() const {
    if (asked_.has_value() && asked_->type() == kType) return card(asked_->index());
    return tensors_.empty() ? card(-1) : tensors_.front().first.device();
  }
  void ask_for(c10::Device device) { asked_ = device; }
  bool gives_to_card() const { return asked_.has_value() ? asked_->type() == kType : on_card(); }

  bool any(const std::function<bool(const Tensor&)>& is) const {
    for (auto& [card, host] : tensors_)
      if (is(card)) return true;
    return false;
  }

  Tensor lent(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kType) {
      from_host_.push_back(tensor);
      return tensor;
    }
    for (auto& [card, host] : tensors_)
      if (card.is_same(tensor)) return host;
    Tensor made;
    if (tensor.layout() == c10::kSparse) {
      auto* impl = sparse_impl(tensor);
      made = sparse_like(tensor, lent(impl->indices()), lent(impl->values()), c10::DispatchKey::SparseCPU);
    } else {
      TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided, "the emulated card has no ", tensor.layout());
      made = dense_like(tensor, lent(tensor.storage()), c10::DispatchKey::CPU, tensor.is_inference());
    }
    tensors_.emplace_back(tensor, made);
    return made;
  }

  c10::Storage lent(const c10::Storage& storage) {
    auto* key = storage.unsafeGetStorageImpl();
    if (!hosts_.count(key)) {
      auto* host_allocator = c10::GetAllocator(c10::DeviceType::CPU);
      c10::Storage host(c10::Storage::use_byte_size_t{}, storage.nbytes(), borrow(storage, kHost), host_allocator, true);
      hosts_.emplace(key, host);
      cards_.emplace(host.unsafeGetStorageImpl(), storage);
    }
    return hosts_.at(key);
  }

  Tensor given_back(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device() != kHost) return tensor;
    for (auto& [card, host] : tensors_)
      if (host.is_same(tensor)) return card;
    if (tensor.layout() == c10::kSparse) {
      auto* impl = sparse_impl(tensor);
      auto indices = given_back(impl->indices()), values = given_back(impl->values());
      return sparse_like(tensor, indices, values, kSparseKey);
    }
    auto storage = given_back(tensor.storage());
    bool inference = c10::InferenceMode::is_enabled();
    // A view is an inference tensor where what it looks at is one, whatever the mode.
    for (auto& [card, host] : tensors_)
      if (card.layout() == c10::kStrided && card.storage().is_alias_of(storage)) inference = card.is_inference();
    return dense_like(tensor, storage, kKey, inference);
  }

  // What the operator did in place to sizes and memory holds on the card too.
  void settle() {
    for (auto& [key, host] : hosts_) {
      auto card = cards_.at(host.unsafeGetStorageImpl());
      if (card.data() != host.data() || card.nbytes() != host.nbytes()) {
        card.unsafeGetStorageImpl()->set_data_ptr_noswap(borrow(host, card.device()));
        card.unsafeGetStorageImpl()->set_nbytes(host.nbytes());
      }
    }
    const auto tensors = tensors_;
    for (auto& [card, host] : tensors) {
      if (card.layout() == c10::kSparse) {
        auto *to = sparse_impl(card), *from = sparse_impl(host);
        if (card.sizes() != host.sizes()) to->raw_resize_(from->sparse_dim(), from->dense_dim(), host.sizes());
        to->set_indices_and_values_unsafe(given_back(from->indices()), given_back(from->values()));
        to->set_coalesced(from->coalesced());
        continue;
      }
      auto* impl = card.unsafeGetTensorImpl();
      auto storage = given_back(host.storage());
      if (storage.unsafeGetStorageImpl() != card.storage().unsafeGetStorageImpl())
        impl->set_storage_keep_dtype(storage);
      if (card.sizes() != host.sizes() || card.strides() != host.strides() ||
          card.storage_offset() != host.storage_offset())
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

 private:
  c10::Storage given_back(const c10::Storage& storage) {
    auto* key = storage.unsafeGetStorageImpl();
    if (!cards_.count(key)) {
      c10::Storage card(c10::Storage::use_byte_size_t{}, storage.nbytes(), borrow(storage, home()), &allocator, true);
      cards_.emplace(key, card);
    }
    return cards_.at(key);
  }

  std::optional<c10::Device> asked_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> hosts_;  // by storage on the card
  std::unordered_map<c10::StorageImpl*, c10::Storage> cards_;  // by storage on the CPU
  std::vector<std::pair<Tensor, Tensor>> tensors_;             // on the card, on the CPU
  std::vector<Tensor> from_host_;
};

inline std::vector<Tensor> tensors_of(const IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<Tensor> found;
  if (value.isOptionalTensorList())
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      if (tensor.has_value()) found.push_back(*tensor);
  return found;
}

template <class Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const auto& tensor : value.toTensorVector()) made.push_back(change(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      made.push_back(tensor.has_value() ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    return made;
  }
  return value;
}

// Puts tensors of the CPU in the place of those on cards.
inline void lend(const c10::FunctionSchema& schema, const Arguments& given, Call& call, Stack* stack) {
  const auto begin = stack->size() - given.size();
  for (size_t place = 0; place < given.size(); place++) {
    auto& value = (*stack)[begin + place];
    if (value.isDevice()) {
      call.ask_for(value.toDevice());
      if (value.toDevice().type() == kType) value = kHost;
    } else if (value.isStorage()) {
      auto storage = value.toStorage();
      if (storage.device().type() == kType) value = call.lent(storage);
    } else if (schema.arguments()[place].name() == "pin_memory" && value.isBool()) {
      value = false;
    } else {
      value = changed(value, [&](const Tensor& tensor) { return call.lent(tensor); });
    }
  }
}

// Operators that have a kernel for the CPU and a composite one, which comes before a fallback: a device has
// its own too. So has it of copy_ and convolution_backward, whose composite kernels choose by device.
template <auto kernel>
void implement(torch::Library& library, c10::DispatchKey cpu) {
  static const std::unordered_set<std::string> by_name = {"aten::copy_", "aten::convolution_backward"};
  const auto composites = {c10::DispatchKey::CompositeImplicitAutograd, c10::DispatchKey::CompositeExplicitAutograd,
                           c10::DispatchKey::CompositeExplicitAutogradNonFunctional};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op.has_value() || name.name.rfind("aten::", 0) != 0) continue;
    bool both = false;
    for (auto key : composites) both = both || op->hasKernelForDispatchKey(key);
    both = both && op->hasKernelForDispatchKey(cpu);
    if (both || (cpu == c10::DispatchKey::CPU && by_name.count(name.name)))
      library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
  }
}

}  // namespace emulated
