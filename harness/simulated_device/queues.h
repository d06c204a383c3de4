// The work of streams: done at once by the host, or late, by a thread for each stream.
//
// Done at once, every stream is in the order of the host, one of the orders that are allowed. Done late, with delays
// drawn by a seed, work of streams without order runs in other orders, and a race becomes a wrong number.
#pragma once
#include <Python.h>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace simulated {

// Gives up Python's lock, if this thread has it, for as long as it waits for others that may need it.
class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

class Queues {
 public:
  using Task = std::function<void()>;

  // Let streams do their work late from now on, half of it behind delays of up to `delay_us` microseconds.
  void be_late(uint32_t seed, int delay_us) {
    Lock lock(mutex_);
    random_.seed(seed), delay_us_ = delay_us, late_ = true;
  }

  bool is_late() const { return late_; }

  void add_stream() {
    Lock lock(mutex_);
    queues_.push_back(std::make_unique<Queue>());
  }

  void put(int stream, Task task) {
    if (!late_) return task();
    Lock lock(mutex_);
    auto& queue = *queues_[stream];
    if (queue.put++ == 0) std::thread([this, stream] { serve(stream); }).detach();
    queue.tasks.push_back(std::move(task));
    queue.added.notify_one();
  }

  // The number of tasks that were put onto a stream so far.
  uint64_t count(int stream) {
    Lock lock(mutex_);
    return queues_[stream]->put;
  }

  bool is_done(int stream, uint64_t count) {
    Lock lock(mutex_);
    return queues_[stream]->done >= count;
  }

  // Wait for the first `count` tasks of a stream. Raises the first error of any task.
  void wait(int stream, uint64_t count) {
    if (!late_) return;
    WithoutGil without;
    Lock lock(mutex_);
    auto& queue = *queues_[stream];
    queue.ended.wait(lock, [&] { return queue.done >= count || !error_.empty(); });
    if (!error_.empty()) throw std::runtime_error("simulated device: " + error_);
  }

  void wait(int stream) { wait(stream, count(stream)); }

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Queue {
    std::deque<Task> tasks;
    uint64_t put = 0, done = 0;
    std::condition_variable added, ended;
  };

  void serve(int stream) {
    auto& queue = *queues_[stream];
    for (Lock lock(mutex_);;) {
      queue.added.wait(lock, [&] { return !queue.tasks.empty(); });
      Task task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
      int delay_us = random_() % 2 ? random_() % delay_us_ : 0;
      lock.unlock();
      if (delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      std::string error;
      try {
        task();
      } catch (const std::exception& raised) {
        error = raised.what();
      }
      task = nullptr;  // what it holds may need Python's lock to go
      lock.lock();
      queue.done++;
      queue.ended.notify_all();
      if (error.empty() || !error_.empty()) continue;
      error_ = error;
      for (auto& each : queues_) each->ended.notify_all();
    }
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::string error_;
  std::minstd_rand random_;
  int delay_us_ = 1;
  bool late_ = false;
};

}  // namespace simulated
