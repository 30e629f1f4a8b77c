// An emulated CUDA card: the tensors, guards, autograd threads and autocast kernels of CUDA, with the CPU's kernels
// behind them. Built for the CPU builds of torch, in which the dispatch key CUDA has no kernels and no device.
//
// A kernel of the key CUDA is one boxed fallback. It lends the memory of each tensor on the card to a tensor on the
// CPU, calls the operator on those, and gives the results back to the card. Operands on both devices are refused, as
// CUDA refuses them. What CUDA computes by operators that a CPU lacks is written out below, and so are the promises
// that its kernels are known to break, so that waivers find what they name.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

const c10::Device kCard(c10::DeviceType::CUDA, 0);
const c10::Device kHost(c10::DeviceType::CPU);

// 0: waits are allowed, 1: they warn, 2: they raise (torch.cuda.set_sync_debug_mode).
int64_t sync_mode = 0;

// --- The device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kCard; }
  c10::Device getDevice() const override { return kCard; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kCard); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  void deviceSynchronize(c10::DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
};
void drop(void* lender) { delete static_cast<c10::Storage*>(lender); }

// The memory of a storage, said to lie on `device`; it lives as long as either.
c10::DataPtr borrow(const c10::Storage& lender, c10::Device device) {
  void* data = lender.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  return c10::DataPtr(data, new c10::Storage(lender), &drop, device);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Storage host(c10::Storage::use_byte_size_t{}, bytes, c10::GetAllocator(c10::DeviceType::CPU), true);
    return borrow(host, kCard);
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
} allocator;

const bool allocates = [] {
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator, 1);
  return true;
}();

// --- Tensors lent to the CPU and given back

at::SparseTensorImpl* sparse_impl(const Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

Tensor dense_like(const Tensor& like, c10::Storage storage, c10::DispatchKey key, bool inference) {
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

Tensor sparse_like(const Tensor& like, Tensor indices, Tensor values, c10::DispatchKey key) {
  auto* from = sparse_impl(like);
  auto made = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), like.dtype());
  auto* impl = sparse_impl(made);
  impl->resize_(from->sparse_dim(), from->dense_dim(), like.sizes());
  impl->set_indices_and_values_unsafe(std::move(indices), std::move(values));
  impl->set_coalesced(from->coalesced());
  return made;
}

// One call of an operator: which tensors and memory on the card stand for which on the CPU.
class Call {
 public:
  bool on_card() const { return !tensors_.empty(); }
  const std::vector<Tensor>& from_host() const { return from_host_; }

  bool any(const std::function<bool(const Tensor&)>& is) const {
    for (auto& [card, host] : tensors_)
      if (is(card)) return true;
    return false;
  }

