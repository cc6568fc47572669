#include "transport/messages.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace onnxpar {
namespace {

constexpr std::chrono::microseconds kShortestSleep{10};  // between two looks
constexpr std::chrono::microseconds kLongestSleep{200};
constexpr size_t kSmall = size_t{32} << 10;  // bytes of data in a first message at most
// Bytes of data in a later message at most. MPI sends messages of this size without asking the receiver
// first, and takes all of one with few looks.
constexpr size_t kPiece = size_t{32} << 10;
// Pieces under way at once, in all and at least to each member. The link stays in use if a thread comes
// to look late by the time of so many, as on a machine with more work than cores.
constexpr size_t kWindow = 128;
constexpr size_t kLeastWindow = 16;
constexpr size_t kParts = size_t{8} << 20;   // bytes of a reduction's pieces under way at most
constexpr size_t kCopy = size_t{64} << 10;   // bytes copied between two looks
constexpr size_t kText = 512;                // the text of a call on which the members differ

// A member's first message; the data follows.
struct Head {
  uint64_t signature;
};
constexpr size_t kFirst = sizeof(Head) + kSmall;

// Tags. Several pieces are under way at once, and each is matched by its own tag.
constexpr int kMeet = 0;
constexpr int kTexts = 1;
int part_tag(size_t piece) { return 2 + 2 * static_cast<int>(piece % 4096); }
int sum_tag(size_t piece) { return 1 + part_tag(piece); }

void put(void* to, const void* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

}  // namespace

void Patience::renew() { waiting_ = false; }

void Patience::pause() {
  const Clock::time_point now = Clock::now();
  if (!waiting_) {
    waiting_ = true;
    since_ = now;
    sleep_ = kShortestSleep;
  }
  if (now - since_ < busy_) return;
  std::this_thread::sleep_for(sleep_);
  sleep_ = std::min(2 * sleep_, kLongestSleep);
}

void Flow::send(const void* from, size_t bytes, int peer, int tag, Then then) {
  requests_.push_back(MPI_REQUEST_NULL);
  then_.push_back(std::move(then));
  check(MPI_Isend(from, static_cast<int>(bytes), MPI_BYTE, peer, tag, comm_, &requests_.back()),
        "MPI_Isend");
}

void Flow::receive(void* to, size_t bytes, int peer, int tag, Then then) {
  requests_.push_back(MPI_REQUEST_NULL);
  then_.push_back(std::move(then));
  check(MPI_Irecv(to, static_cast<int>(bytes), MPI_BYTE, peer, tag, comm_, &requests_.back()),
        "MPI_Irecv");
}

void Flow::copy(void* to, const void* from, size_t bytes) {
  copy_ = {static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes};
}

void Flow::finish() {
  patience_.renew();
  std::vector<Then> due;
  while (!requests_.empty() || copy_.bytes != 0) {
    complete_.resize(requests_.size());
    int count = 0;
    check(MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                       complete_.data(), MPI_STATUSES_IGNORE),
          "MPI_Testsome");
    if (count == 0 || count == MPI_UNDEFINED) {  // undefined: there is no request
      if (copy_.bytes == 0) {
        patience_.pause();
      } else {
        const size_t bytes = std::min(copy_.bytes, kCopy);
        put(copy_.to, copy_.from, bytes);
        copy_ = {copy_.to + bytes, copy_.from + bytes, copy_.bytes - bytes};
      }
      continue;
    }
    patience_.renew();
    for (int i = 0; i < count; ++i) {
      due.push_back(std::move(then_[static_cast<size_t>(complete_[static_cast<size_t>(i)])]));
    }
    // Testsome has set the requests that are complete to null.
    size_t kept = 0;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      requests_[kept] = requests_[i];
      if (kept != i) then_[kept] = std::move(then_[i]);
      ++kept;
    }
    requests_.resize(kept);
    then_.resize(kept);
    for (const Then& then : due) {
      if (then) then();
    }
    due.clear();
  }
}

