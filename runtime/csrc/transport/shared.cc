#include "transport/shared.h"

#include <algorithm>

namespace onnxpar {
namespace {

constexpr size_t kLine = 64;  // bytes of a cache line
// A member's piece of data in one step. A larger one would leave the caches, a smaller one wait more.
constexpr size_t kSlot = size_t{512} << 10;
// A block that is reduced and then copied, while it is in the first-level cache.
constexpr size_t kBlock = size_t{8} << 10;
// Up to this size every member reduces all of the data: twice the work, but half the waiting.
constexpr size_t kReplicated = size_t{4} << 10;
constexpr size_t kText = 512;  // the text of a call on which the members differ

static_assert(std::atomic<uint64_t>::is_always_lock_free, "atomics in shared memory");

void put(void* to, const void* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

// Calls f(begin, size) for each piece of at most `largest`, and at least once.
template <class F>
void pieces(size_t count, size_t largest, F f) {
  size_t begin = 0;
  do {
    f(begin, std::min(largest, count - begin));
    begin += largest;
  } while (begin < count);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

struct alignas(kLine) SharedGroup::Header {
  std::atomic<uint64_t> step;
  uint64_t signature[2];  // of the call, by the step's parity
};

size_t SharedGroup::bytes(int members) {
  return static_cast<size_t>(members) * (sizeof(Header) + 2 * kSlot);
}

SharedGroup::SharedGroup(std::byte* memory, int index, int members, int looks, Idle idle)
    : memory_(memory),
      index_(index),
      members_(members),
      looks_(looks),
      idle_(std::move(idle)),
      sources_(static_cast<size_t>(members)) {}

SharedGroup::Header& SharedGroup::header(int member) const {
  return reinterpret_cast<Header*>(memory_)[member];
}

std::byte* SharedGroup::slot(int member) const {
  const size_t number = 2 * static_cast<size_t>(member) + (step_ & 1);
  return memory_ + static_cast<size_t>(members_) * sizeof(Header) + number * kSlot;
}

void SharedGroup::wait(const std::atomic<uint64_t>& step) const {
  const uint64_t busy = static_cast<uint64_t>(looks_);
  for (uint64_t look = 0; step.load(std::memory_order_acquire) < step_; ++look) {
    if (look < busy) {
      relax();
    } else {
      idle_(look - busy);
    }
  }
}

void SharedGroup::announce(const Call& call) {
  Header& own = header(index_);
  own.signature[step_ & 1] = call.signature;
  own.step.store(step_, std::memory_order_release);
}

bool SharedGroup::meet(const Call& call) {
  bool agreed = true;
  for (int m = 0; m < members_; ++m) {
    if (m == index_) continue;
    wait(header(m).step);
    agreed &= header(m).signature[step_ & 1] == call.signature;
  }
  return agreed;
}

template <class Pack, class Unpack>
void SharedGroup::step(const Call& call, Pack pack, Unpack unpack) {
  ++step_;
  pack(slot(index_));
  announce(call);
  if (!meet(call)) disagree(call);
  unpack();
}

// All members come here, because all have seen the same hashes. They exchange the texts of the calls.
void SharedGroup::disagree(const Call& call) {
  ++step_;
  char* own = reinterpret_cast<char*>(slot(index_));
  const std::string text = call.text();
  std::memset(own, 0, kText);
  std::memcpy(own, text.data(), std::min(text.size(), kText - 1));
  announce(call);
  meet(call);
  int other = 0;
  while (header(other).signature[step_ & 1] == call.signature) ++other;
  throw Conflict(other, reinterpret_cast<const char*>(slot(other)));
}

void SharedGroup::agree(const Call& call) {
  step(call, [](std::byte*) {}, [] {});
}

void SharedGroup::all_reduce(const Call& call, const void* in, void* out, size_t count, DType type,
                             Reduction reduction) {
  const size_t item = dtype_size(type);
  const std::byte* from = static_cast<const std::byte*>(in);
  std::byte* to = static_cast<std::byte*>(out);
  if (count * item <= kReplicated) {
    return step(
        call, [&](std::byte* own) { put(own, from, count * item); },
        [&] {
          if (count == 0) return;
          for (int m = 0; m < members_; ++m) sources_[static_cast<size_t>(m)] = slot(m);
          reduce_many(to, sources_.data(), sources_.size(), count, type, reduction);
        });
  }
  pieces(count, kSlot / item, [&](size_t begin, size_t n) {
    const Range mine = share_of(n, members_, index_);
    const std::byte* input = from + begin * item;
    step(
        call,
        [&](std::byte* own) {
          put(own, input, mine.begin * item);
          put(own + mine.end * item, input + mine.end * item, (n - mine.end) * item);
        },
        [&] {
          for (int m = 0; m < members_; ++m) {
            const std::byte* data = m == index_ ? input : slot(m);
            sources_[static_cast<size_t>(m)] = data + mine.begin * item;
          }
        });
    step(
        call,
        [&](std::byte* own) {
          for (size_t at = mine.begin; at < mine.end; at += kBlock / item) {
            const size_t size = std::min(kBlock / item, mine.end - at) * item;
            reduce_many(own + at * item, sources_.data(), sources_.size(), size / item, type,
                        reduction);
            put(to + (begin + at) * item, own + at * item, size);
            for (const void*& source : sources_) source = static_cast<const std::byte*>(source) + size;
          }
        },
        [&] {
          for (int m = 0; m < members_; ++m) {
            if (m == index_) continue;
            const Range theirs = share_of(n, members_, m);
            put(to + (begin + theirs.begin) * item, slot(m) + theirs.begin * item,
                 theirs.size() * item);
          }
        });
  });
}

void SharedGroup::all_gather(const Call& call, const void* in, void* out, size_t bytes) {
  const std::byte* from = static_cast<const std::byte*>(in);
  std::byte* to = static_cast<std::byte*>(out);
  pieces(bytes, kSlot, [&](size_t begin, size_t n) {
    step(
        call, [&](std::byte* own) { put(own, from + begin, n); },
        [&] {
          for (int m = 0; m < members_; ++m) {
            put(to + static_cast<size_t>(m) * bytes + begin, slot(m), n);
          }
        });
  });
}

void SharedGroup::reduce_scatter(const Call& call, const void* in, void* out, size_t count,
                                 DType type, Reduction reduction) {
  const size_t item = dtype_size(type);
  const std::byte* from = static_cast<const std::byte*>(in);
  std::byte* to = static_cast<std::byte*>(out);
  const size_t largest = kSlot / item / static_cast<size_t>(members_);
  pieces(count, largest, [&](size_t begin, size_t n) {
    const auto input = [&](int m) { return from + (static_cast<size_t>(m) * count + begin) * item; };
    const auto offset = [&](int m) { return static_cast<size_t>(m) * n * item; };
    step(
        call,
        [&](std::byte* own) {
          for (int m = 0; m < members_; ++m) {
            if (m != index_) put(own + offset(m), input(m), n * item);
          }
        },
        [&] {
          if (n == 0) return;
          for (int m = 0; m < members_; ++m) {
            sources_[static_cast<size_t>(m)] =
                m == index_ ? input(m) : slot(m) + offset(index_);
          }
          reduce_many(to + begin * item, sources_.data(), sources_.size(), n, type, reduction);
        });
  });
}

void SharedGroup::all_to_all(const Call& call, const void* in, void* out, size_t bytes) {
  const std::byte* from = static_cast<const std::byte*>(in);
  std::byte* to = static_cast<std::byte*>(out);
  pieces(bytes, kSlot / static_cast<size_t>(members_), [&](size_t begin, size_t n) {
    step(
        call,
        [&](std::byte* own) {
          for (size_t m = 0; m < sources_.size(); ++m) {
            put(own + m * n, from + m * bytes + begin, n);
          }
        },
        [&] {
          for (int m = 0; m < members_; ++m) {
            put(to + static_cast<size_t>(m) * bytes + begin,
                 slot(m) + static_cast<size_t>(index_) * n, n);
          }
        });
  });
}

void SharedGroup::broadcast(const Call& call, const void* in, void* out, size_t bytes, int root) {
  const bool gives = index_ == root;
  if (gives && in != out) put(out, in, bytes);
  pass(call, in, out, bytes, gives, gives ? -1 : root);
}

void SharedGroup::permute(const Call& call, const void* in, void* out, size_t bytes,
                          const std::vector<Pair>& pairs) {
  bool gives = false;
  int giver = -1;
  for (const Pair& pair : pairs) {
    gives = gives || pair.source == index_;
    if (pair.destination == index_) giver = pair.source;
  }
  pass(call, in, out, bytes, gives, giver);
  if (giver < 0 && bytes != 0) std::memset(out, 0, bytes);
}

void SharedGroup::pass(const Call& call, const void* in, void* out, size_t bytes, bool gives,
                       int giver) {
  const std::byte* from = static_cast<const std::byte*>(in);
  std::byte* to = static_cast<std::byte*>(out);
  pieces(bytes, kSlot, [&](size_t begin, size_t n) {
    step(
        call,
        [&](std::byte* own) {
          if (gives) put(own, from + begin, n);
        },
        [&] {
          if (giver >= 0) put(to + begin, slot(giver), n);
        });
  });
}

}  // namespace onnxpar
