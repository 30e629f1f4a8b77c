// The cards: how many there are, which one and which stream a thread uses, and when their work is done.
//
// Operations run when they are called. Streams are emulated in two ways: memory that a stream uses without having waited
// for the stream that wrote or reads it is filled with NaN, and each stream has a time at which a card would be done,
// which a delay (torch.cuda._sleep) moves.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

// The device type whose place is taken.
#ifndef EMULATED_TYPE
#define EMULATED_TYPE CUDA
#endif

namespace emulated {

constexpr auto kType = c10::DeviceType::EMULATED_TYPE;
constexpr int kMost = 8;
const c10::Device kHost(c10::DeviceType::CPU);

inline c10::DeviceIndex cards() {
  static const int asked = std::getenv("EMULATED_CARDS") ? std::atoi(std::getenv("EMULATED_CARDS")) : 1;
  return static_cast<c10::DeviceIndex>(std::clamp(asked, 1, kMost));
}

inline thread_local c10::DeviceIndex current_card = 0;
inline thread_local std::array<c10::StreamId, kMost> current_streams{};

inline c10::Device card(c10::DeviceIndex index) {
  return c10::Device(kType, index < 0 ? current_card : index);
}

inline c10::Stream current_stream(c10::Device device) {
  device = card(device.index());
  return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
}

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// 0: waits are allowed, 1: they warn, 2: they raise (torch.cuda.set_sync_debug_mode).
inline int sync_mode = 0;

// --- The order of operations: a vector clock for each stream, one for the host, and the last uses of each block

// The last operation of each stream that is known to be done before what comes next, and when all of them are.
struct Past {
  std::map<int64_t, uint64_t> seen;
  double until = 0;

  void join(const Past& other) {
    for (auto& [stream, operation] : other.seen) seen[stream] = std::max(seen[stream], operation);
    until = std::max(until, other.until);
  }
};

// The operations that used some memory: the last one that wrote it, and of each stream the last one that read it.
struct Uses {
  std::pair<int64_t, uint64_t> written{0, 0};
  std::map<int64_t, uint64_t> read;

  bool known_to(const Past& past, bool write) const {
    const auto done = [&](int64_t stream, uint64_t operation) {
      auto found = past.seen.find(stream);
      return operation == 0 || (found != past.seen.end() && found->second >= operation);
    };
    bool known = done(written.first, written.second);
    if (write)
      for (auto& [stream, operation] : read) known = known && done(stream, operation);
    return known;
  }
};

// Memory of cards that an operation uses, and whether it writes it.
using Memory = std::vector<std::pair<c10::Storage, bool>>;

// Bytes in use on each card, and the most that were since the peak was reset.
struct Counter {
  std::atomic<int64_t> now{0}, peak{0};

  void add(int64_t bytes) {
    const int64_t total = now += bytes;
    int64_t before = peak;
    while (before < total && !peak.compare_exchange_weak(before, total)) {
    }
  }
};
inline std::array<Counter, kMost> memory_in_use;

// Memory of a card: the host's memory behind it, and who used it.
class Block {
 public:
  Block(c10::Storage lender, c10::Device device) : lender_(std::move(lender)), device_(device) {
    constexpr int64_t kRounding = 512;  // c10/cuda/CUDACachingAllocator: kMinBlockSize
    if (device_.type() == kType)
      bytes_ = (static_cast<int64_t>(lender_.nbytes()) + kRounding - 1) / kRounding * kRounding;
    if (bytes_ > 0) memory_in_use[device_.index()].add(bytes_);
  }
  ~Block() {
    if (bytes_ > 0) memory_in_use[device_.index()].add(-bytes_);
  }
  Block(const Block&) = delete;

  Uses uses;

 private:
  c10::Storage lender_;
  c10::Device device_;
  int64_t bytes_ = 0;
};

inline void drop(void* block) { delete static_cast<Block*>(block); }

class Schedule {
 public:
  static Schedule& get() {
    static Schedule schedule;
    return schedule;
  }

  c10::Stream add_stream(c10::Device device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return c10::Stream(c10::Stream::UNSAFE, card(device.index()), ++streams_);
  }

  // Whether one stream orders all operations.
  bool has_one_stream() const { return streams_ == 0 && cards() == 1; }

  // One operation of the device's current stream begins; it has to be followed by `use` of its memory and `end`.
  uint64_t begin(c10::Device device) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& past = stream(current_stream(device));
    past.join(host_);
    const auto number = ++operations_;
    past.seen[key(current_stream(device))] = number;
    return number;
  }

  // Memory that is used without having waited for its last use holds NaN from then on.
  void use(c10::Device device, uint64_t operation, const Memory& memory) {
    if (has_one_stream()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto by = current_stream(device);
    for (auto& [storage, write] : memory) {
      auto& held = storage.data_ptr();
      if (held.get_deleter() != &drop) continue;
      auto& uses = static_cast<Block*>(held.get_context())->uses;
      if (!uses.known_to(stream(by), write)) std::memset(held.get(), 0xff, storage.nbytes());
      if (write) uses = Uses{{key(by), operation}, {}};
      else uses.read[key(by)] = operation;
    }
  }

  void end(c10::Device device, double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& past = stream(current_stream(device));
    past.until = std::max(past.until, now() - seconds) + seconds;
  }

  // The device's current stream is busy for a while before what comes next.
  void delay(c10::Device device, double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& past = stream(current_stream(device));
    past.until = std::max(past.until, now()) + seconds;
  }

  void wait_for_each_other(c10::Device one, c10::Device other) {
    Past both = record(current_stream(one));
    both.join(record(current_stream(other)));
    block(current_stream(one), both);
    block(current_stream(other), both);
  }

  Past record(c10::Stream by) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto past = stream(by);
    past.until = std::max(past.until, now());
    return past;
  }

  void block(c10::Stream waiting, const Past& past) {
    std::lock_guard<std::mutex> lock(mutex_);
    stream(waiting).join(past);
  }

  // The host waits for it.
  void wait(const Past& past) {
    const double left = past.until - now();
    if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
    std::lock_guard<std::mutex> lock(mutex_);
    host_.join(past);
  }

  void wait(c10::Device device) {
    Past all;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [by, past] : pasts_)
        if (by % kMost == device.index()) all.join(past);
    }
    wait(all);
  }

 private:
  static int64_t key(c10::Stream by) { return by.id() * kMost + by.device_index(); }
  Past& stream(c10::Stream by) { return pasts_[key(by)]; }

  std::mutex mutex_;
  std::map<int64_t, Past> pasts_;
  Past host_;
  c10::StreamId streams_ = 0;  // beside the default ones
  uint64_t operations_ = 0;
};

// --- Memory

// The memory of a storage, said to lie on `device`; it lives as long as either.
inline c10::DataPtr borrow(const c10::Storage& lender, c10::Device device) {
  void* data = lender.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  return c10::DataPtr(data, new Block(lender, device), &drop, device);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Storage host(c10::Storage::use_byte_size_t{}, bytes, c10::GetAllocator(c10::DeviceType::CPU), true);
    return borrow(host, card(-1));
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }
};
inline Allocator allocator;

}  // namespace emulated