MessageGroup::MessageGroup(MPI_Comm comm, Clock::duration busy) : comm_(comm), flow_(comm, busy) {
  check(MPI_Comm_rank(comm, &index_), "MPI_Comm_rank");
  check(MPI_Comm_size(comm, &members_), "MPI_Comm_size");
  const size_t members = static_cast<size_t>(members_);
  window_ = std::max(kLeastWindow, kWindow / std::max<size_t>(1, members - 1));
  // A whole number of cache lines' elements, so that members' shares of a piece are no larger.
  piece_ = std::min(kPiece, kParts / window_ / members / 512 * 512);
  piece_ = std::max<size_t>(piece_, 512);
  own_.resize(members * kFirst);
  theirs_.resize(members * kFirst);
  sources_.resize(members);
}

template <class F>
void MessageGroup::others(F f) const {
  for (int i = 1; i < members_; ++i) f((index_ + i) % members_);
}

const std::byte* MessageGroup::first(int member) const {
  return theirs_.data() + static_cast<size_t>(member) * kFirst + sizeof(Head);
}

void MessageGroup::meet(const Call& call, size_t bytes, const Blocks& blocks) {
  const Head own{call.signature};
  others([&](int m) {
    flow_.receive(theirs_.data() + static_cast<size_t>(m) * kFirst, kFirst, m, kMeet);
  });
  others([&](int m) {
    const std::byte* block = blocks ? blocks(m) : nullptr;
    const size_t size = block == nullptr ? 0 : bytes;
    std::byte* message = own_.data() + static_cast<size_t>(m) * kFirst;
    put(message, &own, sizeof(own));
    put(message + sizeof(own), block, size);
    flow_.send(message, sizeof(own) + size, m, kMeet);
  });
  flow_.finish();
  bool agreed = true;
  others([&](int m) {
    Head theirs;
    put(&theirs, theirs_.data() + static_cast<size_t>(m) * kFirst, sizeof(theirs));
    agreed &= theirs.signature == own.signature;
  });
  if (!agreed) disagree(call);
}

// All members come here, because all have seen the same hashes. They exchange the texts of the calls.
void MessageGroup::disagree(const Call& call) {
  std::vector<char> own(kText, '\0');
  const std::string text = call.text();
  std::memcpy(own.data(), text.data(), std::min(text.size(), kText - 1));
  std::vector<char> texts(kText * static_cast<size_t>(members_));
  others([&](int m) {
    flow_.receive(texts.data() + static_cast<size_t>(m) * kText, kText, m, kTexts);
    flow_.send(own.data(), kText, m, kTexts);
  });
  flow_.finish();
  for (int m = 0;; ++m) {
    Head theirs;
    put(&theirs, theirs_.data() + static_cast<size_t>(m) * kFirst, sizeof(theirs));
    if (m == index_ || theirs.signature == call.signature) continue;
    throw Conflict(m, texts.data() + static_cast<size_t>(m) * kText);
  }
}

void MessageGroup::send(const std::byte* from, size_t bytes, int peer, size_t piece) {
  const size_t begin = piece * piece_;
  if (begin >= bytes) return;
  flow_.send(from + begin, std::min(piece_, bytes - begin), peer, part_tag(piece),
             [=] { send(from, bytes, peer, piece + window_); });
}

void MessageGroup::receive(std::byte* to, size_t bytes, int peer, size_t piece,
                           const std::function<void(size_t)>& then) {
  const size_t begin = piece * piece_;
  if (begin >= bytes) return;
  flow_.receive(to + begin, std::min(piece_, bytes - begin), peer, part_tag(piece), [=] {
    if (then) then(piece);
    receive(to, bytes, peer, piece + window_, then);
  });
}

