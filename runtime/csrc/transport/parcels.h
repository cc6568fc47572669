// The data of messages between ranks of one machine, in memory that both map.
//
// A sender has a file for each receiver, into which it copies the data of its messages. MPI carries
// only where the data is, which is small enough that MPI sends it at once. The receiver maps the file,
// copies the data, and marks the place as taken; then the sender uses the place again. So no data
// waits for calls of MPI: MPI asks the receiver before it sends a large message, and the answer waits
// until the sender calls MPI again, perhaps after a long computation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/mpi_memory.h"

namespace onnxpar {

// Where the data of a message is.
struct Parcel {
  FilePlace file;  // without a descriptor: there is no memory, and the data comes by MPI
  uint64_t file_bytes = 0;
  uint64_t offset = 0;  // of the mark, which the data follows
};

// What one rank sends to another. One thread at a time uses it. The file grows to hold all that was on
// its way at once, and keeps that size.
class ParcelSender {
 public:
  // Copies the data, and returns where it is.
  Parcel put(const void* data, size_t bytes);
  // Whether the receiver has taken all.
  bool empty();

 private:
  struct Block {
    size_t begin;
    size_t end;
  };
  void forget_taken();

  std::unique_ptr<SharedFile> file_;
  std::vector<Block> blocks_;  // not taken yet, by their place
};

// What one rank receives from another.
class ParcelReceiver {
 public:
  // Copies the data, whose place is free afterwards; whether this process can map it.
  bool take(const Parcel& parcel, void* out, size_t bytes);

 private:
  std::mutex mutex_;
  std::unique_ptr<SharedFile> file_;
};

}  // namespace onnxpar
