// The transport for ranks that are threads of one process.
//
// Each call on a group is a meeting: every member publishes the addresses of its buffers and waits for
// the others (opening); then each copies what it needs from the others' memory; then all wait once
// more (closing), so that no buffer is changed or freed while another rank reads it. This holds also if
// the world is aborted meanwhile: copies end by themselves, so members wait for them without a limit.
// The last member to arrive at the opening compares the announcements.
//
// One lock guards all bookkeeping of a world; data is copied outside it.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include "transport/transport.h"

namespace onnxpar {
namespace {

using Clock = std::chrono::steady_clock;

enum class Kind { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kBroadcast, kPermute };

struct Announcement {
  Kind kind = Kind::kAllReduce;
  size_t item = 1;  // bytes of what a block counts
  // A copy: the others may still read it when the call of an aborted member has ended.
  std::vector<Block> blocks;
  const Call* call = nullptr;
  size_t bytes() const { return Blocks(blocks).count() * item; }
  bool like(const Announcement& other) const {
    const auto equal = [](const Block& a, const Block& b) { return a.count == b.count; };
    return kind == other.kind && item == other.item &&
           std::equal(blocks.begin(), blocks.end(), other.blocks.begin(), other.blocks.end(), equal);
  }
};

// The meetings of one group, on one lane.
struct Meeting {
  std::vector<int> ranks;
  std::vector<Announcement> members;  // by index; stable between opening and closing
  int arrived = 0;
  std::vector<bool> here;  // by index: who has arrived
  int moving = 0;  // members that may still read the memory of others
  uint64_t generation = 0;
  std::condition_variable all_here;
  std::condition_variable all_still;
};

struct Message {
  std::string from;  // the sender's call, for messages
  std::vector<std::byte> data;
};

struct Mailbox {
  std::deque<Message> messages;
  int receiver = -1;  // the rank that waits for a message, if any
  std::condition_variable arrival;
};

class ThreadWorld {
 public:
  ThreadWorld(int size, const TransportOptions& options)
      : size_(size), options_(options), waiting_(static_cast<size_t>(size)) {}

  int size() const { return size_; }

  Meeting& meeting(const std::vector<int>& ranks, Lane lane) {
    std::lock_guard lock(mutex_);
    auto& place = meetings_[{lane, ranks}];
    if (!place) {
      place = std::make_unique<Meeting>();
      place->ranks = ranks;
      place->members.resize(ranks.size());
      place->here.resize(ranks.size());
    }
    return *place;
  }

  // Publishes `own` and returns when all members have done so. Throws if they disagree.
  void open(Meeting& meeting, const Group& group, const Announcement& own) {
    std::unique_lock lock(mutex_);
    if (!abort_message_.empty()) check_alive(describe(rank_of(group), *own.call, group.ranks));
    meeting.members[static_cast<size_t>(group.index)] = own;
    if (meeting.arrived + 1 == group.size()) {
      const std::string conflict = disagreement(meeting, group, own);
      if (!conflict.empty()) abort_locked(conflict);
      check_alive(conflict);
      meeting.moving = group.size();
    }
    arrive(lock, meeting, group, *own.call);
  }

  // Returns when all members have done what comes before.
  void meet_again(Meeting& meeting, const Group& group, const Call& call) {
    std::unique_lock lock(mutex_);
    arrive(lock, meeting, group, call);
  }

  // Returns when all members have finished with each other's buffers. Every member that was at the
  // opening comes here, also if the world was aborted.
  void close(Meeting& meeting) {
    std::unique_lock lock(mutex_);
    if (--meeting.moving == 0) meeting.all_still.notify_all();
    meeting.all_still.wait(lock, [&] { return meeting.moving == 0; });
  }

  void send(int source, int peer, int tag, Message message) {
    std::lock_guard lock(mutex_);
    check_alive(message.from);
    Mailbox& box = mailbox(source, peer, tag);
    box.messages.push_back(std::move(message));
    if (box.receiver >= 0) waiting_[static_cast<size_t>(box.receiver)].clear();
    box.arrival.notify_one();
  }

