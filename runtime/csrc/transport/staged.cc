#include "transport/staged.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

#include "abi/cuda_memory.h"

namespace onnxpar {
namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;  // of all blocks of a side together
constexpr int kSlots = 2;

struct StagedGroup : Group {
  Group* host = nullptr;
};

// One side of a call on the device: `blocks` blocks of `bytes`, one after the other.
struct Side {
  std::byte* data = nullptr;
  size_t blocks = 0;  // 0 if nothing is copied on this side
};

// Pinned memory and streams that the calls of one thread use, one after the other.
struct Stage {
  cuda::StreamHandle down, up;  // device to host, and back
  cuda::Slab in[kSlots] = {cuda::Slab(cuda::Slab::Kind::kPinned),
                           cuda::Slab(cuda::Slab::Kind::kPinned)};
  cuda::Slab out[kSlots] = {cuda::Slab(cuda::Slab::Kind::kPinned),
                            cuda::Slab(cuda::Slab::Kind::kPinned)};
  cuda::EventHandle ready;
  cuda::EventHandle came[kSlots];
  cuda::EventHandle went[kSlots];

  // Calls move(in, out, bytes of a block) for each piece of the blocks, in host memory. A piece has
  // the same range of every block.
  template <class Move>
  void pass(const Side& source, const Side& target, size_t bytes, size_t item, Stream stream,
            Move move) {
    const size_t blocks = std::max({source.blocks, target.blocks, size_t{1}});
    const size_t step = std::max(item, kPieceBytes / blocks / item * item);
    ready.record(stream);
    ready.hold(down.get());
    ready.hold(up.get());
    const auto fetch = [&](size_t begin, int slot) {
      const size_t n = std::min(step, bytes - begin);
      std::byte* to = in[slot].get(n * source.blocks, down.get());
      cuda::copy_rows(to, n, source.data + begin, bytes, n, source.blocks, down.get());
      came[slot].record(down.get());
    };
    fetch(0, 0);
    size_t piece = 0;
    for (size_t begin = 0; begin < bytes; begin += step, ++piece) {
      const int slot = static_cast<int>(piece % kSlots);
      const size_t n = std::min(step, bytes - begin);
      if (begin + step < bytes) fetch(begin + step, 1 - slot);
      came[slot].synchronize();
      // The last piece in this slot has been copied to the device.
      went[slot].synchronize();
      std::byte* result = out[slot].get(n * target.blocks, up.get());
      move(in[slot].get(n * source.blocks, down.get()), result, n);
      cuda::copy_rows(target.data + begin, bytes, result, n, n, target.blocks, up.get());
      went[slot].record(up.get());
    }
    went[(piece + kSlots - 1) % kSlots].hold(stream);
  }
};

class StagedTransport : public Transport {
 public:
  StagedTransport(Transport& host, const cuda::Device& device) : host_(host), device_(device) {}

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  bool concurrent() const override { return host_.concurrent(); }

  Group& group(const std::vector<int>& ranks, Lane lane) override {
    auto& group = groups_[{lane, ranks}];
    if (!group) {
      auto made = std::make_unique<StagedGroup>();
      made->host = &host_.group(ranks, lane);
      made->ranks = ranks;
      made->index = made->host->index;
      made->lane = lane;
      group = std::move(made);
    }
    return *group;
  }

  void all_reduce(Group& group, const Call& call, const void* in, void* out, size_t count,
                  DType type, Reduction reduction, Stream stream) override {
    const size_t item = dtype_size(type);
    pass(group, side(in, 1), side(out, 1), count * item, item, stream,
         [&](Group& host, const void* from, void* to, size_t n) {
           host_.all_reduce(host, call, from, to, n / item, type, reduction, nullptr);
         });
  }

  void all_gather(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                  Stream stream) override {
    pass(group, side(in, 1), side(out, group.ranks.size()), bytes, 1, stream,
         [&](Group& host, const void* from, void* to, size_t n) {
           host_.all_gather(host, call, from, to, n, nullptr);
         });
  }

