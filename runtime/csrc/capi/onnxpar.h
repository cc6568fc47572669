/* The interface of onnxpar's operator library for programs in C, C++ and other languages.

   Functions that return an int return 0 on success, if nothing else is said; functions that return a
   pointer return null on failure. `onnxpar_error` has the message of the last failure of the calling
   thread. Element types are the numbers of onnx.TensorProto.DataType, which are onnxruntime's too.
   docs/c_api.md says what the library needs from its host, and in which order to call. */
#ifndef ONNXPAR_H
#define ONNXPAR_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define ONNXPAR_EXPORT extern "C" __attribute__((visibility("default")))
namespace onnxpar {
struct World;
class Directory;
class Run;
}
typedef onnxpar::World onnxpar_world;
typedef onnxpar::Directory onnxpar_directory;
typedef onnxpar::Run onnxpar_run;
#else
#define ONNXPAR_EXPORT extern __attribute__((visibility("default")))
typedef struct onnxpar_world onnxpar_world;
typedef struct onnxpar_directory onnxpar_directory;
typedef struct onnxpar_run onnxpar_run;
#endif

/* The message of this thread's last call that failed; until its next call. */
ONNXPAR_EXPORT const char* onnxpar_error(void);

/* ---- Ranks ---------------------------------------------------------------------------------- */

/* This process as one rank of MPI_COMM_WORLD. Initialises MPI, with MPI_THREAD_MULTIPLE, unless the
   program has done so. All processes of the job must call it. A call waits for other ranks for
   `timeout_s` seconds before the job ends, 0 for no limit. */
ONNXPAR_EXPORT onnxpar_world* onnxpar_mpi_world(double timeout_s);
/* This process as one rank of another communicator. `library` is the file of the MPI transport (beside
   this library), `communicator` the address of an MPI_Comm with these ranks, whose processes must all
   call. With `debug`, members of a group compare their calls before data moves. */
ONNXPAR_EXPORT onnxpar_world* onnxpar_mpi(const char* library, const void* communicator, int rank,
                                          int size, int debug, double timeout_s);
/* The ranks of one process, each used by a thread of its own. */
ONNXPAR_EXPORT onnxpar_world* onnxpar_threads(int size, int debug, double timeout_s);
/* The number of ranks; -1 on failure. */
ONNXPAR_EXPORT int onnxpar_size(const onnxpar_world* world);
/* The rank of this process: the lowest one, if it has several; -1 on failure. */
ONNXPAR_EXPORT int onnxpar_rank(const onnxpar_world* world);
/* Sets the rank as which sessions act whose options are registered on this thread (RegisterCustomOps);
   a null world unsets it. Where no rank is set, and the environment has ONNXPAR_WORLD=mpi, sessions
   act as this process's rank of MPI_COMM_WORLD, and no call of this library is needed. */
ONNXPAR_EXPORT int onnxpar_bind(const onnxpar_world* world, int rank);
/* The dialect, "tensorrt" or "onnxruntime", of sessions whose options are registered on this thread, for
   graphs that `onnxpar shard --dialect` wrote: they also have TensorRT's DistCollective, or AllReduce,
   AllGather and AllToAll of com.microsoft. Null for none, as at first. */
ONNXPAR_EXPORT int onnxpar_add_dialect(const char* name);
/* Gives the rank a GPU. Collectives of tensors there use NCCL from this file, or the host if `library`
   is null. Sessions registered later have kernels for the CUDA provider. */
ONNXPAR_EXPORT int onnxpar_open_device(const onnxpar_world* world, int rank, int device,
                                       const char* library, double timeout_s);
/* A reduction of host memory outside a session (reduction: 0 sum, 1 max, 2 min, 3 prod). It is not
   counted. `what`: its name in messages, or null. */
ONNXPAR_EXPORT int onnxpar_all_reduce(const onnxpar_world* world, int rank, const int* group,
                                      int members, const void* in, void* out, size_t count,
                                      int onnx_type, int reduction, const char* what);