void MessageGroup::exchange(const Call& call, size_t bytes, const Blocks& blocks,
                            const Places& places) {
  // The first part comes with the first messages.
  const size_t small = std::min(bytes, kSmall);
  meet(call, small, blocks);
  for (size_t piece = 0; piece < window_; ++piece) {
    others([&](int m) {
      if (std::byte* place = places(m)) receive(place + small, bytes - small, m, piece);
    });
    others([&](int m) {
      if (const std::byte* block = blocks(m)) send(block + small, bytes - small, m, piece);
    });
  }
  others([&](int m) {
    if (std::byte* place = places(m)) put(place, first(m), small);
  });
  const std::byte* block = blocks(index_);
  std::byte* place = places(index_);
  if (block != nullptr && place != nullptr && block != place) flow_.copy(place, block, bytes);
  flow_.finish();
}

void MessageGroup::reduce_first(const std::byte* own, void* out, size_t count, DType type,
                                Reduction reduction) {
  if (count == 0) return;
  for (int m = 0; m < members_; ++m) {
    sources_[static_cast<size_t>(m)] = m == index_ ? own : first(m);
  }
  reduce_many(out, sources_.data(), sources_.size(), count, type, reduction);
}

void MessageGroup::reduce(size_t pieces, const Parts& parts, const std::byte* from, std::byte* to,
                          size_t origin, bool gather, DType type, Reduction reduction) {
  const size_t item = dtype_size(type);
  const size_t window = std::min(window_, pieces);
  const size_t members = static_cast<size_t>(members_);
  parts_.resize(std::max(parts_.size(), window * members * piece_));
  const auto part = [&](size_t piece, int m) {
    return parts_.data() + (piece % window * members + static_cast<size_t>(m)) * piece_;
  };
  std::vector<int> missing(window);
  std::function<void(size_t)> start;

  const auto combine = [&](size_t piece) {
    const Range mine = parts(piece, index_);
    std::byte* result = to + (mine.begin - origin) * item;
    for (int m = 0; m < members_; ++m) {
      sources_[static_cast<size_t>(m)] = m == index_ ? from + mine.begin * item : part(piece, m);
    }
    if (mine.size() != 0) {
      reduce_many(result, sources_.data(), members, mine.size(), type, reduction);
    }
    if (gather) {
      others([&](int m) { flow_.send(result, mine.size() * item, m, sum_tag(piece)); });
    }
    if (piece + window < pieces) start(piece + window);
  };
  start = [&](size_t piece) {
    missing[piece % window] = members_ - 1;
    const size_t mine = parts(piece, index_).size() * item;
    others([&](int m) {
      flow_.receive(part(piece, m), mine, m, part_tag(piece), [&, piece] {
        if (--missing[piece % window] == 0) combine(piece);
      });
    });
    others([&](int m) {
      const Range theirs = parts(piece, m);
      const size_t begin = theirs.begin * item;
      const size_t bytes = theirs.size() * item;
      // The result comes to the place of the part if `to` is `from`, so the part must have left.
      Flow::Then then;
      if (gather) {
        then = [&, piece, m, begin, bytes] {
          flow_.receive(to + begin, bytes, m, sum_tag(piece));
        };
      }
      flow_.send(from + begin, bytes, m, part_tag(piece), std::move(then));
    });
    if (members_ == 1) combine(piece);
  };
  for (size_t piece = 0; piece < window; ++piece) start(piece);
  flow_.finish();
}

void MessageGroup::all_reduce(const Call& call, const void* in, void* out, size_t count,
                              DType type, Reduction reduction) {
  const std::byte* from = static_cast<const std::byte*>(in);
  const size_t item = dtype_size(type);
  // Every member reduces all: one hop instead of three, but more bytes if there are more than two.
  if (count * item * static_cast<size_t>(members_ - 1) <= kSmall) {
    meet(call, count * item, [&](int) { return from; });
    return reduce_first(from, out, count, type, reduction);
  }
  meet(call);
  const size_t largest = piece_ / item * static_cast<size_t>(members_);
  const Parts parts = [&](size_t piece, int m) {
    const size_t begin = piece * largest;
    const Range range = share_of(std::min(largest, count - begin), members_, m);
    return Range{begin + range.begin, begin + range.end};
  };
  reduce((count + largest - 1) / largest, parts, from, static_cast<std::byte*>(out), 0, true, type,
         reduction);
}

