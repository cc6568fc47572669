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
      slots_(static_cast<size_t>(members)),
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

std::vector<int> SharedGroup::missing() const {
  const uint64_t own = header(index_).step.load(std::memory_order_acquire);
  std::vector<int> found;
  for (int m = 0; m < members_; ++m) {
    if (header(m).step.load(std::memory_order_acquire) < own) found.push_back(m);
  }
  return found;
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
  const bool agreed = meet(call);
  call.met();
  if (!agreed) disagree(call);
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

void SharedGroup::all_reduce(const Call& call, const Blocks& blocks, DType type,
                             Reduction reduction) {
  const size_t item = dtype_size(type);
  const size_t count = blocks.count();
  const size_t members = sources_.size();
  if (count * item <= kReplicated) {
    return step(
        call,
        [&](std::byte* own) {
          blocks.each({0, count}, [&](const Block& block, size_t offset, size_t n, size_t at) {
            put(own + at * item, block.in + offset * item, n * item);
          });
        },
        [&] {
          blocks.each({0, count}, [&](const Block& block, size_t offset, size_t n, size_t at) {
            for (size_t m = 0; m < members; ++m) {
              sources_[m] = slot(static_cast<int>(m)) + at * item;
            }
            reduce_many(block.out + offset * item, sources_.data(), members, n, type, reduction);
          });
        });
  }
  pieces(count, kSlot / item, [&](size_t begin, size_t size) {
    const Range share = share_of(size, members_, index_);
    const Range mine{begin + share.begin, begin + share.end};
    const Range before{begin, mine.begin};
    const Range after{mine.end, begin + size};
    step(
        call,
        [&](std::byte* own) {
          const auto pack = [&](std::byte* to, Range range) {
            blocks.each(range, [&](const Block& block, size_t offset, size_t n, size_t at) {
              put(to + at * item, block.in + offset * item, n * item);
            });
          };
          pack(own, before);
          pack(own + share.end * item, after);
        },
        [&] {
          for (size_t m = 0; m < members; ++m) {
            slots_[m] = slot(static_cast<int>(m)) + share.begin * item;
          }
        });
    step(
        call,
        [&](std::byte* own) {
          blocks.each(mine, [&](const Block& block, size_t offset, size_t n, size_t at) {
            for (size_t done = 0; done < n; done += kBlock / item) {
              const size_t some = std::min(kBlock / item, n - done);
              for (size_t m = 0; m < members; ++m) sources_[m] = slots_[m] + (at + done) * item;
              sources_[static_cast<size_t>(index_)] = block.in + (offset + done) * item;
              std::byte* sums = own + (share.begin + at + done) * item;
              reduce_many(sums, sources_.data(), members, some, type, reduction);
              put(block.out + (offset + done) * item, sums, some * item);
            }
          });
        },
        [&] {
          for (int m = 0; m < members_; ++m) {
            if (m == index_) continue;
            const Range theirs = share_of(size, members_, m);
            const std::byte* sums = slot(m) + theirs.begin * item;
            blocks.each({begin + theirs.begin, begin + theirs.end},
                        [&](const Block& block, size_t offset, size_t n, size_t at) {
                          put(block.out + offset * item, sums + at * item, n * item);
                        });
          }
        });
  });
}

void SharedGroup::all_gather(const Call& call, const Blocks& blocks) {
  pieces(blocks.count(), kSlot, [&](size_t begin, size_t size) {
    const Range piece{begin, begin + size};
    step(
        call,
        [&](std::byte* own) {
          blocks.each(piece, [&](const Block& block, size_t offset, size_t n, size_t at) {
            put(own + at, block.in + offset, n);
          });
        },
        [&] {
          for (int m = 0; m < members_; ++m) {
            blocks.each(piece, [&](const Block& block, size_t offset, size_t n, size_t at) {
              put(block.out + static_cast<size_t>(m) * block.count + offset, slot(m) + at, n);
            });
          }
        });
  });
}

void SharedGroup::reduce_scatter(const Call& call, const Blocks& blocks, DType type,
                                 Reduction reduction) {
  const size_t item = dtype_size(type);
  const size_t members = sources_.size();
  pieces(blocks.count(), kSlot / item / members, [&](size_t begin, size_t size) {
    const Range piece{begin, begin + size};
    const auto input = [&](const Block& block, size_t m, size_t offset) {
      return block.in + (m * block.count + offset) * item;
    };
    const auto place = [&](size_t m, size_t at) { return (m * size + at) * item; };
    const size_t self = static_cast<size_t>(index_);
    step(
        call,
        [&](std::byte* own) {
          for (size_t m = 0; m < members; ++m) {
            if (m == self) continue;
            blocks.each(piece, [&](const Block& block, size_t offset, size_t n, size_t at) {
              put(own + place(m, at), input(block, m, offset), n * item);
            });
          }
        },
        [&] {
          blocks.each(piece, [&](const Block& block, size_t offset, size_t n, size_t at) {
            for (size_t m = 0; m < members; ++m) {
              sources_[m] = m == self ? input(block, m, offset)
                                      : slot(static_cast<int>(m)) + place(self, at);
            }
            reduce_many(block.out + offset * item, sources_.data(), members, n, type, reduction);
          });
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
