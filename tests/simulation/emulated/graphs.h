// CUDA graphs: the operators that are called while a graph is captured, and their repetition on the same memory.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "kernels.h"

namespace emulated {

class Graph {
 public:
  // Operators run while they are captured, since their results need sizes; `end` restores the memory that they wrote.
  void begin() { generator_ = at::detail::getDefaultCPUGenerator().get_state(); }

  // An operator is about to be called on the CPU with what lies on the stack, on memory of the card.
  void before(const c10::OperatorHandle& op, const Call& call, const Memory& used, bool sparse, const Stack& stack) {
    TORCH_CHECK_NOT_IMPLEMENTED(!sparse, "the emulated card captures no sparse tensors");
    for (auto& [on_card, host] : call.tensors()) keep(on_card.storage());
    // Tensors of the host enter with their values at capture, tensors of the card with their memory.
    Stack arguments(stack.end() - op.schema().arguments().size(), stack.end());
    for (auto& argument : arguments)
      argument = changed(argument, [&](const Tensor& tensor) {
        for (auto& one : call.from_host())
          if (one.is_same(tensor)) return tensor.clone();
        return tensor;
      });
    steps_.push_back({op, std::move(arguments), {}, used, call.home()});
  }

  // The results, on the CPU, the memory that they lie in on the card, and whether the operator wrote it.
  void after(const Stack& results, const Memory& held, bool written) {
    for (auto& result : results)
      for (auto& tensor : tensors_of(result)) steps_.back().results.push_back(tensor);
    for (auto& [storage, write] : held) {
      if (written) steps_.back().used.emplace_back(storage, true);
      if (!kept_.count(storage.unsafeGetStorageImpl())) made_.emplace(storage.unsafeGetStorageImpl(), storage);
    }
  }

  // The capture has failed: CUDA refuses to end it, and there is nothing to replay.
  void fail() { failed_ = true; }

  // Returns whether the capture has not failed.
  bool end() {
    for (auto& [key, saved] : kept_)
      std::memcpy(saved.storage.mutable_data(), saved.bytes.data(), std::min(saved.bytes.size(), saved.storage.nbytes()));
    // Results of a graph are undefined before its first replay.
    for (auto& [key, storage] : made_) std::memset(storage.mutable_data(), 0xff, storage.nbytes());
    at::Generator(at::detail::getDefaultCPUGenerator()).set_state(generator_);
    return !failed_;
  }

  void replay() {
    auto& schedule = Schedule::get();
    for (auto& step : steps_) {
      Stack stack = step.arguments;
      const auto started = now();
      const auto operation = schedule.begin(step.device);
      schedule.use(step.device, operation, step.used);
      compute(step.op, false, &stack);
      auto old = step.results.begin();
      for (auto& result : stack)
        for (auto& tensor : tensors_of(result)) overwrite(*old++, tensor);
      schedule.end(step.device, now() - started);
    }
  }

 private:
  struct Step {
    c10::OperatorHandle op;
    Stack arguments;  // on the CPU
    std::vector<Tensor> results;
    Memory used;
    c10::Device device;
  };
  struct Saved {
    c10::Storage storage;
    std::vector<char> bytes;
  };

  void keep(const c10::Storage& storage) {
    auto* key = storage.unsafeGetStorageImpl();
    if (made_.count(key) || kept_.count(key)) return;
    auto* data = static_cast<const char*>(storage.data());
    kept_.emplace(key, Saved{storage, std::vector<char>(data, data + storage.nbytes())});
  }

  static void overwrite(const Tensor& old, const Tensor& made) {
    if (!old.defined() || old.numel() == 0 || old.storage().data() == made.storage().data()) return;
    at::AutoDispatchBelowADInplaceOrView below;
    old.copy_(made);
  }

  bool failed_ = false;
  Tensor generator_;
  std::vector<Step> steps_;
  std::map<c10::StorageImpl*, Saved> kept_;         // memory from before the capture
  std::map<c10::StorageImpl*, c10::Storage> made_;  // memory of the graph's own
};

inline std::unique_ptr<Graph> graph_in_capture;

}  // namespace emulated
