// What Python calls through ctypes, besides the public interface, under the same rules.
#pragma once

#include <cstddef>
#include <cstdint>

#include "capi/onnxpar.h"

namespace onnxpar {
class LiveBytes;
class TimeLimit;
}

// The version of NCCL in this file, as 10000 major + 100 minor + patch; 0 on failure.
ONNXPAR_EXPORT int onnxpar_nccl_version(const char* library);
// Fails if the world was aborted, even if calls on a GPU did not report it.
ONNXPAR_EXPORT int onnxpar_check_device(const onnxpar::World* world, int rank);
// Fails if a kernel on the stream, which has been waited for, has found an invalid value, such as a
// label that is not one of the classes.
ONNXPAR_EXPORT int onnxpar_check_computed(void* stream);
// Unless onnxpar_end_limit is called within this time, the message goes to stderr and the process
// ends with code 1. This works while the process waits in a call of MPI and holds Python's lock.
// Null if no thread can be made.
ONNXPAR_EXPORT onnxpar::TimeLimit* onnxpar_begin_limit(double seconds, const char* message);
ONNXPAR_EXPORT void onnxpar_end_limit(onnxpar::TimeLimit* limit);
// Number of operators, their names, and a rank's counts of each.
ONNXPAR_EXPORT int onnxpar_ops();
ONNXPAR_EXPORT const char* onnxpar_op_name(int op);
ONNXPAR_EXPORT int onnxpar_counter(const onnxpar::World* world, int rank, int op, int64_t* calls,
                                   int64_t* bytes);
ONNXPAR_EXPORT int onnxpar_reset_counters(const onnxpar::World* world, int rank);
// Whether data of the group travels while the rank computes: 1 or 0; -1 on failure. In host memory.
ONNXPAR_EXPORT int onnxpar_overlaps(const onnxpar::World* world, int rank, const int* group,
                                    int members);
// Whether collectives of the rank may run in the background of its computation (1, at first) or not.
ONNXPAR_EXPORT int onnxpar_allow_background(const onnxpar::World* world, int rank, int allowed);
// Keeps all calls of the rank from now on, or only the last ones; forgets those that were kept.
ONNXPAR_EXPORT int onnxpar_keep_calls(const onnxpar::World* world, int rank, int keep);
// Takes the calls that were kept and have ended: their number; -1 on failure.
ONNXPAR_EXPORT int64_t onnxpar_take_calls(const onnxpar::World* world, int rank);
// Copies what this thread has taken: a row of 13 64-bit integers for each call, as `LoggedCall`.
ONNXPAR_EXPORT int onnxpar_read_calls(void* rows);
// Nanoseconds for which the rank's foreground has communicated so far; -1 on failure.
ONNXPAR_EXPORT int64_t onnxpar_foreground_ns(const onnxpar::World* world, int rank);
// The names and channels of the rank's calls, as JSON; until the thread's next call. Null on failure.
ONNXPAR_EXPORT const char* onnxpar_call_tables(const onnxpar::World* world, int rank);
// The file to which the rank's last calls are written when it fails; empty for none.
ONNXPAR_EXPORT int onnxpar_calls_file(const onnxpar::World* world, int rank, const char* path);
// Writes the last calls now, with a reason, if there is such a file; with `fails` as the last thing that
// the rank writes there, and says so on stderr.
ONNXPAR_EXPORT int onnxpar_write_calls(const onnxpar::World* world, int rank, const char* reason,
                                       int fails);
// An allocator that counts the bytes of sessions on the CPU, never freed; only after RegisterCustomOps
// has run. Null on failure.
ONNXPAR_EXPORT onnxpar::LiveBytes* onnxpar_live_bytes();
// Sessions made between the two calls, with the environment's allocators, are counted.
ONNXPAR_EXPORT int onnxpar_live_bytes_install(onnxpar::LiveBytes* counter);
ONNXPAR_EXPORT int onnxpar_live_bytes_uninstall(onnxpar::LiveBytes* counter);
ONNXPAR_EXPORT int onnxpar_live_bytes_read(const onnxpar::LiveBytes* counter, int64_t* live,
                                           int64_t* peak);
ONNXPAR_EXPORT int onnxpar_live_bytes_reset(onnxpar::LiveBytes* counter);
// Also counts the host memory that the rank's collectives in the background have from now on.
ONNXPAR_EXPORT int onnxpar_live_bytes_count(onnxpar::LiveBytes* counter,
                                            const onnxpar::World* world, int rank);
// Compiles every kernel for GPUs of a compute capability (90 is 9.0), for every element type, and
// drops the result: a check that needs NVRTC but no GPU.
ONNXPAR_EXPORT int onnxpar_compile_kernels(int capability);
// A message of host memory to or from the global rank `peer`, outside a session; counted as Send and
// Recv. `what` names it in error messages. Sending does not wait for the receiver. Receiving in the
// background has no time limit; if onnxpar_concurrent returns 1 (else 0, or -1 on failure), several
// threads may receive at once, each from another peer.
ONNXPAR_EXPORT int onnxpar_concurrent(const onnxpar::World* world, int rank);
// Whether a message from `peer` arrives although neither rank makes calls while it is under way, so that
// nothing is gained by receiving it in the background: 1 or 0, or -1 on failure.
ONNXPAR_EXPORT int onnxpar_prompt(const onnxpar::World* world, int rank, int peer);
ONNXPAR_EXPORT int onnxpar_send(const onnxpar::World* world, int rank, int peer, int tag,
                                const void* in, size_t bytes, const char* what);
ONNXPAR_EXPORT int onnxpar_recv(const onnxpar::World* world, int rank, int peer, int tag, void* out,
                                size_t bytes, int background, const char* what);
// The same for memory on the rank's GPU, which it must have (onnxpar_open_device). Sending copies on
// the stream; a received message is complete for later work on the stream.
ONNXPAR_EXPORT int onnxpar_send_device(const onnxpar::World* world, int rank, int peer, int tag,
                                       const void* in, size_t bytes, void* stream,
                                       const char* what);
ONNXPAR_EXPORT int onnxpar_recv_device(const onnxpar::World* world, int rank, int peer, int tag,
                                       void* out, size_t bytes, void* stream, int background,
                                       const char* what);
