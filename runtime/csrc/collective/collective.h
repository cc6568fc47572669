// A collective operator, independent of onnxruntime: its attributes, its shapes, its execution.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "abi/dtype.h"
#include "abi/values.h"
#include "transport/transport.h"

namespace onnxpar {

enum class Op : int {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kPermute,
  kSend,
  kRecv,
  kBarrier,
  kStart,
  kWait,
  kStartAhead,
  kFinishLater,
  kFinish,
  kBucket,
  kPhilox,
};
inline constexpr int kOps = 16;
const char* op_name(Op op);
// The collectives, the first six; throws std::invalid_argument for another name.
Op collective_from_name(const std::string& name);

struct Collective {
  Op op = Op::kAllReduce;
  std::vector<int> group;  // global ranks; the position is the rank within the group
  Reduction reduction = Reduction::kSum;
  int64_t axis = 0;         // AllGather, ReduceScatter; split_axis of AllToAll
  int64_t concat_axis = 0;  // AllToAll
  int root = 0;             // Broadcast: index within the group
  std::vector<Pair> pairs;  // Permute: indices within the group
  std::vector<std::string> values;  // names of the tensors, if there are several; for messages
  std::string where;        // "AllReduce 'node'"
  std::string attributes;   // as text, for the agreement check
  uint64_t signature = 0;   // hash of the operator and its attributes
  uint64_t place = 0;       // hash of the node's name, which all ranks of the group share

  int size() const { return static_cast<int>(group.size()); }
};

// Reads and checks the attributes. Without a group, the collective is over all ranks of the world.
// Throws std::invalid_argument.
Collective parse_collective(Op op, const std::string& node, const Attributes&, int world_size);

// The shape of the result. Unknown dims are negative and stay so. Throws std::invalid_argument for an
// axis out of range, or a dim that is not divisible.
Shape output_shape(const Collective&, const Shape& input);

// Bytes that one rank sends, by the optimal volumes of the usual algorithms, where n is the bytes of
// the rank's input and g the size of the group; rounded down:
//   AllReduce 2·n·(g-1)/g   AllGather n·(g-1)   ReduceScatter, AllToAll, Broadcast n·(g-1)/g
//   Permute n if the rank sends to another, else 0   Send n
// The transformer predicts with the same formulas.
int64_t bytes_sent(const Collective&, int index, int64_t input_bytes);

// The memory of a collective's tensors, with the operations that packing needs.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void copy(void* to, const void* from, size_t bytes, Stream) = 0;
  virtual void zero(void* to, size_t bytes, Stream) = 0;
  // [outer][parts][chunk] -> [parts][outer][chunk], in bytes. The inverse is the same with outer and
  // parts exchanged.
  virtual void interleave(void* to, const void* from, size_t outer, size_t parts, size_t chunk,
                          Stream) = 0;
  // One of two buffers that are kept from call to call, so that packing does not allocate each time.
  // Calls on one stream may use it one after the other.
  virtual std::byte* scratch(size_t slot, size_t bytes, Stream) = 0;
  // Frees buffers that are too large to keep, after a call.
  virtual void trim() = 0;
};

class HostMemory : public Memory {
 public:
  void copy(void* to, const void* from, size_t bytes, Stream) override;
  void zero(void* to, size_t bytes, Stream) override;
  void interleave(void* to, const void* from, size_t outer, size_t parts, size_t chunk,
                  Stream) override;
  std::byte* scratch(size_t slot, size_t bytes, Stream) override;
  void trim() override;

 private:
  struct Slab {
    std::unique_ptr<std::byte[]> data;
    size_t size = 0;
  };
  Slab slabs_[2];
};

// A tensor of a call, and the place of its result.
struct Operand {
  const void* in;
  void* out;
  Shape input;
};

class CallLog;

// Carries out the collective in one call, which is logged. Only AllReduce, ReduceScatter and AllGather take several
// operands. `in` and `out` may be the same for AllReduce and Broadcast. They are in `memory`, of the
// transport's kind. `behind`: while the rank does something else.
void execute(Transport&, Group&, const Collective&, const List<Operand>&, DType, Memory& memory,
             Stream, CallLog&, bool behind = false);

}  // namespace onnxpar
