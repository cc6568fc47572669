#include "transport/messages.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace onnxpar {
namespace {

constexpr std::chrono::microseconds kAlone{20};          // looks without giving up the core at first
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

// Bytes of the memory at `data`, which may only be read.
Runs run_at(const void* data, size_t offset, Range bytes) {
  std::byte* all = static_cast<std::byte*>(const_cast<void*>(data));
  return {{all + offset + bytes.begin, bytes.size()}};
}

// Bytes of all tensors together, whose elements have `item` bytes; memory(block) is where one begins.
template <class F>
Runs runs_of(const Blocks& blocks, size_t item, Range bytes, F memory) {
  Runs runs;
  blocks.each({bytes.begin / item, bytes.end / item},
              [&](const Block& block, size_t offset, size_t n, size_t) {
                const std::byte* begin = memory(block) + offset * item;
                runs.push_back({const_cast<std::byte*>(begin), n * item});
              });
  return runs;
}

int size_of(MPI_Comm comm) {
  int size = 0;
  check(MPI_Comm_size(comm, &size), "MPI_Comm_size");
  return size;
}

// The datatype of a message, and where it begins.
class Layout {
 public:
  explicit Layout(const Runs& runs) {
    if (runs.size() < 2) {
      if (!runs.empty()) start_ = runs[0].data;
      count_ = runs.empty() ? 0 : static_cast<int>(runs[0].bytes);
      return;
    }
    std::vector<int> lengths;
    std::vector<MPI_Aint> places;
    for (const Run& run : runs) {
      lengths.push_back(static_cast<int>(run.bytes));
      check(MPI_Get_address(run.data, &places.emplace_back()), "MPI_Get_address");
    }
    check(MPI_Type_create_hindexed(static_cast<int>(runs.size()), lengths.data(), places.data(),
                                   MPI_BYTE, &made_),
          "MPI_Type_create_hindexed");
    check(MPI_Type_commit(&made_), "MPI_Type_commit");
    start_ = MPI_BOTTOM;
    count_ = 1;
  }
  // MPI keeps the datatype until its messages are complete.
  ~Layout() {
    if (made_ != MPI_DATATYPE_NULL) MPI_Type_free(&made_);
  }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  void* start() const { return start_; }
  int count() const { return count_; }
  MPI_Datatype type() const { return made_ == MPI_DATATYPE_NULL ? MPI_BYTE : made_; }

 private:
  MPI_Datatype made_ = MPI_DATATYPE_NULL;
  void* start_ = nullptr;
  int count_ = 0;
};

}  // namespace

void Patience::renew() { waiting_ = false; }

void Patience::pause() {
  const Clock::time_point now = Clock::now();
  if (!waiting_) {
    waiting_ = true;
    since_ = now;
    sleep_ = kShortestSleep;
  }
  if (now - since_ < busy_) {
    // What the others compute may need this core.
    if (now - since_ > kAlone) std::this_thread::yield();
    return;
  }
  std::this_thread::sleep_for(sleep_);
  sleep_ = std::min(2 * sleep_, kLongestSleep);
}

template <class Begin>
void Flow::post(Begin begin, const char* what, const Runs& runs, int peer, int tag, Then then) {
  const Layout layout(runs);
  requests_.push_back(MPI_REQUEST_NULL);
  then_.push_back(std::move(then));
  senders_.push_back(-1);
  check(begin(layout.start(), layout.count(), layout.type(), peer, tag, comm_, &requests_.back()),
        what);
}

void Flow::send(const Runs& from, int peer, int tag, Then then) {
  post(MPI_Isend, "MPI_Isend", from, peer, tag, std::move(then));
}

void Flow::receive(const Runs& to, int peer, int tag, Then then) {
  post(MPI_Irecv, "MPI_Irecv", to, peer, tag, std::move(then));
  senders_.back() = peer;
  ++expected_[static_cast<size_t>(peer)];
}

std::vector<int> Flow::missing() const {
  std::vector<int> found;
  for (size_t m = 0; m < expected_.size(); ++m) {
    if (expected_[m] != 0) found.push_back(static_cast<int>(m));
  }
  return found;
}

void Flow::copy(void* to, const void* from, size_t bytes) {
  copies_.push_back({static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes});
}

