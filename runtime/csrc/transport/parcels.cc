#include "transport/parcels.h"

#include <algorithm>
#include <atomic>
#include <cstring>

namespace onnxpar {
namespace {

constexpr size_t kLine = 64;  // bytes of a cache line; the mark has one
// Memory is given back after so many messages, if none of the last so many has needed it: giving back
// what the next message needs would cost more than copying its data.
constexpr int kMessages = 256;
using Mark = std::atomic<uint32_t>;  // 0, and 1 when the data has been taken

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

void ParcelSender::release_unused() {
  if (++puts_ < kMessages) return;
  const size_t kept = std::max(needed_, before_);
  if (kept < used_) used_ = file_->release(kept, used_);
  puts_ = 0;
  before_ = needed_;
  needed_ = blocks_.empty() ? 0 : blocks_.back().end;
}

bool ParcelSender::empty() {
  forget_taken();
  return blocks_.empty();
}

Parcel ParcelSender::put(const void* data, size_t bytes) {
  const size_t size = kLine + (bytes + kLine - 1) / kLine * kLine;
  forget_taken();
  release_unused();
  // The first gap that is large enough.
  size_t begin = 0;
  auto next = blocks_.begin();
  for (; next != blocks_.end() && next->begin - begin < size; ++next) begin = next->end;
  if (size > file_->size() - begin) return kNoParcel;
  const size_t end = begin + size;
  needed_ = std::max(needed_, end);
  used_ = std::max(used_, end);
  mark(*file_, begin).store(0, std::memory_order_relaxed);
  if (bytes != 0) std::memcpy(file_->data() + begin + kLine, data, bytes);
  // The message that MPI carries orders the accesses of both processes. The fences, here and in
  // `take_parcel`, keep this process's own on their side of it.
  std::atomic_thread_fence(std::memory_order_release);
  blocks_.insert(next, {begin, end});
  return static_cast<Parcel>(begin);
}

void take_parcel(const SharedFile& file, Parcel parcel, void* out, size_t bytes) {
  const size_t offset = static_cast<size_t>(parcel);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (bytes != 0) std::memcpy(out, file.data() + offset + kLine, bytes);
  mark(file, offset).store(1, std::memory_order_release);
}

}  // namespace onnxpar
