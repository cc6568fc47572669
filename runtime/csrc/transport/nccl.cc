// One communicator for each group and lane. It is made at the group's first use, by its members alone:
// the first makes an id, which the others get over the host's transport. Groups on which no call
// computes or moves anything (of one rank) have none.
//
// Members compare a call over the host's transport before they make it the first time; the hash that
// they compare is that of all calls on the group so far. A program that repeats its calls compares
// nothing from its second run on.
#include "transport/nccl.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>

#include "transport/nccl_channel.h"
#include "transport/nccl_watch.h"

namespace onnxpar {
namespace {

// Tags of headers, and of the word that a message is asked for, beyond those of the host's own
// messages.
constexpr int kHeaderTags = kTags;
constexpr int kAskTags = 2 * kTags;

struct NcclGroup : Group {
  Group* host = nullptr;
  NcclComm comm;
  std::set<uint64_t> seen;  // signatures of calls that were compared
  uint64_t history = kHashStart;
};

// ncclDataType_t of arithmetic; -1 where NCCL has none.
int nccl_type(DType type) {
  switch (type) {
    case DType::kInt8: return nccl::kInt8;
    case DType::kUint8:
    case DType::kBool: return nccl::kUint8;
    case DType::kInt32: return nccl::kInt32;
    case DType::kUint32: return nccl::kUint32;
    case DType::kInt64: return nccl::kInt64;
    case DType::kUint64: return nccl::kUint64;
    case DType::kFloat16: return nccl::kFloat16;
    case DType::kFloat32: return nccl::kFloat32;
    case DType::kFloat64: return nccl::kFloat64;
    case DType::kBfloat16: return nccl::kBfloat16;
    case DType::kInt16:
    case DType::kUint16: return -1;
  }
  return -1;
}

// Bools are bytes 0 and 1, of which "or" is the greater and "and" the smaller.
int nccl_operation(DType type, Reduction reduction) {
  const bool logical = type == DType::kBool;
  switch (reduction) {
    case Reduction::kSum: return logical ? nccl::kMax : nccl::kSum;
    case Reduction::kMax: return nccl::kMax;
    case Reduction::kMin: return nccl::kMin;
    case Reduction::kProd: return logical ? nccl::kMin : nccl::kProd;
  }
  return nccl::kSum;
}

class NcclTransport : public Transport {
 public:
  NcclTransport(Transport& host, const cuda::Device& device, const nccl::Library& library,
                const TransportOptions& options)
      : host_(host),
        device_(device),
        library_(library),
        watch_(library, device, host.rank(), options.timeout_s,
               [&host](const std::string& message) { host.abort(message); }) {}

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  bool concurrent() const override { return host_.concurrent(); }
  bool prompt(int) const override { return false; }

  Group& group(const std::vector<int>& ranks, Lane lane) override {
    auto& group = groups_[{lane, ranks}];
    if (group) return *group;
    auto made = std::make_unique<NcclGroup>();
    made->ranks = ranks;
    made->lane = lane;
    made->index =
        static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
    made->host = &host_.group(ranks, lane);
    made->comm.ranks = ranks;
    if (ranks.size() > 1) {
      const Call call("making the communicator");
      const std::string who = describe(rank(), call, ranks);
      nccl::UniqueId id{};
      if (made->index == 0) watch_.check(library_.get_unique_id(&id), who, nullptr);
      host_.broadcast(*made->host, call, &id, &id, sizeof(id), 0, nullptr);
      open_nccl(watch_, library_, device_, who, id, made->index, ranks, made->comm);
    }
    group = std::move(made);
    return *group;
  }

  void all_reduce(Group& group, const Call& call, const Blocks& blocks, DType type,
                  Reduction reduction, Stream stream) override {
    reduce(library_.all_reduce, group, call, blocks, type, reduction, stream);
  }

  void all_gather(Group& group, const Call& call, const Blocks& blocks, Stream stream) override {
    run_all(group, call, blocks, stream, [&](const Block& block, nccl::Comm comm) {
      return library_.all_gather(block.in, block.out, block.count, nccl::kUint8, comm, stream);
    });
  }