bool Flow::copy_some() {
  size_t left = kCopy;
  const bool any = !copies_.empty();
  while (left != 0 && !copies_.empty()) {
    Copy& next = copies_.front();
    const size_t bytes = std::min(next.bytes, left);
    put(next.to, next.from, bytes);
    next = {next.to + bytes, next.from + bytes, next.bytes - bytes};
    left -= bytes;
    if (next.bytes == 0) copies_.pop_front();
  }
  return any;
}

void Flow::finish() {
  patience_.renew();
  std::vector<Then> due;
  while (!requests_.empty() || !copies_.empty()) {
    complete_.resize(requests_.size());
    int count = 0;
    check(MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                       complete_.data(), MPI_STATUSES_IGNORE),
          "MPI_Testsome");
    if (count == 0 || count == MPI_UNDEFINED) {  // undefined: there is no request
      if (!copy_some()) patience_.pause();
      continue;
    }
    patience_.renew();
    for (int i = 0; i < count; ++i) {
      const size_t request = static_cast<size_t>(complete_[static_cast<size_t>(i)]);
      due.push_back(std::move(then_[request]));
      const int sender = senders_[request];
      if (sender >= 0) --expected_[static_cast<size_t>(sender)];
    }
    // Testsome has set the requests that are complete to null.
    size_t kept = 0;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      requests_[kept] = requests_[i];
      if (kept != i) then_[kept] = std::move(then_[i]);
      senders_[kept] = senders_[i];
      ++kept;
    }
    requests_.resize(kept);
    then_.resize(kept);
    senders_.resize(kept);
    for (const Then& then : due) {
      if (then) then();
    }
    due.clear();
  }
}

MessageGroup::MessageGroup(MPI_Comm comm, Clock::duration busy)
    : comm_(comm), members_(size_of(comm)), flow_(comm, members_, busy) {
  check(MPI_Comm_rank(comm, &index_), "MPI_Comm_rank");
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

std::byte* MessageGroup::first(int member) {
  return theirs_.data() + static_cast<size_t>(member) * kFirst + sizeof(Head);
}

void MessageGroup::meet(const Call& call, size_t bytes, const Bytes& given) {
  const Head own{call.signature};
  others([&](int m) {
    flow_.receive({{theirs_.data() + static_cast<size_t>(m) * kFirst, kFirst}}, m, kMeet);
  });
  others([&](int m) {
    std::byte* message = own_.data() + static_cast<size_t>(m) * kFirst;
    put(message, &own, sizeof(own));
    size_t size = sizeof(own);
    for (const Run& run : given ? given(m, {0, bytes}) : Runs()) {
      put(message + size, run.data, run.bytes);
      size += run.bytes;
    }
    flow_.send({{message, size}}, m, kMeet);
  });
  flow_.finish();
  call.met(true);
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
    char* const theirs = texts.data() + static_cast<size_t>(m) * kText;
    flow_.receive({{reinterpret_cast<std::byte*>(theirs), kText}}, m, kTexts);
    flow_.send({{reinterpret_cast<std::byte*>(own.data()), kText}}, m, kTexts);
  });
  flow_.finish();
  for (int m = 0;; ++m) {
    Head theirs;
    put(&theirs, theirs_.data() + static_cast<size_t>(m) * kFirst, sizeof(theirs));
    if (m == index_ || theirs.signature == call.signature) continue;
    throw Conflict(m, texts.data() + static_cast<size_t>(m) * kText);
  }
}

void MessageGroup::send(const Bytes& given, Range bytes, int peer, size_t piece) {
  const size_t begin = bytes.begin + piece * piece_;
  if (begin >= bytes.end) return;
  const Runs runs = given(peer, {begin, std::min(begin + piece_, bytes.end)});
  if (runs.empty()) return;
  flow_.send(runs, peer, part_tag(piece),
             [=, &given] { send(given, bytes, peer, piece + window_); });
}

void MessageGroup::receive(const Bytes& taken, Range bytes, int peer, size_t piece,
                           const std::function<void(size_t)>& then) {
  const size_t begin = bytes.begin + piece * piece_;
  if (begin >= bytes.end) return;
  const Runs runs = taken(peer, {begin, std::min(begin + piece_, bytes.end)});
  if (runs.empty()) return;
  flow_.receive(runs, peer, part_tag(piece), [=, &taken] {
    if (then) then(piece);
    receive(taken, bytes, peer, piece + window_, then);
  });
}