  Message receive(int source, int rank, int tag, const Call& call, Lane lane) {
    std::unique_lock lock(mutex_);
    const std::string who = describe(rank, call, {source, rank});
    check_alive(who);
    Mailbox& box = mailbox(source, rank, tag);
    const auto here = [&] { return !box.messages.empty(); };
    if (lane == Lane::kAsync) {
      box.arrival.wait(lock, [&] { return here() || !abort_message_.empty(); });
      if (!here()) check_alive(who);
    } else if (!here()) {
      block(rank, lane, who);
      box.receiver = rank;
      wait(lock, box.arrival, who, here, [&] { return std::vector<int>{source}; });
      box.receiver = -1;
    }
    Message message = std::move(box.messages.front());
    box.messages.pop_front();
    return message;
  }

  void abort(const std::string& message) {
    std::lock_guard lock(mutex_);
    abort_locked(message);
  }

 private:
  static int rank_of(const Group& group) {
    return group.ranks[static_cast<size_t>(group.index)];
  }

  Mailbox& mailbox(int source, int peer, int tag) {
    auto& box = mailboxes_[{source, peer, tag}];
    if (!box) box = std::make_unique<Mailbox>();
    return *box;
  }

  void arrive(std::unique_lock<std::mutex>& lock, Meeting& meeting, const Group& group,
              const Call& call) {
    if (!abort_message_.empty()) check_alive(describe(rank_of(group), call, group.ranks));
    if (++meeting.arrived == group.size()) {
      meeting.arrived = 0;
      meeting.here.assign(meeting.here.size(), false);
      ++meeting.generation;
      if (group.lane == Lane::kMain) {
        for (int member : meeting.ranks) waiting_[static_cast<size_t>(member)].clear();
      }
      meeting.all_here.notify_all();
      return;
    }
    const std::string who = describe(rank_of(group), call, group.ranks);
    const uint64_t generation = meeting.generation;
    meeting.here[static_cast<size_t>(group.index)] = true;
    block(rank_of(group), group.lane, who);
    const auto missing = [&] {
      std::vector<int> ranks;
      for (size_t i = 0; i < meeting.here.size(); ++i) {
        if (!meeting.here[i]) ranks.push_back(meeting.ranks[i]);
      }
      return ranks;
    };
    wait(lock, meeting.all_here, who, [&] { return meeting.generation != generation; }, missing);
  }

  // Records that a rank waits. If all ranks wait, none can ever go on: this is an error at once, and
  // not after the timeout. Background lanes do not count: they wait for the foreground.
  void block(int rank, Lane lane, const std::string& who) {
    if (lane != Lane::kMain) return;
    waiting_[static_cast<size_t>(rank)] = who;
    if (std::any_of(waiting_.begin(), waiting_.end(), [](auto& w) { return w.empty(); })) return;
    std::string text = "deadlock, every rank waits for another:";
    for (const std::string& w : waiting_) text += " " + w + ";";
    text.pop_back();
    abort_locked(text);
  }

  template <class Ready, class Missing>
  void wait(std::unique_lock<std::mutex>& lock, std::condition_variable& condition,
            const std::string& who, Ready ready, Missing missing) {
    const auto done = [&] { return ready() || !abort_message_.empty(); };
    if (options_.timeout_s > 0) {
      const auto limit = std::chrono::duration<double>(options_.timeout_s);
      if (!condition.wait_for(lock, limit, done)) {
        abort_locked(waited(who, options_.timeout_s, missing()));
      }
    } else {
      condition.wait(lock, done);
    }
    if (!ready()) check_alive(who);
  }

  std::string disagreement(const Meeting& meeting, const Group& group,
                           const Announcement& own) const {
    if (group.size() == 1) return {};
    const size_t last = static_cast<size_t>(group.index);
    const Announcement& first = meeting.members[last == 0 ? 1 : 0];
    for (size_t i = 0; i < meeting.members.size(); ++i) {
      const Announcement& a = i == last ? own : meeting.members[i];
      if (a.like(first) &&
          (!options_.debug || a.call->signature == first.call->signature)) {
        continue;
      }
      // It is not known which of the two is wrong, so both are named.
      const size_t other = last == 0 ? 1 : 0;
      return describe(meeting.ranks[i], *a.call, meeting.ranks) + " disagrees with rank " +
             std::to_string(meeting.ranks[other]) + ": got " + differing(text(a), text(first)) +
             ", where rank " + std::to_string(meeting.ranks[other]) + " calls " +
             std::string(first.call->where) + " with " + differing(text(first), text(a));
    }
    return {};
  }

