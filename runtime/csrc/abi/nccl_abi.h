// The part of NCCL that this library uses, opened at run time and declared by ourselves.
//
// NCCL's C interface keeps its entries, its numbers and its structures: a structure says how large it
// is and of which version, and a newer library takes an older one. What stands here is as of 2.27.
#pragma once

#include <climits>
#include <cstddef>

#include "abi/cuda_driver.h"

namespace onnxpar::nccl {

using Comm = void*;

struct UniqueId {  // passed by value
  char data[128];
};

inline constexpr int kSuccess = 0;
inline constexpr int kInProgress = 7;

// ncclDataType_t
inline constexpr int kInt8 = 0;
inline constexpr int kUint8 = 1;
inline constexpr int kInt32 = 2;
inline constexpr int kUint32 = 3;
inline constexpr int kInt64 = 4;
inline constexpr int kUint64 = 5;
inline constexpr int kFloat16 = 6;
inline constexpr int kFloat32 = 7;
inline constexpr int kFloat64 = 8;
inline constexpr int kBfloat16 = 9;

// ncclRedOp_t
inline constexpr int kSum = 0;
inline constexpr int kProd = 1;
inline constexpr int kMax = 2;
inline constexpr int kMin = 3;

// The least version that is used; as NCCL counts, 2.27.0.
inline constexpr int kLeastVersion = 22700;

// ncclConfig_t as of 2.27; INT_MIN and null are NCCL's own choice.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kLeastVersion;
  int blocking = 1;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
  int traffic_class = INT_MIN;
  const char* comm_name = nullptr;
  int collnet_enable = INT_MIN;
  int cta_policy = INT_MIN;
  int shrink_share = INT_MIN;
  int nvls_ctas = INT_MIN;
};
static_assert(offsetof(Config, net_name) == 32);
static_assert(offsetof(Config, comm_name) == 48);
static_assert(sizeof(Config) == 72);

// X(member, exported name, arguments). Every entry returns an ncclResult_t.
#define ONNXPAR_NCCL(X)                                                                            \
  X(get_version, "ncclGetVersion", int*)                                                           \
  X(get_unique_id, "ncclGetUniqueId", UniqueId*)                                                   \
  X(comm_init, "ncclCommInitRankConfig", Comm*, int, UniqueId, int, Config*)                       \
  X(comm_destroy, "ncclCommDestroy", Comm)                                                         \
  X(comm_abort, "ncclCommAbort", Comm)                                                             \
  X(comm_async_error, "ncclCommGetAsyncError", Comm, int*)                                         \
  X(group_start, "ncclGroupStart", void)                                                             \
  X(group_end, "ncclGroupEnd", void)                                                                 \
  X(all_reduce, "ncclAllReduce", const void*, void*, size_t, int, int, Comm, cuda::Stream)         \
  X(all_gather, "ncclAllGather", const void*, void*, size_t, int, Comm, cuda::Stream)              \
  X(reduce_scatter, "ncclReduceScatter", const void*, void*, size_t, int, int, Comm, cuda::Stream) \
  X(broadcast, "ncclBroadcast", const void*, void*, size_t, int, int, Comm, cuda::Stream)          \
  X(send, "ncclSend", const void*, size_t, int, int, Comm, cuda::Stream)                           \
  X(recv, "ncclRecv", void*, size_t, int, int, Comm, cuda::Stream)

struct Library {
#define X(member, name, ...) int (*member)(__VA_ARGS__) = nullptr;
  ONNXPAR_NCCL(X)
#undef X
  const char* (*error_text)(int) = nullptr;   // ncclGetErrorString
  const char* (*last_error)(Comm) = nullptr;  // ncclGetLastError
  int version = 0;
};

// The library, opened at the first call with this path. Throws std::runtime_error saying what is
// missing: the file, an entry, or a version that is new enough.
const Library& library(const char* path);

}  // namespace onnxpar::nccl