void MessageGroup::exchange(const Call& call, size_t bytes, const Bytes& given,
                            const Bytes& taken) {
  // The first part comes with the first messages.
  const size_t small = std::min(bytes, kSmall);
  meet(call, small, given);
  for (size_t piece = 0; piece < window_; ++piece) {
    others([&](int m) { receive(taken, {small, bytes}, m, piece); });
    others([&](int m) { send(given, {small, bytes}, m, piece); });
  }
  others([&](int m) {
    const std::byte* from = first(m);
    for (const Run& run : taken(m, {0, small})) {
      put(run.data, from, run.bytes);
      from += run.bytes;
    }
  });
  const Runs from = given(index_, {0, bytes});
  const Runs to = taken(index_, {0, bytes});
  for (size_t i = 0; i < std::min(from.size(), to.size()); ++i) {
    if (from[i].data != to[i].data) flow_.copy(to[i].data, from[i].data, to[i].bytes);
  }
  flow_.finish();
}

void MessageGroup::reduce_first(const Bytes& given, const Bytes& taken, size_t count, DType type,
                                Reduction reduction) {
  const size_t item = dtype_size(type);
  const Runs own = given(index_, {0, count * item});
  const Runs results = taken(index_, {0, count * item});
  size_t at = 0;
  for (size_t i = 0; i < own.size(); ++i) {
    for (int m = 0; m < members_; ++m) {
      sources_[static_cast<size_t>(m)] = m == index_ ? own[i].data : first(m) + at;
    }
    reduce_many(results[i].data, sources_.data(), sources_.size(), own[i].bytes / item, type,
                reduction);
    at += own[i].bytes;
  }
}

void MessageGroup::reduce(size_t pieces, const Parts& parts, const Bytes& given,
                          const Bytes& taken, bool gather, DType type, Reduction reduction) {
  const size_t item = dtype_size(type);
  const size_t window = std::min(window_, pieces);
  const size_t members = static_cast<size_t>(members_);
  parts_.resize(std::max(parts_.size(), window * members * piece_));
  const auto part = [&](size_t piece, int m) {
    return parts_.data() + (piece % window * members + static_cast<size_t>(m)) * piece_;
  };
  const auto bytes = [&](size_t piece, int m) {
    const Range elements = parts(piece, m);
    return Range{elements.begin * item, elements.end * item};
  };
  std::vector<int> missing(window);
  std::function<void(size_t)> start;

  const auto combine = [&](size_t piece) {
    const Range mine = bytes(piece, index_);
    const Runs own = given(index_, mine);
    const Runs results = taken(index_, mine);
    size_t at = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      for (int m = 0; m < members_; ++m) {
        sources_[static_cast<size_t>(m)] = m == index_ ? own[i].data : part(piece, m) + at;
      }
      reduce_many(results[i].data, sources_.data(), members, own[i].bytes / item, type, reduction);
      at += own[i].bytes;
    }
    if (gather) {
      others([&](int m) { flow_.send(results, m, sum_tag(piece)); });
    }
    if (piece + window < pieces) start(piece + window);
  };
  start = [&](size_t piece) {
    missing[piece % window] = members_ - 1;
    const size_t mine = bytes(piece, index_).size();
    others([&](int m) {
      flow_.receive({{part(piece, m), mine}}, m, part_tag(piece), [&, piece] {
        if (--missing[piece % window] == 0) combine(piece);
      });
    });
    others([&](int m) {
      const Range theirs = bytes(piece, m);
      // The result may come to the place of the part, so the part must have left.
      Flow::Then then;
      if (gather) {
        then = [&, piece, m, theirs] {
          flow_.receive(taken(m, theirs), m, sum_tag(piece));
        };
      }
      flow_.send(given(m, theirs), m, part_tag(piece), std::move(then));
    });
    if (members_ == 1) combine(piece);
  };
  for (size_t piece = 0; piece < window; ++piece) start(piece);
  flow_.finish();
}

void MessageGroup::all_reduce(const Call& call, const Blocks& blocks, DType type,
                              Reduction reduction) {
  const size_t item = dtype_size(type);
  const size_t count = blocks.count();
  const Bytes given = [&](int, Range bytes) {
    return runs_of(blocks, item, bytes, [](const Block& block) { return block.in; });
  };
  const Bytes taken = [&](int, Range bytes) {
    return runs_of(blocks, item, bytes, [](const Block& block) { return block.out; });
  };
  // Every member reduces all: one hop instead of three, but more bytes if there are more than two.
  if (count * item * static_cast<size_t>(members_ - 1) <= kSmall) {
    meet(call, count * item, given);
    return reduce_first(given, taken, count, type, reduction);
  }
  meet(call);
  const size_t largest = piece_ / item * static_cast<size_t>(members_);
  const Parts parts = [&](size_t piece, int m) {
    const size_t begin = piece * largest;
    const Range range = share_of(std::min(largest, count - begin), members_, m);
    return Range{begin + range.begin, begin + range.end};
  };
  reduce((count + largest - 1) / largest, parts, given, taken, true, type, reduction);
}