  std::string text(const Announcement& a) const {
    return options_.debug ? a.call->detail() : std::to_string(a.bytes()) + " bytes";
  }

  void abort_locked(const std::string& message) {
    if (!abort_message_.empty()) return;
    abort_message_ = message.empty() ? "aborted" : message;
    for (auto& entry : meetings_) entry.second->all_here.notify_all();
    for (auto& entry : mailboxes_) entry.second->arrival.notify_all();
  }

  void check_alive(const std::string& who) const {
    if (abort_message_.empty()) return;
    if (who == abort_message_) throw std::runtime_error(who);
    throw std::runtime_error(who + " was aborted; first failure: " + abort_message_);
  }

  const int size_;
  const TransportOptions options_;
  std::mutex mutex_;
  std::string abort_message_;
  std::map<std::pair<Lane, std::vector<int>>, std::unique_ptr<Meeting>> meetings_;
  std::map<std::tuple<int, int, int>, std::unique_ptr<Mailbox>> mailboxes_;
  std::vector<std::string> waiting_;  // by rank: the call in which its foreground waits, or empty
};

struct ThreadGroup : Group {
  Meeting* meeting = nullptr;
};

class ThreadTransport : public Transport {
 public:
  ThreadTransport(std::shared_ptr<ThreadWorld> world, int rank)
      : world_(std::move(world)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return world_->size(); }
  bool concurrent() const override { return true; }
  bool prompt(int) const override { return true; }
  bool overlaps(const Group&) const override { return true; }

  Group& group(const std::vector<int>& ranks, Lane lane) override {
    auto& group = groups_[{lane, ranks}];
    if (!group) {
      group = std::make_unique<ThreadGroup>();
      group->ranks = ranks;
      group->lane = lane;
      group->index =
          static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
      group->meeting = &world_->meeting(ranks, lane);
    }
    return *group;
  }

  void all_reduce(Group& group, const Call& call, const Blocks& blocks, DType type,
                  Reduction reduction, Stream) override {
    const size_t item = dtype_size(type);
    meet(group, call, {Kind::kAllReduce, item, {blocks.begin(), blocks.end()}, &call}, [&](const auto& members) {
      // Each rank reduces its own share of the elements over all inputs, always in the order of the
      // group. No other rank reads this share of any input, so out may be in.
      std::vector<const void*> sources(members.size());
      for (size_t b = 0; b < blocks.size(); ++b) {
        const auto [begin, end] = share_of(blocks[b].count, group.size(), group.index);
        for (size_t i = 0; i < members.size(); ++i) {
          sources[i] = members[i].blocks[b].in + begin * item;
        }
        if (begin == end) continue;
        reduce_many(blocks[b].out + begin * item, sources.data(), sources.size(), end - begin,
                    type, reduction);
      }
      world_->meet_again(*meeting(group), group, call);
      for (size_t b = 0; b < blocks.size(); ++b) {
        for (int i = 0; i < group.size(); ++i) {
          const auto [begin, end] = share_of(blocks[b].count, group.size(), i);
          if (i == group.index) continue;
          copy(blocks[b].out + begin * item,
               members[static_cast<size_t>(i)].blocks[b].out + begin * item, (end - begin) * item);
        }
      }
    });
  }

  void all_gather(Group& group, const Call& call, const Blocks& blocks, Stream) override {
    meet(group, call, {Kind::kAllGather, 1, {blocks.begin(), blocks.end()}, &call}, [&](const auto& members) {
      for (size_t b = 0; b < blocks.size(); ++b) {
        const size_t bytes = blocks[b].count;
        for (size_t i = 0; i < members.size(); ++i) {
          copy(blocks[b].out + i * bytes, members[i].blocks[b].in, bytes);
        }
      }
    });
  }