  Tensor lent(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != c10::DeviceType::CUDA) {
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
      return sparse_like(tensor, indices, values, c10::DispatchKey::SparseCUDA);
    }
    auto storage = given_back(tensor.storage());
    bool inference = c10::InferenceMode::is_enabled();
    // A view is an inference tensor where what it looks at is one, whatever the mode.
    for (auto& [card, host] : tensors_)
      if (card.layout() == c10::kStrided && card.storage().is_alias_of(storage)) inference = card.is_inference();
    return dense_like(tensor, storage, c10::DispatchKey::CUDA, inference);
  }

  // What the operator did in place to sizes and memory holds on the card too.
  void settle() {
    for (auto& [key, host] : hosts_) {
      auto card = cards_.at(host.unsafeGetStorageImpl());
      if (card.data() != host.data() || card.nbytes() != host.nbytes()) {
        card.unsafeGetStorageImpl()->set_data_ptr_noswap(borrow(host, kCard));
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
      c10::Storage card(c10::Storage::use_byte_size_t{}, storage.nbytes(), borrow(storage, kCard), &allocator, true);
      cards_.emplace(key, card);
    }
    return cards_.at(key);
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> hosts_;  // by storage on the card
  std::unordered_map<c10::StorageImpl*, c10::Storage> cards_;  // by storage on the CPU
  std::vector<std::pair<Tensor, Tensor>> tensors_;             // on the card, on the CPU
  std::vector<Tensor> from_host_;
};

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

// --- What CUDA has and a CPU has not

using Arguments = std::vector<IValue>;  // on the CPU
using Written = std::function<std::vector<Tensor>(const Arguments&)>;

Tensor operand(const Arguments& given, size_t place) {
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

std::vector<Tensor> gru_cell(const Arguments& given) {
  auto input = operand(given, 0), hidden = operand(given, 1), before = operand(given, 2);
  if (operand(given, 3).defined()) input = input + operand(given, 3), hidden = hidden + operand(given, 4);
  auto i = input.tensor_split(3, 1), h = hidden.tensor_split(3, 1);
  auto reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid(), fresh = (i[2] + reset * h[2]).tanh();
  return {fresh + update * (before - fresh), at::cat({reset, update, fresh, before, h[2]}, 1)};
}

std::vector<Tensor> gru_cell_backward(const Arguments& given) {
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

std::vector<Tensor> lstm_cell(const Arguments& given) {
  auto input = operand(given, 0), hidden = operand(given, 1), before = operand(given, 2);
  if (operand(given, 3).defined()) input = input + operand(given, 3), hidden = hidden + operand(given, 4);
  auto gates = (input + hidden).tensor_split(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto after = forget * before + in * cell;
  return {out * after.tanh(), after, at::cat({in, forget, cell, out}, 1)};
}

std::vector<Tensor> lstm_cell_backward(const Arguments& given) {
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

std::vector<Tensor> depthwise(const Arguments& given) {
  auto input = operand(given, 0);
  std::optional<Tensor> bias;
  if (operand(given, 3).defined()) bias = operand(given, 3);
  std::vector<int64_t> none(input.dim() - 2, 0);
  return {at::convolution(input, operand(given, 1), bias, given[4].toIntVector(), given[5].toIntVector(),
                          given[6].toIntVector(), false, none, input.size(1))};
}

const std::unordered_map<std::string, Written>& written() {
  static const std::unordered_map<std::string, Written> table = {
      {"aten::_softmax", widened([](auto&&... a) { return at::_softmax(a...); })},
      {"aten::_log_softmax", widened([](auto&&... a) { return at::_log_softmax(a...); })},
      {"aten::_softmax_backward_data", narrowed([](auto&&... a) { return at::_softmax_backward_data(a...); })},
      {"aten::_log_softmax_backward_data", narrowed([](auto&&... a) { return at::_log_softmax_backward_data(a...); })},
      {"aten::_thnn_fused_gru_cell", gru_cell},
      {"aten::_thnn_fused_gru_cell_backward", gru_cell_backward},
      {"aten::_thnn_fused_lstm_cell", lstm_cell},
      {"aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
      {"aten::_conv_depthwise2d", depthwise},
      {"aten::conv_depthwise3d", depthwise},
  };
  return table;
}

// Calls the operator on the CPU; its results take the place of its arguments on the stack.
void compute(const c10::OperatorHandle& op, const std::string& name, const std::string& overload, bool sparse, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (name == "aten::_use_cudnn_ctc_loss" || name == "aten::_use_miopen_ctc_loss") {
    torch::jit::drop(*stack, op.schema().arguments().size());
    stack->push_back(false);
    return;
  }
  auto found = written().find(name);
  if (found == written().end()) {
    // Sparse tensors have a dispatch key of their own.
    if (sparse) op.callBoxed(stack);
    else op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  auto given = torch::jit::pop(*stack, op.schema().arguments().size());
  auto results = found->second(given);
  if (overload == "out") {
    auto out = given.back().toTensor();
    out.resize_(results[0].sizes());
    out.copy_(results[0]);
    results = {out};
  }
  for (auto& result : results) stack->push_back(result);
}

// --- What CUDA refuses

// Operators that take operands of both devices.
bool mixes(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::set_", "aten::set_data", "aten::index",
      "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_amp_update_scale_",
      "aten::lift_fresh", "aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::_use_cudnn_ctc_loss",
      "aten::_use_miopen_ctc_loss"};
  return names.count(name) > 0;
}

void refuse(const std::string& name, const Call& call, const Arguments& given) {
  if (call.on_card() && !mixes(name))
    for (auto& tensor : call.from_host())
      TORCH_CHECK(tensor.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, ",
                  kCard, " and cpu! (", name, ")");
  if (name == "aten::_amp_foreach_non_finite_check_and_unscale_")
    TORCH_CHECK_NOT_IMPLEMENTED(!call.any([](const Tensor& t) { return t.scalar_type() == at::kBFloat16; }),
                                "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'");
  bool across = name == "aten::copy_" && call.on_card() && !call.from_host().empty() && !given[2].toBool();
  if (across || name == "aten::_local_scalar_dense" || name == "aten::nonzero") {
    TORCH_CHECK(sync_mode != 2, "called a synchronizing CUDA operation");
    if (sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
  }
}

void on_card(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  const Arguments given(stack->begin() + begin, stack->end());
  Call call;
  std::optional<c10::Device> asked;
  for (size_t place = 0; place < given.size(); place++) {
    auto& value = (*stack)[begin + place];
    if (value.isDevice()) {
      asked = value.toDevice();
      if (asked->type() == c10::DeviceType::CUDA) value = kHost;
    } else if (value.isStorage()) {
      auto storage = value.toStorage();
      if (storage.device().type() == c10::DeviceType::CUDA) value = call.lent(storage);
    } else if (schema.arguments()[place].name() == "pin_memory" && value.isBool()) {
      value = false;
    } else {
      value = changed(value, [&](const Tensor& tensor) { return call.lent(tensor); });
    }
  }
  refuse(schema.name(), call, given);
  const bool sparse = call.any([](const Tensor& t) { return t.layout() == c10::kSparse; }) ||
      schema.name().find("sparse") != std::string::npos;
  compute(op, schema.name(), schema.overload_name(), sparse, stack);
  call.settle();
  if (asked.has_value() ? asked->type() != c10::DeviceType::CUDA : !call.on_card()) return;
  for (size_t place = stack->size() - schema.returns().size(); place < stack->size(); place++)
    (*stack)[place] = changed((*stack)[place], [&](const Tensor& tensor) { return call.given_back(tensor); });
}

}  // namespace

// In place of torch's own, which makes the hooks of a build without CUDA before any library could register others;
// the first definition that the linker finds is everybody's.
const at::CUDAHooksInterface& at::detail::getCUDAHooks() {
  static const Hooks hooks{at::CUDAHooksArgs{}};
  return hooks;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_card>()); }
TORCH_LIBRARY_IMPL(_, SparseCUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_card>()); }

// Operators that have a kernel for the CPU and a composite one, which comes before a fallback: CUDA has its own too. So
// has it of copy_ and convolution_backward, whose composite kernels choose by device.
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
      library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_card>());
  }
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) { implement(m, c10::DispatchKey::CPU); }
TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) { implement(m, c10::DispatchKey::SparseCPU); }

TORCH_LIBRARY(emulated_card, m) {
  m.def("set_sync_debug_mode(int mode) -> ()", [](int64_t mode) { sync_mode = mode; });
}
