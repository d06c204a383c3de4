// The order of work on streams, and the search for accesses to memory without order.
//
// A clock says, for each stream, how many of its accesses are known to be over. Every stream has one, for what is put
// onto it next; an event is a copy of one; the host has one, of what it has waited for. Two accesses to the same bytes
// on two streams, one of them a write, are a race if the clock of the later one does not know the earlier one.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace simulated {

using Clock = std::vector<uint64_t>;

inline void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) into[i] = std::max(into[i], other[i]);
}

inline bool knows(const Clock& clock, int stream, uint64_t time) {
  return stream < (int)clock.size() && clock[stream] >= time;
}

struct Access {
  uintptr_t begin, end;
  int stream;
  uint64_t time;
  bool writes;
  std::string what;
};

// Memory as it was allocated. Accesses of earlier owners stay, so that use after it was freed is a race, too.
struct Block {
  size_t nbytes;
  int stream;                 // where it was allocated
  std::set<int> used_by;      // other streams, by record_stream
  std::vector<Access> accesses;
};

class Order {
 public:
  int new_stream() {
    Lock lock(mutex_);
    clocks_.emplace_back();
    return (int)clocks_.size() - 1;
  }

  Clock clock_of(int stream) {
    Lock lock(mutex_);
    return now(stream);
  }

  // The number of accesses that were put onto a stream so far.
  uint64_t time_of(int stream) { return clock_of(stream)[stream]; }

  void follow(int stream, const Clock& clock) {
    Lock lock(mutex_);
    join(clocks_[stream], clock);
  }

  // The host has waited for `clock`: all that it puts onto any stream from now on is later.
  void host_follows(const Clock& clock) {
    Lock lock(mutex_);
    join(host_, clock);
  }

  void host_follows_all() {
    Lock lock(mutex_);
    for (auto& clock : clocks_) join(host_, clock);
    for (auto& [begin, block] : parked_) {
      block.used_by.clear();
      block.accesses.clear();
      free_.emplace(std::make_pair(block.nbytes, block.stream), begin);
      blocks_.emplace(begin, std::move(block));
    }
    parked_.clear();
  }

  // An access that is put onto `stream`; -1 is the host, which accesses memory at once.
  void access(const void* data, size_t nbytes, bool writes, const std::string& what, int stream) {
    Lock lock(mutex_);
    uintptr_t begin = (uintptr_t)data, end = begin + nbytes;
    Block* block = nbytes ? block_of(begin) : nullptr;
    if (block == nullptr) return;
    accesses++;
    Clock known = stream < 0 ? host_ : now(stream);
    for (auto& other : block->accesses) {
      bool apart = other.end <= begin || end <= other.begin || other.stream == stream;
      if (!apart && (writes || other.writes) && !knows(known, other.stream, other.time) && races.size() < MAX_RACES)
        races.push_back((writes ? "write by " : "read by ") + what + " on " + name_of(stream) + ", without order behind the " +
                        (other.writes ? "write by " : "read by ") + other.what + " on " + name_of(other.stream));
    }
    if (stream < 0) return;  // whatever is put onto a stream later is behind it
    uint64_t time = ++clocks_[stream][stream];
    auto is_superseded = [&](const Access& other) {
      bool covered = begin <= other.begin && other.end <= end && knows(known, other.stream, other.time);
      return covered && (writes || (!other.writes && other.stream == stream));
    };
    auto& all = block->accesses;
    all.erase(std::remove_if(all.begin(), all.end(), is_superseded), all.end());
    all.push_back({begin, end, stream, time, writes, what});
  }

  // Memory for `stream`, as a caching allocator gives it: what was freed on this stream is used again at once.
  void* allocate(size_t nbytes, int stream) {
    Lock lock(mutex_);
    nbytes = (nbytes + ALIGN - 1) / ALIGN * ALIGN;
    if (auto found = free_.find({nbytes, stream}); found != free_.end()) {
      uintptr_t begin = found->second;
      free_.erase(found);
      reused++;
      taken_ += nbytes;
      return (void*)begin;
    }
    taken_ += nbytes;
    return add(nbytes, stream);
  }

  void release(void* data) {
    Lock lock(mutex_);
    auto found = blocks_.find((uintptr_t)data);
    if (found == blocks_.end()) return;
    Block& block = found->second;
    taken_ -= block.nbytes;
    if (block.used_by.empty()) {
      free_.emplace(std::make_pair(block.nbytes, block.stream), found->first);
    } else {  // until the host has waited for the device
      parked_.emplace(found->first, std::move(block));
      blocks_.erase(found);
    }
  }

  void record_stream(const void* data, int stream) {
    Lock lock(mutex_);
    Block* block = block_of((uintptr_t)data);
    if (block != nullptr && block->stream != stream) block->used_by.insert(stream);
  }

  // Memory of the host that devices access.
  void* pin(size_t nbytes) {
    Lock lock(mutex_);
    void* data = add((nbytes + ALIGN - 1) / ALIGN * ALIGN, -1);
    pinned_.insert(data);
    return data;
  }

  void unpin(void* data) {
    Lock lock(mutex_);
    blocks_.erase((uintptr_t)data);
    pinned_.erase(data);
    free(data);
  }

  bool is_pinned(const void* data) {
    Lock lock(mutex_);
    auto found = blocks_.upper_bound((uintptr_t)data);
    if (found == blocks_.begin()) return false;
    --found;
    return (uintptr_t)data < found->first + found->second.nbytes && pinned_.count((void*)found->first) > 0;
  }

  // A race with something that the host has done.
  void report(const std::string& what, int stream) {
    Lock lock(mutex_);
    if (races.size() < MAX_RACES) races.push_back(what + " on " + name_of(stream));
  }

  size_t taken_nbytes() {
    Lock lock(mutex_);
    return taken_;
  }

  std::vector<std::string> races;
  uint64_t accesses = 0, reused = 0;

 private:
  using Lock = std::lock_guard<std::mutex>;
  static constexpr size_t ALIGN = 512, MAX_RACES = 1000;

  static std::string name_of(int stream) { return stream < 0 ? "the host" : "stream " + std::to_string(stream); }

  Clock& now(int stream) {
    auto& clock = clocks_[stream];
    if (clock.size() < clocks_.size()) clock.resize(clocks_.size());
    join(clock, host_);
    return clock;
  }

  Block* block_of(uintptr_t at) {
    auto found = blocks_.upper_bound(at);
    if (found == blocks_.begin()) return nullptr;
    --found;
    return at < found->first + found->second.nbytes ? &found->second : nullptr;
  }

  void* add(size_t nbytes, int stream) {
    void* data = nullptr;
    if (posix_memalign(&data, ALIGN, std::max(nbytes, ALIGN))) throw std::bad_alloc();
    blocks_[(uintptr_t)data] = Block{std::max(nbytes, ALIGN), stream, {}, {}};
    return data;
  }

  std::mutex mutex_;
  std::vector<Clock> clocks_;
  Clock host_;
  std::map<uintptr_t, Block> blocks_, parked_;
  std::multimap<std::pair<size_t, int>, uintptr_t> free_;
  std::set<void*> pinned_;
  size_t taken_ = 0;
};

}  // namespace simulated
