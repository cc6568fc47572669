#include "abi/live_bytes.h"

#include <cstdlib>
#include <new>

#include "abi/ort_io.h"

namespace onnxpar {
namespace {

// The alignment of onnxruntime's own kernels; the size of a block is kept in front of it.
constexpr size_t kAlignment = 64;

LiveBytes& self(ort::Allocator* allocator) { return *static_cast<LiveBytes*>(allocator); }

}  // namespace

LiveBytes::LiveBytes() : Allocator{} {
  check(api().create_env(ort::kLogError, "onnxpar", &env_));
  check(api().cpu_memory_info(ort::kDeviceAllocator, ort::kMemoryDefault, &info_));
  version = ort::kAllocatorVersion;
  alloc = [](Allocator* a, size_t bytes) { return self(a).take(bytes); };
  free = [](Allocator* a, void* memory) { self(a).give(memory); };
  info = [](const Allocator* a) -> const ort::MemoryInfo* {
    return static_cast<const LiveBytes*>(a)->info_;
  };
}

void LiveBytes::install() { check(api().register_allocator(env_, this)); }
void LiveBytes::uninstall() { check(api().unregister_allocator(env_, info_)); }

void* LiveBytes::take(size_t bytes) {
  const size_t rounded = (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment;
  void* block = bytes == 0 || rounded < bytes ? nullptr : std::aligned_alloc(kAlignment, rounded);
  // For onnxruntime a null pointer means that there is no memory, except for zero bytes.
  if (block == nullptr) return nullptr;
  *static_cast<size_t*>(block) = bytes;
  count(static_cast<int64_t>(bytes));
  return static_cast<char*>(block) + kAlignment;
}

void LiveBytes::give(void* memory) {
  if (memory == nullptr) return;
  void* block = static_cast<char*>(memory) - kAlignment;
  count(-static_cast<int64_t>(*static_cast<size_t*>(block)));
  std::free(block);
}

}  // namespace onnxpar
