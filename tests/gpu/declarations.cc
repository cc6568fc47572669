// What the runtime declares of CUDA's driver and of NCCL by itself, against their own headers. It is
// compiled only: numbers, the layout of structures, and for each entry its arguments' count and sizes.
#include <cuda.h>
#include <nccl.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "abi/cuda_driver.h"
#include "abi/nccl_abi.h"

namespace {

using namespace onnxpar;

#define SAME(ours, theirs) \
  static_assert(static_cast<long long>(ours) == static_cast<long long>(theirs), #theirs)

SAME(cuda::kSuccess, CUDA_SUCCESS);
SAME(cuda::kDeinitialized, CUDA_ERROR_DEINITIALIZED);
SAME(cuda::kNotReady, CUDA_ERROR_NOT_READY);
SAME(cuda::kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
SAME(cuda::kEventTiming, CU_EVENT_DEFAULT);
SAME(cuda::kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
SAME(cuda::kHostAllocPortable, CU_MEMHOSTALLOC_PORTABLE);
SAME(cuda::kOwnCaptures, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
SAME(cuda::kMemoryUnified, CU_MEMORYTYPE_UNIFIED);

SAME(nccl::kSuccess, ncclSuccess);
SAME(nccl::kInProgress, ncclInProgress);
SAME(nccl::kInt8, ncclInt8);
SAME(nccl::kUint8, ncclUint8);
SAME(nccl::kInt32, ncclInt32);
SAME(nccl::kUint32, ncclUint32);
SAME(nccl::kInt64, ncclInt64);
SAME(nccl::kUint64, ncclUint64);
SAME(nccl::kFloat16, ncclFloat16);
SAME(nccl::kFloat32, ncclFloat32);
SAME(nccl::kFloat64, ncclFloat64);
SAME(nccl::kBfloat16, ncclBfloat16);
SAME(nccl::kSum, ncclSum);
SAME(nccl::kProd, ncclProd);
SAME(nccl::kMax, ncclMax);
SAME(nccl::kMin, ncclMin);
SAME(sizeof(nccl::UniqueId), sizeof(ncclUniqueId));
SAME(nccl::Config{}.magic, NCCL_API_MAGIC);

#define AT(ours, field, theirs, name) SAME(offsetof(ours, field), offsetof(theirs, name))
#define COPY(field, name) AT(cuda::Copy2D, field, CUDA_MEMCPY2D, name)
COPY(source_x, srcXInBytes);
COPY(source_y, srcY);
COPY(source_type, srcMemoryType);
COPY(source_host, srcHost);
COPY(source, srcDevice);
COPY(source_array, srcArray);
COPY(source_pitch, srcPitch);
COPY(target_x, dstXInBytes);
COPY(target_y, dstY);
COPY(target_type, dstMemoryType);
COPY(target_host, dstHost);
COPY(target, dstDevice);
COPY(target_array, dstArray);
COPY(target_pitch, dstPitch);
COPY(width, WidthInBytes);
COPY(height, Height);
SAME(sizeof(cuda::Copy2D), sizeof(CUDA_MEMCPY2D));

#define CONFIG(field, name) AT(nccl::Config, field, ncclConfig_t, name)
CONFIG(size, size);
CONFIG(magic, magic);
CONFIG(version, version);
CONFIG(blocking, blocking);
CONFIG(cga_cluster_size, cgaClusterSize);
CONFIG(min_ctas, minCTAs);
CONFIG(max_ctas, maxCTAs);
CONFIG(net_name, netName);
CONFIG(split_share, splitShare);
CONFIG(traffic_class, trafficClass);
CONFIG(comm_name, commName);
CONFIG(collnet_enable, collnetEnable);
CONFIG(cta_policy, CTAPolicy);
CONFIG(shrink_share, shrinkShare);
CONFIG(nvls_ctas, nvlsCTAs);

template <class F>
struct Arguments;
template <class R, class... A>
struct Arguments<R (*)(A...)> {
  using Types = std::tuple<A...>;
};

template <class Ours, class Theirs, size_t... I>
constexpr bool alike(std::index_sequence<I...>) {
  return ((sizeof(std::tuple_element_t<I, Ours>) == sizeof(std::tuple_element_t<I, Theirs>) &&
           std::is_class_v<std::tuple_element_t<I, Ours>> ==
               std::is_class_v<std::tuple_element_t<I, Theirs>>) &&
          ...);
}

template <class OurEntry, class TheirEntry>
constexpr bool same_call() {
  using Ours = typename Arguments<OurEntry>::Types;
  using Theirs = typename Arguments<TheirEntry>::Types;
  constexpr size_t kCount = std::tuple_size_v<Ours>;
  if constexpr (kCount != std::tuple_size_v<Theirs>) {
    return false;
  } else {
    return alike<Ours, Theirs>(std::make_index_sequence<kCount>());
  }
}

// The test writes a line for each entry: ENTRY(Library, member, name).
#define ENTRY(library, member, name) \
  static_assert(same_call<decltype(library::member), decltype(&name)>(), #name);
#include "entries.inc"

}  // namespace
