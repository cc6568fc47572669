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

// What a call moves: tensors of `blocks` blocks of their count on each side, one after the other; none
// if nothing is copied on a side. `item` is the size of what they count, in bytes.
struct Sides {
  Blocks tensors;
  size_t in_blocks = 0;
  size_t out_blocks = 0;
  size_t item = 1;
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

  // Calls move(tensors) for each piece, with the piece's parts of tensors in host memory. A part has the
  // same range of every block.
  template <class Move>
  void pass(const Sides& sides, Stream stream, Move move) {
    const size_t item = sides.item;
    const size_t count = sides.tensors.count();
    const size_t blocks = std::max({sides.in_blocks, sides.out_blocks, size_t{1}});
    const size_t step = std::max<size_t>(1, kPieceBytes / blocks / item);
    ready.record(stream);
    ready.hold(down.get());
    ready.hold(up.get());
    const auto piece_at = [&](size_t begin) {
      return Range{begin, std::min(begin + step, count)};
    };
    const auto fetch = [&](size_t begin, int slot) {
      const Range piece = piece_at(begin);
      std::byte* to = in[slot].get(piece.size() * item * sides.in_blocks, down.get());
      sides.tensors.each(piece, [&](const Block& b, size_t offset, size_t n, size_t at) {
        cuda::copy_rows(to + at * item * sides.in_blocks, n * item, b.in + offset * item,
                        b.count * item, n * item, sides.in_blocks, down.get());
      });
      came[slot].record(down.get());
    };
    fetch(0, 0);
    size_t number = 0;
    for (size_t begin = 0; begin < count; begin += step, ++number) {
      const int slot = static_cast<int>(number % kSlots);
      const Range piece = piece_at(begin);
      if (begin + step < count) fetch(begin + step, 1 - slot);
      came[slot].synchronize();
      // The last piece in this slot has been copied to the device.
      went[slot].synchronize();
      const std::byte* from = in[slot].get(piece.size() * item * sides.in_blocks, down.get());
      std::byte* results = out[slot].get(piece.size() * item * sides.out_blocks, up.get());
      std::vector<Block> parts;
      sides.tensors.each(piece, [&](const Block&, size_t, size_t n, size_t at) {
        parts.emplace_back(from + at * item * sides.in_blocks,
                           results + at * item * sides.out_blocks, n);
      });
      move(parts);
      sides.tensors.each(piece, [&](const Block& b, size_t offset, size_t n, size_t at) {
        cuda::copy_rows(b.out + offset * item, b.count * item,
                        results + at * item * sides.out_blocks, n * item, n * item,
                        sides.out_blocks, up.get());
      });
      went[slot].record(up.get());
    }
    went[(number + kSlots - 1) % kSlots].hold(stream);
  }
};

class StagedTransport : public Transport {
 public:
  StagedTransport(Transport& host, const cuda::Device& device) : host_(host), device_(device) {}

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  bool concurrent() const override { return host_.concurrent(); }
  bool prompt(int) const override { return false; }

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

  void all_reduce(Group& group, const Call& call, const Blocks& blocks, DType type,
                  Reduction reduction, Stream stream) override {
    pass(group, {blocks, 1, 1, dtype_size(type)}, stream, [&](Group& host, const Blocks& parts) {
      host_.all_reduce(host, call, parts, type, reduction, nullptr);
    });
  }

  void all_gather(Group& group, const Call& call, const Blocks& blocks, Stream stream) override {
    pass(group, {blocks, 1, group.ranks.size()}, stream, [&](Group& host, const Blocks& parts) {
      host_.all_gather(host, call, parts, nullptr);
    });
  }

  void reduce_scatter(Group& group, const Call& call, const Blocks& blocks, DType type,
                      Reduction reduction, Stream stream) override {
    pass(group, {blocks, group.ranks.size(), 1, dtype_size(type)}, stream,
         [&](Group& host, const Blocks& parts) {
           host_.reduce_scatter(host, call, parts, type, reduction, nullptr);
         });
  }

  void all_to_all(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                  Stream stream) override {
    const size_t members = group.ranks.size();
    const Block tensor(in, out, bytes);
    pass(group, {tensor, members, members}, stream, [&](Group& host, const Blocks& parts) {
      host_.all_to_all(host, call, parts[0].in, parts[0].out, parts[0].count, nullptr);
    });
  }

  void broadcast(Group& group, const Call& call, const void* in, void* out, size_t bytes,
                 int root, Stream stream) override {
    const bool gives = group.index == root;
    const Block tensor(in, out, bytes);
    pass(group, {tensor, gives ? size_t{1} : 0, 1}, stream,
         [&](Group& host, const Blocks& parts) {
           const Block& part = parts[0];
           host_.broadcast(host, call, gives ? part.in : part.out, part.out, part.count, root,
                           nullptr);
         });
  }

  void permute(Group& group, const Call& call, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs, Stream stream) override {
    const Block tensor(in, out, bytes);
    pass(group, {tensor, 1, 1}, stream, [&](Group& host, const Blocks& parts) {
      const Block& part = parts[0];
      host_.permute(host, call, part.in, part.out, part.count, pairs, nullptr);
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

  template <class Move>
  void pass(Group& group, const Sides& sides, Stream stream, Move move) {
    Group& host = *static_cast<StagedGroup&>(group).host;
    if (sides.tensors.count() == 0) return move(host, Block(nullptr, nullptr, 0));
    stage_.pass(sides, stream, [&](const Blocks& parts) { move(host, parts); });
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
