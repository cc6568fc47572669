#include "transport/nested.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

namespace onnxpar {
namespace {

// Elements of an all-reduce between whose steps nothing else happens; this limits the memory.
constexpr size_t kSome = size_t{4} << 20;
// Up to this size every member takes part in all of the reduction between machines: more bytes, but
// one step less.
constexpr size_t kReplicated = size_t{4} << 10;
constexpr size_t kKept = size_t{64} << 20;  // bytes of a buffer that stays between calls

// What a member tells other machines if the members of its own disagree.
struct Refused : Call {
  Refused(const Call& own, const Conflict& conflict)
      : Call(own.where, ~own.signature),
        text(own.detail() + ", which disagrees with " + conflict.what()) {}
  std::string detail() const override { return text; }
  const std::string text;
};

}  // namespace

Machines::Machines(const std::vector<int>& ranks, const std::vector<int>& machine_of) {
  std::map<int, size_t> place;  // of a machine: in the order of their first members
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int machine = machine_of[static_cast<size_t>(ranks[i])];
    const size_t at = place.emplace(machine, members_.size()).first->second;
    if (at == members_.size()) members_.emplace_back();
    members_[at].push_back(static_cast<int>(i));
  }
}

bool Machines::nested() const {
  const size_t first = members_.front().size();
  const auto equal = [&](const std::vector<int>& members) { return members.size() == first; };
  return members_.size() > 1 && first > 1 && std::all_of(members_.begin(), members_.end(), equal);
}

bool Machines::in_blocks() const {
  int next = 0;
  for (const std::vector<int>& members : members_) {
    for (int member : members) {
      if (member != next++) return false;
    }
  }
  return true;
}

int Machines::machine(int member) const {
  for (int machine = 0;; ++machine) {
    const std::vector<int>& found = members(machine);
    if (std::find(found.begin(), found.end(), member) != found.end()) return machine;
  }
}

int Machines::position(int member) const {
  const std::vector<int>& found = members(machine(member));
  return static_cast<int>(std::find(found.begin(), found.end(), member) - found.begin());
}

NestedGroup::NestedGroup(const Machines& machines, int index, SharedGroup& near,
                         MessageGroup& far, MessageGroup& all)
    : machines_(machines), index_(index), near_(near), far_(far), all_(all) {}

std::vector<int> NestedGroup::missing() const {
  std::vector<int> found;
  for (int m : near_.missing()) {
    found.push_back(machines_.members(machines_.machine(index_))[static_cast<size_t>(m)]);
  }
  const size_t position = static_cast<size_t>(machines_.position(index_));
  for (int machine : far_.missing()) found.push_back(machines_.members(machine)[position]);
  if (found.empty()) return all_.missing();
  return found;
}

std::byte* NestedGroup::scratch(size_t slot, size_t bytes) {
  std::vector<std::byte>& memory = scratch_[slot];
  if (memory.size() < bytes) memory.resize(bytes);
  return memory.data();
}

template <class F>
void NestedGroup::agreed(const Call& call, F f) {
  const std::vector<int>& here = machines_.members(machines_.machine(index_));
  try {
    near_.agree(call);
  } catch (const Conflict& e) {
    try {
      far_.agree(Refused(call, e));
    } catch (const Conflict&) {  // this member throws what its own machine disagrees about
    }
    throw Conflict(here[static_cast<size_t>(e.member)], e.what());
  }
  try {
    f();
  } catch (const Conflict& e) {
    const int position = machines_.position(index_);
    throw Conflict(machines_.members(e.member)[static_cast<size_t>(position)], e.what());
  }
  for (std::vector<std::byte>& memory : scratch_) {
    if (memory.size() > kKept) memory = {};
  }
}

void NestedGroup::all_reduce(const Call& call, const Blocks& blocks, DType type,
                             Reduction reduction) {
  const size_t item = dtype_size(type);
  const size_t count = blocks.count();
  agreed(call, [&] {
    size_t begin = 0;
    do {
      std::vector<Block> some;
      blocks.each({begin, begin + kSome}, [&](const Block& b, size_t offset, size_t n, size_t) {
        some.emplace_back(b.in + offset * item, b.out + offset * item, n);
      });
      reduce_some(call, some, type, reduction);
      begin += kSome;
    } while (begin < count);
  });
}