void MessageGroup::reduce_scatter(const Call& call, const void* in, void* out, size_t count,
                                  DType type, Reduction reduction) {
  const std::byte* from = static_cast<const std::byte*>(in);
  const size_t bytes = count * dtype_size(type);
  const auto block = [&](int m) { return from + static_cast<size_t>(m) * bytes; };
  if (bytes <= kSmall) {
    meet(call, bytes, block);
    return reduce_first(block(index_), out, count, type, reduction);
  }
  meet(call);
  const size_t largest = piece_ / dtype_size(type);
  const Parts parts = [&](size_t piece, int m) {
    const size_t begin = piece * largest;
    const size_t origin = static_cast<size_t>(m) * count;
    return Range{origin + begin, origin + std::min(begin + largest, count)};
  };
  reduce((count + largest - 1) / largest, parts, from, static_cast<std::byte*>(out),
         static_cast<size_t>(index_) * count, false, type, reduction);
}

void MessageGroup::all_gather(const Call& call, const void* in, void* out, size_t bytes) {
  const std::byte* from = static_cast<const std::byte*>(in);
  std::byte* to = static_cast<std::byte*>(out);
  exchange(
      call, bytes, [&](int) { return from; },
      [&](int m) { return to + static_cast<size_t>(m) * bytes; });
}

void MessageGroup::all_to_all(const Call& call, const void* in, void* out, size_t bytes) {
  const std::byte* from = static_cast<const std::byte*>(in);
  std::byte* to = static_cast<std::byte*>(out);
  exchange(
      call, bytes, [&](int m) { return from + static_cast<size_t>(m) * bytes; },
      [&](int m) { return to + static_cast<size_t>(m) * bytes; });
}

void MessageGroup::permute(const Call& call, const void* in, void* out, size_t bytes,
                           const std::vector<Pair>& pairs) {
  int source = -1;
  int destination = -1;
  for (const Pair& pair : pairs) {
    if (pair.source == index_) destination = pair.destination;
    if (pair.destination == index_) source = pair.source;
  }
  exchange(
      call, bytes,
      [&](int m) { return m == destination ? static_cast<const std::byte*>(in) : nullptr; },
      [&](int m) { return m == source ? static_cast<std::byte*>(out) : nullptr; });
  if (source < 0 && bytes != 0) std::memset(out, 0, bytes);
}

void MessageGroup::broadcast(const Call& call, const void* in, void* out, size_t bytes, int root) {
  const std::byte* from = static_cast<const std::byte*>(in);
  std::byte* to = static_cast<std::byte*>(out);
  if (members_ == 2 || bytes <= kSmall) {
    return exchange(
        call, bytes, [&](int) { return index_ == root ? from : nullptr; },
        [&](int m) { return m == root ? to : nullptr; });
  }
  meet(call);
  // The root sends a share to each of the others, and they send their shares to one another.
  const auto share = [&](int m) {
    return share_of(bytes, members_ - 1, (m - root - 1 + members_) % members_);
  };
  const auto pass_on = [&](size_t piece) {
    const Range mine = share(index_);
    const size_t begin = mine.begin + piece * piece_;
    others([&](int m) {
      if (m == root) return;
      flow_.send(to + begin, std::min(piece_, mine.end - begin), m, part_tag(piece));
    });
  };
  for (size_t piece = 0; piece < window_; ++piece) {
    others([&](int m) {
      const Range theirs = share(m);
      if (index_ == root) {
        send(from + theirs.begin, theirs.size(), m, piece);
      } else if (m == root) {
        receive(to + share(index_).begin, share(index_).size(), m, piece, pass_on);
      } else {
        receive(to + theirs.begin, theirs.size(), m, piece);
      }
    });
  }
  if (index_ == root && from != to) flow_.copy(to, from, bytes);
  flow_.finish();
}

}  // namespace onnxpar
