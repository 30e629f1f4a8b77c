// An emulated CUDA card: the tensors, guards, autograd threads and autocast kernels of CUDA, with the CPU's kernels
// behind them. Built for the CPU builds of torch, in which the dispatch key CUDA has no kernels and no device.
//
// A kernel of the key CUDA is one boxed fallback. It lends the memory of each tensor on the card to a tensor on the
// CPU, calls the operator on those, and gives the results back to the card (lending.h). Operands of several devices are
// refused, as CUDA refuses them. What CUDA computes by kernels that a CPU lacks is in kernels.h, and so are the promises
// that its kernels are known to break, so that waivers find what they name. Streams and the time of a card are in
// device.h, graphs in graphs.h.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>
#include <vector>

#include "graphs.h"

namespace {

using namespace emulated;

// --- The device, as torch's C++ code asks for it

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return card(current_card); }
  void setDevice(c10::Device device) const override { current_card = card(device.index()).index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Stream getStream(c10::Device device) const noexcept override { return current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, card(device.index()));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return Schedule::get().add_stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return Schedule::get().add_stream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto before = current_stream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return cards(); }
  void record(void** event, const c10::Stream& by, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Past;
    *static_cast<Past*>(*event) = Schedule::get().record(by);
  }
  void block(void* event, const c10::Stream& waiting) const override {
    if (event != nullptr) Schedule::get().block(waiting, *static_cast<Past*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Past*>(event)->until <= now(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Past*>(event); }
  bool queryStream(const c10::Stream& stream) const override { return Schedule::get().record(stream).until <= now(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    Schedule::get().wait(Schedule::get().record(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { Schedule::get().wait(card(device)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Schedule::get().wait(*static_cast<Past*>(event));
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return cards(); }
  int getNumGPUs() const override { return cards(); }
  c10::DeviceIndex current_device() const override { return current_card; }
  c10::DeviceIndex getCurrentDevice() const override { return current_card; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice(card(index)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice(card(index)); }
  void deviceSynchronize(c10::DeviceIndex index) const override { Schedule::get().wait(card(index)); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
};

const bool allocates = [] {
  c10::SetAllocator(c10::DeviceType::CUDA, &allocator, 1);
  return true;
}();

// --- What CUDA refuses

// Operators that take operands of a card and of the host.
bool mixes(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::set_", "aten::set_data", "aten::index",
      "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_amp_update_scale_",
      "aten::lift_fresh", "aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::_use_cudnn_ctc_loss",
      "aten::_use_miopen_ctc_loss"};
  return names.count(name) > 0;
}

// Operators that copy from device to device; lists of foreach may hold tensors of several, each a step by itself.
bool crosses(const std::string& name) {
  return name == "aten::copy_" || name == "aten::_to_copy" || name == "aten::set_data" ||
      name.rfind("aten::_foreach_", 0) == 0;
}

void refuse(const std::string& name, const Call& call) {
  const char* message = "Expected all tensors to be on the same device, but found at least two devices, ";
  const auto home = call.home();
  for (auto& [on_card, host] : call.tensors())
    TORCH_CHECK(on_card.device() == home || crosses(name), message, home, " and ", on_card.device(), "! (", name, ")");
  // A number on the host may stand beside tensors of a card, but not where no type is promoted.
  if (call.on_card() && !mixes(name))
    for (auto& tensor : call.from_host())
      TORCH_CHECK(tensor.dim() == 0 && name != "aten::equal", message, home, " and cpu! (", name, ")");
  if (name == "aten::_amp_foreach_non_finite_check_and_unscale_")
    TORCH_CHECK_NOT_IMPLEMENTED(!call.any([](const Tensor& t) { return t.scalar_type() == at::kBFloat16; }),
                                "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'");
}

// Fused optimizers read a rate that lies on the card as fp32.
void refuse_rates(const c10::FunctionSchema& schema, const Arguments& given) {
  if (schema.name().rfind("aten::_fused_", 0) != 0) return;
  for (size_t place = 0; place < given.size(); place++) {
    if (schema.arguments()[place].name() != "lr" || !given[place].isTensor()) continue;
    const auto rate = given[place].toTensor();
    TORCH_CHECK(rate.device() == kHost || rate.scalar_type() == at::kFloat, "expected scalar type Float but found ",
                rate.scalar_type());
  }
}

// Whether the host waits for the device: for a number, for how many results there are, or for a copy.
bool waits(const std::string& name, const Call& call, const Arguments& given) {
  static const std::unordered_set<std::string> names = {
      "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive"};
  if (name == "aten::copy_") return call.on_card() && !call.from_host().empty() && !given[2].toBool();
  if (name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_")
    return given.size() > 1 && given[1].isOptionalTensorList() &&
        call.any([](const Tensor& t) { return t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; });
  return names.count(name) > 0;
}

void refuse_wait() {
  if (graph_in_capture) {
    graph_in_capture->fail();
    TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing");
  }
  TORCH_CHECK(sync_mode != 2, "called a synchronizing CUDA operation");
  if (sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
}

// --- One operation

void note(const Tensor& tensor, bool write, Memory& memory) {
  if (!tensor.defined() || tensor.device().type() != c10::DeviceType::CUDA) return;
  if (tensor.layout() == c10::kSparse) {
    note(sparse_impl(tensor)->indices(), write, memory);
    note(sparse_impl(tensor)->values(), write, memory);
  } else {
    memory.emplace_back(tensor.storage(), write);
  }
}

// Whether an operator uses the memory of its operands and results; views and shapes are the host's.
bool uses_memory(const c10::FunctionSchema& schema) {
  static const std::unordered_set<std::string> untouched = {
      "aten::set_", "aten::set_data", "aten::resize_", "aten::resize_as_", "aten::empty_like", "aten::new_empty",
      "aten::new_empty_strided"};
  for (auto& made : schema.returns())
    if (made.alias_info() != nullptr && !made.alias_info()->isWrite()) return false;
  return untouched.count(schema.name()) == 0;
}

Memory memory_of(const c10::FunctionSchema& schema, const Arguments& given) {
  Memory memory;
  for (size_t place = 0; place < given.size(); place++) {
    auto* alias = schema.arguments()[place].alias_info();
    for (auto& tensor : tensors_of(given[place])) note(tensor, alias != nullptr && alias->isWrite(), memory);
  }
  return memory;
}

// Puts results on the card; returns the memory that they lie in.
Memory give_back(const c10::FunctionSchema& schema, const Arguments& given, Call& call, Stack* stack) {
  Memory memory;
  if (!call.gives_to_card()) return memory;
  const bool each = schema.name().rfind("aten::_foreach_", 0) == 0;
  for (size_t place = stack->size() - schema.returns().size(); place < stack->size(); place++) {
    size_t number = 0;
    (*stack)[place] = changed((*stack)[place], [&](const Tensor& tensor) {
      if (each) call.ask_for(given[0].toTensorVector()[number++].device());
      auto made = call.given_back(tensor);
      note(made, true, memory);
      return made;
    });
  }
  return memory;
}

void on_card(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const Arguments given(stack->end() - schema.arguments().size(), stack->end());
  Call call;
  lend(schema, given, call, stack);
  refuse(schema.name(), call);
  refuse_rates(schema, given);
  const bool waiting = waits(schema.name(), call, given);
  if (waiting) refuse_wait();
  const bool sparse = call.any([](const Tensor& t) { return t.layout() == c10::kSparse; }) ||
      schema.name().find("sparse") != std::string::npos;
  const auto device = call.home();
  auto& schedule = Schedule::get();
  const bool followed = (graph_in_capture || !schedule.has_one_stream()) && uses_memory(schema);
  const auto used = followed ? memory_of(schema, given) : Memory();
  if (crosses(schema.name()))
    for (auto& [on_card, host] : call.tensors())
      if (on_card.device() != device) schedule.wait_for_each_other(on_card.device(), device);
  const auto started = now();
  const auto operation = schedule.begin(device);
  if (graph_in_capture) graph_in_capture->before(op, call, used, sparse, *stack);
  else schedule.use(device, operation, used);
  compute(op, sparse, stack);
  call.settle();
  const Stack results(stack->end() - schema.returns().size(), stack->end());
  const auto held = give_back(schema, given, call, stack);
  if (graph_in_capture) graph_in_capture->after(results, held, followed);
  else if (followed) schedule.use(device, operation, held);
  schedule.end(device, now() - started);
  if (waiting) schedule.wait(schedule.record(current_stream(device)));
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

TORCH_LIBRARY_IMPL(aten, CUDA, m) { implement<&on_card>(m, c10::DispatchKey::CPU); }
TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) { implement<&on_card>(m, c10::DispatchKey::SparseCPU); }


// --- What the Python side asks for (cuda.py)

namespace {

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, card(static_cast<c10::DeviceIndex>(device)), id);
}

// Runs and returns nullptr, or what it raised in words.
template <class Work>
const char* told(Work work) {
  static thread_local std::string message;
  try {
    work();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

extern "C" {

int emulated_cards() { return cards(); }
int emulated_current() { return current_card; }
void emulated_set_current(int index) { current_card = card(static_cast<c10::DeviceIndex>(index)).index(); }
void emulated_set_sync_mode(int mode) { sync_mode = mode; }

int64_t emulated_new_stream(int device) { return Schedule::get().add_stream(card(device)).id(); }
int64_t emulated_stream(int device) { return current_stream(card(device)).id(); }
void emulated_set_stream(int device, int64_t id) { current_streams[card(device).index()] = id; }
void emulated_delay(int device, double seconds) { Schedule::get().delay(card(device), seconds); }
void emulated_synchronize(int device) { Schedule::get().wait(card(device)); }

void* emulated_record(int device, int64_t id) { return new Past(Schedule::get().record(stream_of(device, id))); }
void emulated_block(void* event, int device, int64_t id) {
  Schedule::get().block(stream_of(device, id), *static_cast<Past*>(event));
}
void emulated_wait(void* event) { Schedule::get().wait(*static_cast<Past*>(event)); }
double emulated_time(void* event) { return static_cast<Past*>(event)->until; }
double emulated_now() { return now(); }
void emulated_forget(void* event) { delete static_cast<Past*>(event); }

int64_t emulated_memory(int device) { return memory_in_use[device].now; }
int64_t emulated_peak(int device) { return memory_in_use[device].peak; }
void emulated_reset_peak(int device) { memory_in_use[device].peak = memory_in_use[device].now.load(); }

int emulated_is_capturing() { return graph_in_capture != nullptr; }
const char* emulated_begin_capture() {
  return told([] {
    TORCH_CHECK(!graph_in_capture, "CUDA error: a graph is being captured already");
    graph_in_capture = std::make_unique<Graph>();
    graph_in_capture->begin();
  });
}
// Null where an operation was refused meanwhile.
void* emulated_end_capture() {
  auto graph = std::move(graph_in_capture);
  return graph && graph->end() ? graph.release() : nullptr;
}
const char* emulated_replay(void* graph) {
  return told([&] { static_cast<Graph*>(graph)->replay(); });
}
void emulated_drop_graph(void* graph) { delete static_cast<Graph*>(graph); }
}