  void reduce_scatter(Group& group, const Call& call, const void* in, void* out, size_t count,
                      DType type, Reduction reduction, Stream stream) override {
    const size_t item = dtype_size(type);
    pass(group, side(in, group.ranks.size()), side(out, 1), count * item, item, stream,
         [&](Group& host, const void* from, void* to, size_t n) {
           host_.reduce_scatter(host, call, from, to, n / item, type, reduction, nullptr);
         });
  }

  void all_to_all(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                  Stream stream) override {
    pass(group, side(in, group.ranks.size()), side(out, group.ranks.size()), bytes, 1, stream,
         [&](Group& host, const void* from, void* to, size_t n) {
           host_.all_to_all(host, call, from, to, n, nullptr);
         });
  }

  void broadcast(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                 int root, Stream stream) override {
    pass(group, side(in, group.index == root ? 1 : 0), side(out, 1), bytes, 1, stream,
         [&](Group& host, const void* from, void* to, size_t n) {
           host_.broadcast(host, call, group.index == root ? from : to, to, n, root, nullptr);
         });
  }

  void permute(Group& group, const Call& call, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs, Stream stream) override {
    pass(group, side(in, 1), side(out, 1), bytes, 1, stream,
         [&](Group& host, const void* from, void* to, size_t n) {
           host_.permute(host, call, from, to, n, pairs, nullptr);
         });
  }

  void send(const Call& call, int peer, int tag, const void* in, size_t bytes,
            Stream stream) override {
    device_.make_current();
    std::lock_guard lock(sending_);
    std::byte* data = message_.get(bytes, stream);
    cuda::copy(data, in, bytes, stream);
    cuda::check(cuda::driver().stream_synchronize(stream), "cuStreamSynchronize");
    host_.send(call, peer, tag, data, bytes, nullptr);
  }

  void recv(const Call& call, int peer, int tag, void* out, size_t bytes, Lane lane,
            Stream stream) override {
    device_.make_current();
    Inward& inward = from(peer, tag);
    std::lock_guard lock(inward.mutex);
    std::byte* data = inward.data.get(bytes, stream);
    host_.recv(call, peer, tag, data, bytes, lane, nullptr);
    cuda::copy(out, data, bytes, stream);
    cuda::check(cuda::driver().stream_synchronize(stream), "cuStreamSynchronize");
  }

  // Only calls of the host's transport wait, and it is aborted too.
  void abort(const std::string&) override {}
  void stop() override {}
  void close() override {}

 private:
  // Memory for messages of one tag from one rank. It is kept, because freeing pinned memory waits for
  // the device.
  struct Inward {
    std::mutex mutex;
    cuda::Slab data{cuda::Slab::Kind::kPinned};
  };

  Inward& from(int peer, int tag) {
    std::lock_guard lock(receiving_);
    auto& inward = inward_[{peer, tag}];
    if (!inward) inward = std::make_unique<Inward>();
    return *inward;
  }

  static Side side(const void* data, size_t blocks) {
    return {static_cast<std::byte*>(const_cast<void*>(data)), blocks};
  }

  template <class Move>
  void pass(Group& group, const Side& source, const Side& target, size_t bytes, size_t item,
            Stream stream, Move move) {
    Group& host = *static_cast<StagedGroup&>(group).host;
    if (bytes == 0) return move(host, nullptr, nullptr, 0);
    stage_.pass(source, target, bytes, item, stream, [&](const void* in, void* out, size_t n) {
      move(host, in, out, n);
    });
  }

  Transport& host_;
  const cuda::Device& device_;
  std::map<std::pair<Lane, std::vector<int>>, std::unique_ptr<StagedGroup>> groups_;
  Stage stage_;
  std::mutex sending_;
  cuda::Slab message_{cuda::Slab::Kind::kPinned};
  std::mutex receiving_;
  std::map<std::pair<int, int>, std::unique_ptr<Inward>> inward_;
};

}  // namespace

std::unique_ptr<Transport> make_staged_transport(Transport& host, const cuda::Device& device) {
  return std::make_unique<StagedTransport>(host, device);
}

}  // namespace onnxpar