  void reduce_scatter(Group& group, const Call& call, const Blocks& blocks, DType type,
                      Reduction reduction, Stream stream) override {
    reduce(library_.reduce_scatter, group, call, blocks, type, reduction, stream);
  }

  void all_to_all(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                  Stream stream) override {
    run(group, call, bytes, stream, [&](nccl::Comm comm) {
      return together([&](auto&& each) {
        for (int i = 0; i < group.size(); ++i) {
          const size_t at = static_cast<size_t>(i) * bytes;
          each(library_.send(static_cast<const std::byte*>(in) + at, bytes, nccl::kUint8, i, comm,
                             stream));
          each(library_.recv(static_cast<std::byte*>(out) + at, bytes, nccl::kUint8, i, comm,
                             stream));
        }
      });
    });
  }

  void broadcast(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                 int root, Stream stream) override {
    run(group, call, bytes, stream, [&](nccl::Comm comm) {
      return library_.broadcast(in, out, bytes, nccl::kUint8, root, comm, stream);
    });
  }

  void permute(Group& group, const Call& call, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs, Stream stream) override {
    const auto at = [&](int Pair::*end) {
      return std::find_if(pairs.begin(), pairs.end(),
                          [&](const Pair& pair) { return pair.*end == group.index; });
    };
    const auto sends = at(&Pair::source);
    const auto receives = at(&Pair::destination);
    if (receives == pairs.end() && bytes != 0) {
      cuda::check(cuda::driver().set_8(out, 0, bytes, stream), "cuMemsetD8Async");
    }
    run(group, call, bytes, stream, [&](nccl::Comm comm) {
      return together([&](auto&& each) {
        if (sends != pairs.end()) {
          each(library_.send(in, bytes, nccl::kUint8, sends->destination, comm, stream));
        }
        if (receives != pairs.end()) {
          each(library_.recv(out, bytes, nccl::kUint8, receives->source, comm, stream));
        }
      });
    });
  }

  void send(const Call& call, int peer, int tag, const void* in, size_t bytes,
            Stream stream) override {
    device_.make_current();
    const std::string who = describe(rank(), call, {rank(), peer});
    watch_.check_alive(who);
    NcclHeader header;
    header.bytes = bytes;
    std::lock_guard lock(senders_mutex_);
    auto& sender = senders_[{peer, tag}];
    if (!sender) {
      watch_.check(library_.get_unique_id(&header.id), who, nullptr);
      sender = std::make_unique<NcclSender>(watch_, library_, device_, rank(), peer,
                                            -static_cast<int>(senders_.size()), header.id,
                                            [this, peer, tag](const Call& message) {
                                              if (!concurrent()) return;
                                              host_.recv(message, peer, kAskTags + tag, nullptr, 0,
                                                         Lane::kAsync, nullptr);
                                            });
    }
    sender->send(call, in, bytes, stream);
    host_.send(call, peer, kHeaderTags + tag, &header, sizeof(header), nullptr);
  }

  void recv(const Call& call, int peer, int tag, void* out, size_t bytes, Lane lane,
            Stream stream) override {
    device_.make_current();
    // Where the host's transport is for one thread alone, the sender cannot hear of it.
    if (concurrent()) host_.send(call, peer, kAskTags + tag, nullptr, 0, nullptr);
    NcclHeader header;
    host_.recv(call, peer, kHeaderTags + tag, &header, sizeof(header), lane, nullptr);
    if (header.bytes != bytes) {
      throw std::runtime_error(describe(rank(), call, {peer, rank()}) + ": expected " +
                               std::to_string(bytes) + " bytes, got " +
                               std::to_string(header.bytes));
    }
    receiver(peer, tag).recv(call, header, out, bytes, stream);
  }

  void check_alive() const override { watch_.check_alive("rank " + std::to_string(rank())); }
  void abort(const std::string& message) override { watch_.abort(message); }

