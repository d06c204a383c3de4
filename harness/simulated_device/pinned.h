// Copies between a device and pinned memory for which the host does not wait.
//
// The host reads and writes its memory unseen. So what a copy brings to the host is kept back until the host has waited
// for the copy, and what a copy has taken from the host must be there unchanged when the host has waited.
#pragma once
#include <ATen/ATen.h>
#include <cstring>
#include <list>
#include <mutex>

#include "order.h"

namespace simulated {

class PinnedCopies {
 public:
  explicit PinnedCopies(Order& order) : order_(order) {}

  // A copy to the host that was put onto a stream at a time.
  void bring(const at::Tensor& values, const at::Tensor& pinned, int stream, uint64_t time) {
    Lock lock(mutex_);
    copies_.push_back({pinned, values.clone(), stream, time, true});
    if (pinned.is_floating_point()) pinned.fill_(std::nan(""));
    else pinned.fill_(pinned.scalar_type() == at::kBool ? 1 : -1);
  }

  // A copy from the host.
  void take(const at::Tensor& pinned, int stream, uint64_t time) {
    Lock lock(mutex_);
    copies_.push_back({pinned, pinned.clone(), stream, time, false});
  }

  // The host has waited for all that a clock knows.
  void end(const Clock& clock) {
    end_those([&](const Copy& copy) { return knows(clock, copy.stream, copy.time); });
  }
  void end_all() {
    end_those([](const Copy&) { return true; });
  }

  // Memory will be read or written by a device, in the order that clocks check.
  void end(const at::Tensor& pinned) {
    end_those([&](const Copy& copy) { return copy.pinned.storage().data() == pinned.storage().data(); });
  }

 private:
  using Lock = std::lock_guard<std::mutex>;
  struct Copy {
    at::Tensor pinned, values;
    int stream;
    uint64_t time;
    bool to_host;
  };

  template <typename Condition>
  void end_those(Condition is_meant) {
    std::list<Copy> ended;  // freed without the lock, as Python's may be needed
    Lock lock(mutex_);
    for (auto each = copies_.begin(); each != copies_.end();) {
      auto copy = each++;
      if (!is_meant(*copy)) continue;
      if (copy->to_host) copy->pinned.copy_(copy->values);
      else if (!is_same(copy->pinned, copy->values)) order_.report("write by the host to pinned memory, without order behind the read by copy", copy->stream);
      ended.splice(ended.end(), copies_, copy);
    }
  }

  static bool is_same(const at::Tensor& first, const at::Tensor& second) {
    auto one = first.contiguous(), other = second.contiguous();
    return memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
  }

  Order& order_;
  std::mutex mutex_;
  std::list<Copy> copies_;
};

}  // namespace simulated