void MessageGroup::reduce_scatter(const Call& call, const Blocks& blocks, DType type,
                                  Reduction reduction) {
  const size_t item = dtype_size(type);
  const size_t count = blocks.count();
  const Bytes given = [&](int m, Range bytes) {
    return runs_of(blocks, item, bytes, [&](const Block& block) {
      return block.in + static_cast<size_t>(m) * block.count * item;
    });
  };
  const Bytes taken = [&](int, Range bytes) {
    return runs_of(blocks, item, bytes, [](const Block& block) { return block.out; });
  };
  if (count * item <= kSmall) {
    meet(call, count * item, given);
    return reduce_first(given, taken, count, type, reduction);
  }
  meet(call);
  const size_t largest = piece_ / item;
  const Parts parts = [&](size_t piece, int) {
    return Range{piece * largest, std::min((piece + 1) * largest, count)};
  };
  reduce((count + largest - 1) / largest, parts, given, taken, false, type, reduction);
}

void MessageGroup::all_gather(const Call& call, const Blocks& blocks) {
  const Bytes given = [&](int, Range bytes) {
    return runs_of(blocks, 1, bytes, [](const Block& block) { return block.in; });
  };
  const Bytes taken = [&](int m, Range bytes) {
    return runs_of(blocks, 1, bytes, [&](const Block& block) {
      return block.out + static_cast<size_t>(m) * block.count;
    });
  };
  exchange(call, blocks.count(), given, taken);
}

void MessageGroup::all_to_all(const Call& call, const void* in, void* out, size_t bytes) {
  const auto blocks = [bytes](const void* data) {
    return [=](int m, Range range) { return run_at(data, static_cast<size_t>(m) * bytes, range); };
  };
  exchange(call, bytes, blocks(in), blocks(out));
}

void MessageGroup::permute(const Call& call, const void* in, void* out, size_t bytes,
                           const std::vector<Pair>& pairs) {
  int source = -1;
  int destination = -1;
  for (const Pair& pair : pairs) {
    if (pair.source == index_) destination = pair.destination;
    if (pair.destination == index_) source = pair.source;
  }
  const auto of = [](int member, const void* data) {
    return [=](int m, Range range) { return m == member ? run_at(data, 0, range) : Runs(); };
  };
  exchange(call, bytes, of(destination, in), of(source, out));
  if (source < 0 && bytes != 0) std::memset(out, 0, bytes);
}

void MessageGroup::broadcast(const Call& call, const void* in, void* out, size_t bytes, int root) {
  const bool gives = index_ == root;
  const Bytes given = [=](int, Range range) { return gives ? run_at(in, 0, range) : Runs(); };
  const Bytes taken = [=](int m, Range range) { return m == root ? run_at(out, 0, range) : Runs(); };
  if (members_ == 2 || bytes <= kSmall) return exchange(call, bytes, given, taken);
  meet(call);
  // The root sends a share to each of the others, and they send their shares to one another.
  const auto share = [&](int m) {
    return share_of(bytes, members_ - 1, (m - root - 1 + members_) % members_);
  };
  const Range mine = share(index_);
  const Bytes anyone = [=](int, Range range) { return run_at(out, 0, range); };
  const auto pass_on = [&](size_t piece) {
    const size_t begin = mine.begin + piece * piece_;
    const Runs part = run_at(out, 0, {begin, std::min(begin + piece_, mine.end)});
    others([&](int m) {
      if (m != root) flow_.send(part, m, part_tag(piece));
    });
  };
  for (size_t piece = 0; piece < window_; ++piece) {
    others([&](int m) {
      if (gives) {
        send(given, share(m), m, piece);
      } else if (m == root) {
        receive(anyone, mine, m, piece, pass_on);
      } else {
        receive(anyone, share(m), m, piece);
      }
    });
  }
  if (gives && in != out) flow_.copy(out, in, bytes);
  flow_.finish();
}

}  // namespace onnxpar