  // What is enqueued still runs; ranks that wait for one another's calls do so on the host.
  void stop() override {
    std::lock_guard lock(senders_mutex_);
    for (auto& entry : senders_) entry.second->stop();
  }

  void close() override {
    device_.make_current();
    for (auto& entry : senders_) entry.second->close();
    watch_.close();
  }

 private:
  // `function` is the library's all_reduce or reduce_scatter.
  template <class F>
  void reduce(F function, Group& group, const Call& call, const Blocks& blocks, DType type,
              Reduction reduction, Stream stream) {
    if (nccl_type(type) < 0) {
      throw std::runtime_error(describe(rank(), call, group.ranks) + ": NCCL has no " +
                               reduction_name(reduction) + " of " + dtype_name(type) +
                               "; cast it to int32 before");
    }
    run_all(group, call, blocks, stream, [&](const Block& block, nccl::Comm comm) {
      return function(block.in, block.out, block.count, nccl_type(type),
                      nccl_operation(type, reduction), comm, stream);
    });
  }

  template <class F>
  void run(Group& base, const Call& call, size_t size, Stream stream, F&& f) {
    NcclGroup& group = static_cast<NcclGroup&>(base);
    agree(group, call);
    if (size == 0) return;
    watch_.submit(static_cast<int>(group.lane), group.comm, call, stream,
                  [&] { return f(group.comm.comm); });
  }

  // Calls f for each tensor that is not empty. NCCL launches all of them together.
  template <class F>
  void run_all(Group& group, const Call& call, const Blocks& blocks, Stream stream, F&& f) {
    run(group, call, blocks.count(), stream, [&](nccl::Comm comm) {
      if (blocks.size() == 1) return f(blocks[0], comm);
      return together([&](auto&& each) {
        for (const Block& block : blocks) {
          if (block.count != 0) each(f(block, comm));
        }
      });
    });
  }

  // Calls of one group that NCCL has to see at once. The first error counts.
  template <class F>
  int together(F&& f) {
    int result = library_.group_start();
    if (result != nccl::kSuccess) return result;
    f([&](int one) {
      if (result == nccl::kSuccess) result = one;
    });
    const int ended = library_.group_end();
    return result == nccl::kSuccess ? ended : result;
  }

  void agree(NcclGroup& group, const Call& call) {
    group.history = hash(call.signature, group.history);
    if (!group.seen.insert(call.signature).second) return;
    std::vector<uint64_t> histories(group.ranks.size());
    // This compares the call itself, and says what differs.
    host_.all_gather(*group.host, call,
                     Block(&group.history, histories.data(), sizeof(uint64_t)), nullptr);
    for (size_t i = 0; i < histories.size(); ++i) {
      if (histories[i] == group.history) continue;
      throw std::runtime_error(describe(rank(), call, group.ranks) + ": disagrees with rank " +
                               std::to_string(group.ranks[i]) +
                               " on the collectives before this one");
    }
  }

  NcclReceiver& receiver(int peer, int tag) {
    std::lock_guard lock(receivers_mutex_);
    auto& receiver = receivers_[{peer, tag}];
    if (!receiver) {
      receiver = std::make_unique<NcclReceiver>(watch_, library_, device_, rank(), peer,
                                                kLanes + static_cast<int>(receivers_.size()));
    }
    return *receiver;
  }

  Transport& host_;
  const cuda::Device& device_;
  const nccl::Library& library_;
  NcclWatch watch_;
  // Only this rank's foreground thread asks for groups.
  std::map<std::pair<Lane, std::vector<int>>, std::unique_ptr<NcclGroup>> groups_;
  // By peer and tag.
  std::mutex senders_mutex_;
  std::map<std::pair<int, int>, std::unique_ptr<NcclSender>> senders_;
  std::mutex receivers_mutex_;
  std::map<std::pair<int, int>, std::unique_ptr<NcclReceiver>> receivers_;
};

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(Transport& host, const cuda::Device& device,
                                               const char* library,
                                               const TransportOptions& options) {
  return std::make_unique<NcclTransport>(host, device, nccl::library(library), options);
}

}  // namespace onnxpar
