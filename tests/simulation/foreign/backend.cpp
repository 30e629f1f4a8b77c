// A backend of a third party for torch's key PrivateUse1, as small as one can be that trains a model: tensors in the
// host's memory, the CPU's kernels behind every operator, and the autocast rules that autocast_mode.h gives to CUDA, or
// rules by name for each operator.
//
// The memory of each tensor is lent to a tensor on the CPU for one call (../emulated/lending.h).
#define EMULATED_TYPE PrivateUse1
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "../emulated/lending.h"
#include "../emulated/sums.h"

namespace {

using namespace emulated;
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return card(0); }
  c10::Device getDevice() const override { return card(0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

bool makes_generators = true;

struct Hooks final : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return makes_generators ? at::detail::createCPUGenerator() : at::PrivateUse1HooksInterface::getNewGenerator(index);
  }
  at::Device getDeviceFromPtr(void*) const override { return card(0); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::Storage made(c10::Storage::use_byte_size_t{}, bytes, &allocator, true);
    std::memcpy(made.mutable_data(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
        std::move(made.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool prepared = [] {
  c10::SetAllocator(kType, &allocator, 1);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// The operators that torch offers a backend for its convolutions, by those that they stand for.
c10::OperatorHandle known(const c10::OperatorHandle& op, Stack* stack) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto& name = op.schema().name();
  if (name == "aten::convolution_overrideable") return dispatcher.findSchemaOrThrow("aten::convolution", "");
  if (name != "aten::convolution_backward_overrideable") return op;
  const auto sizes_of_bias = stack->end() - static_cast<int64_t>(op.schema().arguments().size()) + 3;
  stack->insert(sizes_of_bias, IValue());
  return dispatcher.findSchemaOrThrow("aten::convolution_backward", "");
}

bool fuses_steps = false;

// How names of operators begin that have no kernel; none, unless a variant says so.
std::vector<std::string>& missing_kernels() {
  static std::vector<std::string> names;
  return names;
}

// What is left out, as a small backend would: kernels that fuse several operators; those of optimizers unless a variant
// has them.
bool lacks(const std::string& name) {
  for (const auto& part : missing_kernels())
    if ((name + "$").rfind("aten::" + part, 0) == 0) return true;
  if (fuses_steps && name.rfind("aten::_fused_", 0) == 0) return false;
  for (auto part : {"aten::_fused_", "aten::_thnn_fused_"})
    if (name.rfind(part, 0) == 0) return true;
  return false;
}

// The types that no tensor on the device can have; none, unless a variant says so.
std::unordered_set<ScalarType>& missing_types() {
  static std::unordered_set<ScalarType> types;
  return types;
}

Tensor of_a_type_that_it_has(const Tensor& tensor) {
  TORCH_CHECK_TYPE(!tensor.defined() || !missing_types().count(tensor.scalar_type()),
                   "Cannot make a tensor of ", tensor.scalar_type(), " on the device, which does not support it");
  return tensor;
}

// What a correct backend may do otherwise than the CPU; nothing, unless a variant says so.
std::unordered_set<std::string>& habits() {
  static std::unordered_set<std::string> names;
  return names;
}

bool has(const std::string& habit) { return habits().count(habit) > 0; }

// Sets the processor to take subnormal float32 numbers for zero, where that is a habit.
struct Flushing {
  Flushing() { if (has("subnormals are zero")) at::globalContext().setFlushDenormal(true); }
  ~Flushing() { if (has("subnormals are zero")) at::globalContext().setFlushDenormal(false); }
};

// A result that is no view, as the habits have it.
Tensor by_habit(const std::string& name, const std::vector<Tensor>& arguments, const Tensor& tensor) {
  static const std::unordered_set<std::string> functions{
      "aten::exp", "aten::exp2", "aten::expm1", "aten::log", "aten::log2", "aten::log10", "aten::log1p", "aten::sin",
      "aten::cos", "aten::tan", "aten::tanh", "aten::sigmoid", "aten::erf", "aten::erfc", "aten::pow", "aten::rsqrt",
      "aten::gelu", "aten::silu", "aten::mish", "aten::elu", "aten::_softmax", "aten::_log_softmax", "aten::atan",
      "aten::asin", "aten::acos", "aten::sinh", "aten::cosh", "aten::atan2", "aten::logsumexp", "aten::logaddexp"};
  if (!tensor.defined() || tensor.layout() != c10::kStrided) return tensor;
  for (const auto& one : arguments)
    if (one.defined() && one.layout() == c10::kStrided && one.storage().is_alias_of(tensor.storage())) return tensor;
  if (has("functions are off by a rounding") && functions.count(name) && tensor.scalar_type() == at::kFloat) {
    const auto bits = tensor.view(at::kInt);
    return (bits + at::logical_and(at::bitwise_and(bits, 0xfff) != 0, tensor.isfinite()).to(at::kInt)).view(at::kFloat);
  }
  for (auto part : {"empty", "copy", "clone", "like", "set"})  // what is asked for a layout
    if (name.find(part) != std::string::npos) return tensor;
  return has("results are contiguous") ? tensor.contiguous() : tensor;
}

void on_device(const c10::OperatorHandle& asked, Stack* stack) {
  const auto& wanted = asked.schema().name();
  TORCH_CHECK_NOT_IMPLEMENTED(!lacks(wanted), "Could not run '", wanted,
                              "' with arguments from the 'PrivateUse1' backend.");
  const auto op = known(asked, stack);
  const auto& schema = op.schema();
  const Arguments given(stack->end() - schema.arguments().size(), stack->end());
  Call call;
  lend(schema, given, call, stack);
  bool sparse = schema.name().find("sparse") != std::string::npos;
  sparse = sparse || call.any([](const Tensor& tensor) { return tensor.layout() == c10::kSparse; });
  std::vector<Tensor> arguments;  // on the CPU, for habits
  if (!habits().empty())
    for (const auto& value : Arguments(stack->end() - given.size(), stack->end()))
      for (const auto& tensor : tensors_of(value)) arguments.push_back(tensor);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    Flushing flushing;
    if (sparse) op.callBoxed(stack);
    else as_a_device(op, Arguments(stack->end() - given.size(), stack->end()), stack);
  }
  call.settle();
  if (!call.gives_to_card()) return;
  for (size_t place = stack->size() - schema.returns().size(); place < stack->size(); place++)
    (*stack)[place] = changed((*stack)[place], [&](const Tensor& tensor) {
      if (habits().empty()) return call.given_back(of_a_type_that_it_has(tensor));
      at::AutoDispatchBelowADInplaceOrView below;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      return call.given_back(of_a_type_that_it_has(by_habit(schema.name(), arguments, tensor)));
    });
}

Tensor refused_loss(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false, "binary_cross_entropy is unsafe to autocast; use binary_cross_entropy_with_logits");
}

torch::Library& rules() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  return library;
}

// The lists of autocast_mode.h, by its macros for backends out of the tree.
void rules_of_cuda() {
  auto& m = rules();
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
  m.impl(TORCH_SELECTIVE_NAME("aten::binary_cross_entropy"), &refused_loss);
}

// One boxed kernel for each policy, whatever the operator: what a backend does that has lists of its own.
using Wanted = ScalarType (*)(const Arguments&);

ScalarType lower(const Arguments&) { return at::autocast::get_autocast_dtype(kType); }

ScalarType single(const Arguments&) { return ScalarType::Float; }

ScalarType widest(const Arguments& given) {
  auto found = lower(given);
  for (auto& value : given)
    changed(value, [&](const Tensor& tensor) {
      if (tensor.defined()) found = at::autocast::prioritize(found, tensor, kType);
      return tensor;
    });
  return found;
}

template <Wanted wanted>
void ruled(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const auto first = stack->end() - static_cast<int64_t>(op.schema().arguments().size());
  const auto dtype = wanted(Arguments(first, stack->end()));
  for (auto value = first; value != stack->end(); ++value)
    *value = changed(*value, [&](const Tensor& tensor) {
      return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kType) : tensor;
    });
  op.callBoxed(stack);
}

void rule(const std::string& overload, const std::string& policy) {
  auto kernel = policy == "lower_precision" ? torch::CppFunction::makeFromBoxedFunction<&ruled<lower>>()
                      : policy == "fp32"          ? torch::CppFunction::makeFromBoxedFunction<&ruled<single>>()
                      : policy == "widest"        ? torch::CppFunction::makeFromBoxedFunction<&ruled<widest>>()
                                                  : throw std::invalid_argument("no kernel for the policy " + policy);
  rules().impl(("aten::" + overload).c_str(), std::move(kernel));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_device>()); }
TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_device>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  implement<&on_device>(m, c10::DispatchKey::CPU);
  for (auto name : {"aten::convolution_overrideable", "aten::convolution_backward_overrideable"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_device>());
}
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) { implement<&on_device>(m, c10::DispatchKey::SparseCPU); }

TORCH_LIBRARY(toyacc, m) {
  m.def("lack(ScalarType type) -> ()", [](ScalarType type) { missing_types().insert(type); });
  m.def("take_up(str habit) -> ()", [](std::string habit) { habits().insert(habit); });
  m.def("lack_kernels(str names) -> ()", [](std::string names) { missing_kernels().push_back(names); });
  m.def("make_no_generators() -> ()", [] { makes_generators = false; });
  m.def("fuse() -> ()", [] { fuses_steps = true; });
  m.def("rules_of_cuda() -> ()", &rules_of_cuda);
  m.def("rule(str overload, str policy) -> ()", [](std::string overload, std::string policy) { rule(overload, policy); });
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
