#include "transport/parcels.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace onnxpar {
namespace {

constexpr size_t kLine = 64;                   // bytes of a cache line; the mark has one
constexpr size_t kLeast = size_t{1} << 20;     // bytes of a file; pages that are not used take none
using Mark = std::atomic<uint32_t>;            // 0, and 1 when the data has been taken

static_assert(Mark::is_always_lock_free, "processes share the marks");

Mark& mark(const SharedFile& file, size_t offset) {
  return *reinterpret_cast<Mark*>(file.data() + offset);
}

}  // namespace

void ParcelSender::forget_taken() {
  const auto taken = [&](const Block& block) {
    return mark(*file_, block.begin).load(std::memory_order_acquire) != 0;
  };
  blocks_.erase(std::remove_if(blocks_.begin(), blocks_.end(), taken), blocks_.end());
}

bool ParcelSender::empty() {
  forget_taken();
  return blocks_.empty();
}

Parcel ParcelSender::put(const void* data, size_t bytes) {
  const size_t size = kLine + (bytes + kLine - 1) / kLine * kLine;
  forget_taken();
  // The first gap that is large enough.
  size_t begin = 0;
  auto next = blocks_.begin();
  for (; next != blocks_.end() && next->begin - begin < size; ++next) begin = next->end;
  const size_t end = begin + size;
  if (!file_) {
    file_ = SharedFile::make(std::max(kLeast, end));
    if (!file_) return {};
  } else if (end > file_->size() && !file_->grow(std::max(2 * file_->size(), end))) {
    return {};
  }
  mark(*file_, begin).store(0, std::memory_order_relaxed);
  if (bytes != 0) std::memcpy(file_->data() + begin + kLine, data, bytes);
  // The message that MPI carries orders the accesses of both processes. The fences, here and in `take`,
  // keep this process's own on their side of it.
  std::atomic_thread_fence(std::memory_order_release);
  blocks_.insert(next, {begin, end});
  return {file_->place(), file_->size(), begin};
}

bool ParcelReceiver::take(const Parcel& parcel, void* out, size_t bytes) {
  std::lock_guard lock(mutex_);
  // A sender has one file, which grows.
  if (!file_ || file_->size() < parcel.file_bytes) {
    file_ = SharedFile::open(parcel.file, parcel.file_bytes);
    if (!file_) return false;
    file_->close();
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  if (bytes != 0) std::memcpy(out, file_->data() + parcel.offset + kLine, bytes);
  mark(*file_, parcel.offset).store(1, std::memory_order_release);
  return true;
}

}  // namespace onnxpar