  void reduce_scatter(Group& group, const Call& call, const Blocks& blocks, DType type,
                      Reduction reduction, Stream) override {
    const size_t item = dtype_size(type);
    meet(group, call, {Kind::kReduceScatter, item, {blocks.begin(), blocks.end()}, &call}, [&](const auto& members) {
      std::vector<const void*> sources(members.size());
      for (size_t b = 0; b < blocks.size(); ++b) {
        const size_t count = blocks[b].count;
        if (count == 0) continue;
        for (size_t i = 0; i < members.size(); ++i) {
          sources[i] = members[i].blocks[b].in + static_cast<size_t>(group.index) * count * item;
        }
        reduce_many(blocks[b].out, sources.data(), sources.size(), count, type, reduction);
      }
    });
  }

  void all_to_all(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                  Stream) override {
    const Block own(in, out, bytes);
    meet(group, call, {Kind::kAllToAll, 1, {own}, &call}, [&](const auto& members) {
      for (size_t i = 0; i < members.size(); ++i) {
        copy(own.out + i * bytes,
             members[i].blocks[0].in + static_cast<size_t>(group.index) * bytes, bytes);
      }
    });
  }

  void broadcast(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                 int root, Stream) override {
    const Block own(in, out, bytes);
    meet(group, call, {Kind::kBroadcast, 1, {own}, &call}, [&](const auto& members) {
      const std::byte* source = members[static_cast<size_t>(root)].blocks[0].in;
      if (source != out) copy(out, source, bytes);
    });
  }

  void permute(Group& group, const Call& call, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs, Stream) override {
    const Block own(in, out, bytes);
    meet(group, call, {Kind::kPermute, 1, {own}, &call}, [&](const auto& members) {
      for (const Pair& pair : pairs) {
        if (pair.destination == group.index) {
          return copy(out, members[static_cast<size_t>(pair.source)].blocks[0].in, bytes);
        }
      }
      if (bytes != 0) std::memset(out, 0, bytes);
    });
  }

  void send(const Call& call, int peer, int tag, const void* in, size_t bytes, Stream) override {
    const std::byte* data = static_cast<const std::byte*>(in);
    world_->send(rank_, peer, tag,
                 {describe(rank_, call, {rank_, peer}), {data, data + bytes}});
  }

  void recv(const Call& call, int peer, int tag, void* out, size_t bytes, Lane lane,
            Stream) override {
    const Message message = world_->receive(peer, rank_, tag, call, lane);
    call.met();
    if (message.data.size() != bytes) {
      throw std::runtime_error(describe(rank_, call, {peer, rank_}) + ": expected " +
                               std::to_string(bytes) + " bytes, got " +
                               std::to_string(message.data.size()) + " from " + message.from);
    }
    copy(out, message.data.data(), bytes);
  }

  void abort(const std::string& message) override { world_->abort(message); }
  void stop() override { world_->abort("the world was closed"); }
  void close() override {}

 private:
  static void copy(void* to, const void* from, size_t bytes) {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }

  static Meeting* meeting(Group& group) { return static_cast<ThreadGroup&>(group).meeting; }

  template <class Move>
  void meet(Group& group, const Call& call, const Announcement& own, Move move) {
    Meeting& place = *meeting(group);
    world_->open(place, group, own);
    call.met();
    try {
      move(place.members);
    } catch (const std::exception& e) {
      // Others may wait for this member before they close.
      world_->abort(describe(rank_, call, group.ranks) + ": " + e.what());
      world_->close(place);
      throw;
    }
    world_->close(place);
  }

  std::shared_ptr<ThreadWorld> world_;
  const int rank_;
  // Used by this rank's foreground thread only.
  std::map<std::pair<Lane, std::vector<int>>, std::unique_ptr<ThreadGroup>> groups_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_threads_transport(int size,
                                                               const TransportOptions& options) {
  auto world = std::make_shared<ThreadWorld>(size, options);
  std::vector<std::unique_ptr<Transport>> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.push_back(std::make_unique<ThreadTransport>(world, rank));
  }
  return ranks;
}

}  // namespace onnxpar