void NestedGroup::reduce_some(const Call& call, const Blocks& blocks, DType type,
                              Reduction reduction) {
  // 16-bit floats are reduced as float32 on all machines, and rounded once.
  const bool wide = accumulates_wide(type, reduction);
  const DType inner = wide ? DType::kFloat32 : type;
  const size_t item = dtype_size(type);
  const size_t moved = dtype_size(inner);
  const size_t count = blocks.count();
  const size_t k = machines_.members(0).size();
  // Of each tensor a share for each member, and the rest for the last.
  size_t shares = 0;
  for (const Block& block : blocks) shares += block.count / k;
  const size_t rests = count - k * shares;
  const bool replicated = count * moved <= kReplicated;
  std::byte* const widened = wide ? scratch(0, count * moved) : nullptr;
  std::byte* const sums = scratch(1, (replicated ? count : shares + rests) * moved);
  std::vector<Block> all, shared, rest;  // to the sums
  size_t first = 0;
  size_t share_at = 0;
  size_t rest_at = shares;
  for (const Block& block : blocks) {
    const std::byte* in = block.in;
    if (wide) {
      std::byte* to = widened + first * moved;
      widen(reinterpret_cast<float*>(to), in, block.count, type);
      in = to;
    }
    const size_t share = block.count / k;
    all.emplace_back(in, sums + first * moved, block.count);
    shared.emplace_back(in, sums + share_at * moved, share);
    rest.emplace_back(in + k * share * moved, sums + rest_at * moved, block.count - k * share);
    first += block.count;
    share_at += share;
    rest_at += block.count - k * share;
  }
  // What of the sums is the result of each tensor, from `at`.
  const auto put = [&](const Block& block, size_t offset, const std::byte* from, size_t n) {
    std::byte* to = block.out + offset * item;
    if (wide) {
      narrow(to, reinterpret_cast<const float*>(from), n, type);
    } else if (n != 0) {
      std::memcpy(to, from, n * item);
    }
  };
  if (replicated) {
    near_.all_reduce(call, all, inner, reduction);
    far_.all_reduce(call, Block(sums, sums, count), inner, reduction);
    for (size_t i = 0; i < all.size(); ++i) put(blocks[i], 0, all[i].out, all[i].count);
    return;
  }
  const int last = static_cast<int>(k) - 1;
  near_.reduce_scatter(call, shared, inner, reduction);
  if (rests != 0) near_.all_reduce(call, rest, inner, reduction);
  const bool more = machines_.position(index_) == last;
  far_.all_reduce(call, Block(sums, sums, shares + (more ? rests : 0)), inner, reduction);
  if (rests != 0) {
    std::byte* const from = sums + shares * moved;
    near_.broadcast(call, from, from, rests * moved, last);
    for (size_t i = 0; i < rest.size(); ++i) {
      put(blocks[i], k * shared[i].count, rest[i].out, rest[i].count);
    }
  }
  std::byte* narrowed = sums;
  if (wide) {
    narrowed = scratch(0, shares * item);
    narrow(narrowed, reinterpret_cast<const float*>(sums), shares, type);
  }
  std::vector<Block> results;
  share_at = 0;
  for (size_t i = 0; i < shared.size(); ++i) {
    results.emplace_back(narrowed + share_at * item, blocks[i].out, shared[i].count * item);
    share_at += shared[i].count;
  }
  near_.all_gather(call, results);
}

void NestedGroup::reduce_scatter(const Call& call, const Blocks& blocks, DType type,
                                 Reduction reduction) {
  if (!machines_.in_blocks()) {
    agreed(call, [&] { far_.agree(call); });
    return all_.reduce_scatter(call, blocks, type, reduction);
  }
  const bool wide = accumulates_wide(type, reduction);
  const DType inner = wide ? DType::kFloat32 : type;
  const size_t moved = dtype_size(inner);
  const size_t k = machines_.members(0).size();
  const size_t count = blocks.count();
  agreed(call, [&] {
    const size_t machines = static_cast<size_t>(machines_.count());
    // The sums over this machine of what the members at this position get, and then the results.
    std::byte* const sums = scratch(1, (machines + 1) * count * moved);
    std::byte* const results = sums + machines * count * moved;
    for (size_t m = 0; m < machines; ++m) {
      std::vector<Block> near;
      size_t first = 0;
      for (const Block& block : blocks) {
        const std::byte* in = block.in + m * k * block.count * dtype_size(type);
        if (wide) {
          std::byte* widened = scratch(0, k * count * moved) + k * first * moved;
          widen(reinterpret_cast<float*>(widened), in, k * block.count, type);
          in = widened;
        }
        near.emplace_back(in, sums + (machines * first + m * block.count) * moved, block.count);
        first += block.count;
      }
      near_.reduce_scatter(call, near, inner, reduction);
    }
    std::vector<Block> far;
    size_t first = 0;
    for (const Block& block : blocks) {
      far.emplace_back(sums + machines * first * moved,
                       wide ? results + first * moved : block.out, block.count);
      first += block.count;
    }
    far_.reduce_scatter(call, far, inner, reduction);
    if (!wide) return;
    for (size_t i = 0; i < far.size(); ++i) {
      narrow(blocks[i].out, reinterpret_cast<const float*>(far[i].out), far[i].count, type);
    }
  });
}

void NestedGroup::all_gather(const Call& call, const Blocks& blocks) {
  if (!machines_.in_blocks()) {
    agreed(call, [&] { far_.agree(call); });
    return all_.all_gather(call, blocks);
  }
  agreed(call, [&] {
    const size_t machines = static_cast<size_t>(machines_.count());
    const size_t k = machines_.members(0).size();
    std::byte* const received = scratch(1, machines * blocks.count());
    std::vector<Block> far;
    size_t first = 0;
    for (const Block& block : blocks) {
      far.emplace_back(block.in, received + machines * first, block.count);
      first += block.count;
    }
    far_.all_gather(call, far);
    for (size_t m = 0; m < machines; ++m) {
      std::vector<Block> near;
      for (size_t i = 0; i < far.size(); ++i) {
        const size_t bytes = far[i].count;
        near.emplace_back(far[i].out + m * bytes, blocks[i].out + m * k * bytes, bytes);
      }
      near_.all_gather(call, near);
    }
  });
}

void NestedGroup::broadcast(const Call& call, const void* in, void* out, size_t bytes, int root) {
  agreed(call, [&] {
    const int position = machines_.position(root);
    if (machines_.position(index_) == position) {
      far_.broadcast(call, in, out, bytes, machines_.machine(root));
    } else {
      far_.agree(call);
    }
    near_.broadcast(call, out, out, bytes, position);
  });
}

// Members that disagree may call something else on their machine, so they compare as for other calls.
void NestedGroup::all_to_all(const Call& call, const void* in, void* out, size_t bytes) {
  agreed(call, [&] { far_.agree(call); });
  all_.all_to_all(call, in, out, bytes);
}

void NestedGroup::permute(const Call& call, const void* in, void* out, size_t bytes,
                          const std::vector<Pair>& pairs) {
  agreed(call, [&] { far_.agree(call); });
  all_.permute(call, in, out, bytes, pairs);
}

}  // namespace onnxpar