/* Waits for collectives that a program left running in the background. */
ONNXPAR_EXPORT int onnxpar_settle(const onnxpar_world* world, int rank);
/* Ends all communication: ranks that wait fail with this message, and so do later calls. */
ONNXPAR_EXPORT int onnxpar_abort(const onnxpar_world* world, const char* message);
/* Frees the world's resources; all ranks must call it. Finalises MPI if `onnxpar_mpi_world` has
   initialised it. Sessions may not run afterwards. */
ONNXPAR_EXPORT int onnxpar_close(const onnxpar_world* world);

/* ---- Directories ---------------------------------------------------------------------------- */

/* A tensor in host memory, row-major. */
typedef struct {
  const char* name;
  int type;
  int dims;
  const int64_t* shape;
  void* data; /* null if its size depends on data: onnxruntime allocates it */
  size_t bytes;
} onnxpar_tensor;

/* One rank of a directory that `onnxpar shard` wrote. It holds the rank's states (parameters and those
   of an optimizer) in memory that stays where it is. */
ONNXPAR_EXPORT onnxpar_directory* onnxpar_open(const char* folder, int rank);
/* Frees the directory, after its runs. */
ONNXPAR_EXPORT void onnxpar_free_directory(onnxpar_directory* directory);
/* The number of ranks for which it was made; -1 on failure. */
ONNXPAR_EXPORT int onnxpar_ranks(const onnxpar_directory* directory);
/* The file of the rank's graph of a program ("model", "training_model", "optimizer_model",
   "eval_model"); until the thread's next call. Graphs in a dialect need onnxpar_add_dialect before. */
ONNXPAR_EXPORT const char* onnxpar_graph(const onnxpar_directory* directory, const char* program);
/* The whole of a state, gathered to rank 0, where `tensor` is filled; it stays until the next call.
   All ranks must call it. The world is not needed if the directory has one rank. */
ONNXPAR_EXPORT int onnxpar_whole_state(onnxpar_directory* directory, const onnxpar_world* world,
                                       const char* name, onnxpar_tensor* tensor);

/* The arguments of a program; they can be changed and used again. */
ONNXPAR_EXPORT onnxpar_run* onnxpar_new_run(onnxpar_directory* directory, const char* program);
ONNXPAR_EXPORT void onnxpar_free_run(onnxpar_run* run);
/* A whole (global) input, the same on all ranks. `bytes` is the size of the array at `data`,
   and must be that of the shape. Each onnxpar_prepare reads the data, so the array must stay until the
   input is given again or the run is not prepared any more. */
ONNXPAR_EXPORT int onnxpar_give(onnxpar_run* run, const char* input, int onnx_type,
                                const int64_t* shape, int dims, const void* data,
                                size_t bytes);
/* A number of the run: "seed", "step" (optimizer steps done), "micro_batch", "loss_weight" (at first
   1), "accumulate" (0: one micro-batch a step; 2: the first, 3: another, 1: the last of several), or a
   setting of the optimizer: "lr", "momentum", "dampening", "beta1", "beta2", "eps", "weight_decay",
   "clip_norm", with the defaults and ranges of `onnxpar train`. Equal on all ranks. */
ONNXPAR_EXPORT int onnxpar_set(onnxpar_run* run, const char* number, double value);
/* Checks the inputs, finds the sizes of symbols, divides the inputs, and fills all feeds. All ranks
   must call it: if one fails, all fail with its message. The world may be null if the directory has one
   rank. */
ONNXPAR_EXPORT int onnxpar_prepare(onnxpar_run* run, const onnxpar_world* world);
/* After onnxpar_prepare: the inputs of the rank's graph, and the outputs with the memory into which a
   session must write them. They stay until the run is changed or freed. -1 on failure. */
ONNXPAR_EXPORT int onnxpar_feeds(const onnxpar_run* run);
ONNXPAR_EXPORT int onnxpar_feed(const onnxpar_run* run, int index, onnxpar_tensor* tensor);
ONNXPAR_EXPORT int onnxpar_results(const onnxpar_run* run);
ONNXPAR_EXPORT int onnxpar_result(const onnxpar_run* run, int index, onnxpar_tensor* tensor);
/* The whole of an output, as onnxpar_whole_state, after the session has run. */
ONNXPAR_EXPORT int onnxpar_whole(onnxpar_run* run, const onnxpar_world* world, const char* output,
                                 onnxpar_tensor* tensor);

#endif
