// The data of messages between ranks of one machine, in memory that all of them map.
//
// Each rank has a file that the others have mapped since the world was made, so no later call can fail to
// map it. A sender copies the data of its messages into its file; MPI carries only where the data is,
// which is small enough that MPI sends it at once. The receiver copies the data, and marks the place as
// taken; then the sender uses the place again. So no data waits for calls of MPI: MPI asks the receiver
// before it sends a large message, and the answer waits until the sender calls MPI again, perhaps after
// a long computation. What finds no room travels by MPI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/mpi_memory.h"

namespace onnxpar {

// Where the data of a message is in the sender's file: the offset of its mark, which the data follows.
using Parcel = int64_t;
inline constexpr Parcel kNoParcel = -1;

// What one rank sends to the others of its machine. One thread at a time uses it.
class ParcelSender {
 public:
  // Of a sender's file. Pages that no message has used take no memory.
  static constexpr size_t kBytes = size_t{1} << 30;

  explicit ParcelSender(std::unique_ptr<SharedFile> file) : file_(std::move(file)) {}
  // Copies the data, and returns where it is; kNoParcel if there is no room.
  Parcel put(const void* data, size_t bytes);
  // Whether the receivers have taken all.
  bool empty();

 private:
  struct Block {
    size_t begin;
    size_t end;
  };
  void forget_taken();
  // Gives memory back that the last messages did not need.
  void release_unused();

  const std::unique_ptr<SharedFile> file_;
  std::vector<Block> blocks_;  // not taken yet, by their place
  size_t used_ = 0;    // where the pages end that take memory
  int puts_ = 0;       // since memory was last given back
  size_t needed_ = 0;  // where the data of these has ended
  size_t before_ = 0;  // and of those before
};

// Copies the data of a message out of its sender's file. Its place is free afterwards.
void take_parcel(const SharedFile& file, Parcel parcel, void* out, size_t bytes);

}  // namespace onnxpar
