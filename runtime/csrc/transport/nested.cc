#include "transport/nested.h"

#include <algorithm>
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

void NestedGroup::all_reduce(const Call& call, const void* in, void* out, size_t count, DType type,
                             Reduction reduction) {
  const size_t item = dtype_size(type);
  agreed(call, [&] {
    size_t begin = 0;
    do {
      const size_t n = std::min(kSome, count - begin);
      reduce_some(call, static_cast<const std::byte*>(in) + begin * item,
                  static_cast<std::byte*>(out) + begin * item, n, type, reduction);
      begin += n;
    } while (begin < count);
  });
}

void NestedGroup::reduce_some(const Call& call, const std::byte* in, std::byte* out, size_t count,
                              DType type, Reduction reduction) {
  // 16-bit floats are reduced as float32 on all machines, and rounded once.
  const bool wide = accumulates_wide(type, reduction);
  const DType inner = wide ? DType::kFloat32 : type;
  const size_t item = dtype_size(type);
  const size_t moved = dtype_size(inner);
  const size_t k = machines_.members(0).size();
  if (wide) {
    std::byte* widened = scratch(0, count * moved);
    widen(reinterpret_cast<float*>(widened), in, count, type);
    in = widened;
  }
  if (count * moved <= kReplicated) {
    std::byte* sums = wide ? scratch(1, count * moved) : out;
    near_.all_reduce(call, in, sums, count, inner, reduction);
    far_.all_reduce(call, sums, sums, count, inner, reduction);
    if (wide) narrow(out, reinterpret_cast<const float*>(sums), count, type);
    return;
  }
  // A share for each member, and the rest for the last.
  const size_t share = count / k;
  const size_t rest = count - k * share;
  const int last = static_cast<int>(k) - 1;
  std::byte* sums = scratch(1, (share + rest) * moved);
  near_.reduce_scatter(call, in, sums, share, inner, reduction);
  if (rest != 0) {
    near_.all_reduce(call, in + k * share * moved, sums + share * moved, rest, inner, reduction);
  }
  const bool more = machines_.position(index_) == last;
  far_.all_reduce(call, sums, sums, share + (more ? rest : 0), inner, reduction);
  if (wide) {
    std::byte* narrowed = scratch(0, (share + rest) * item);
    narrow(narrowed, reinterpret_cast<const float*>(sums), share + rest, type);
    sums = narrowed;
  }
  near_.all_gather(call, sums, out, share * item);
  if (rest != 0) {
    near_.broadcast(call, sums + share * item, out + k * share * item, rest * item, last);
  }
}

void NestedGroup::reduce_scatter(const Call& call, const void* in, void* out, size_t count,
                                 DType type, Reduction reduction) {
  if (!machines_.in_blocks()) {
    agreed(call, [&] { far_.agree(call); });
    return all_.reduce_scatter(call, in, out, count, type, reduction);
  }
  const bool wide = accumulates_wide(type, reduction);
  const DType inner = wide ? DType::kFloat32 : type;
  const size_t moved = dtype_size(inner);
  const size_t k = machines_.members(0).size();
  agreed(call, [&] {
    const std::byte* from = static_cast<const std::byte*>(in);
    const size_t machines = static_cast<size_t>(machines_.count());
    // The sums over this machine of what the members at this position get, and then the result.
    std::byte* sums = scratch(1, (machines + 1) * count * moved);
    for (size_t m = 0; m < machines; ++m) {
      const std::byte* blocks = from + m * k * count * dtype_size(type);
      if (wide) {
        std::byte* widened = scratch(0, k * count * moved);
        widen(reinterpret_cast<float*>(widened), blocks, k * count, type);
        blocks = widened;
      }
      near_.reduce_scatter(call, blocks, sums + m * count * moved, count, inner, reduction);
    }
    std::byte* result = sums + machines * count * moved;
    far_.reduce_scatter(call, sums, wide ? result : out, count, inner, reduction);
    if (wide) narrow(out, reinterpret_cast<const float*>(result), count, type);
  });
}

void NestedGroup::all_gather(const Call& call, const void* in, void* out, size_t bytes) {
  if (!machines_.in_blocks()) {
    agreed(call, [&] { far_.agree(call); });
    return all_.all_gather(call, in, out, bytes);
  }
  agreed(call, [&] {
    const size_t machines = static_cast<size_t>(machines_.count());
    std::byte* blocks = scratch(1, machines * bytes);
    far_.all_gather(call, in, blocks, bytes);
    const size_t machine_bytes = machines_.members(0).size() * bytes;
    for (size_t m = 0; m < machines; ++m) {
      near_.all_gather(call, blocks + m * bytes,
                       static_cast<std::byte*>(out) + m * machine_bytes, bytes);
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
