// CUDA C++ on the host, as far as our kernels use it: read before a kernel's source by the stand-in
// of NVRTC. The threads of a block are fibers that switch at barriers, in an order that changes from
// block to block, so that what is not kept in order by barriers shows. Blocks run one at a time.
//
// More is asked than a GPU asks: every thread of a block must come to __syncthreads, and every lane
// of a warp to what a warp does together.
#pragma once

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <tuple>
#include <utility>

#include "launch.h"

#define __device__
#define __shared__ static  // one block at a time

namespace standin {

enum class Wait { kNothing, kWarp, kBlock };

// A fiber begins with a context, and switches by jumps, which make no system call.
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool begun;
  char* stack;
  Dim3 thread;
  unsigned number;
  Wait wait;
  bool done;
};

constexpr unsigned kMost = 1024;
constexpr size_t kStack = 1 << 16;
constexpr unsigned kWarp = 32;

struct Machine {
  Dim3 grid, block, block_index;
  Fiber fibers[kMost];
  Fiber* current;
  jmp_buf scheduler;
  void (*call)(const void* kernel);
  const void* kernel;
  alignas(16) char slots[kMost][16];  // what lanes give one another
  unsigned random;
};
inline Machine machine;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "stand-in GPU: %s\n", what);
  abort();
}

inline void wait_for(Wait what) {
  Fiber* self = machine.current;
  self->wait = what;
  if (_setjmp(self->place) == 0) _longjmp(machine.scheduler, 1);
}

inline void enter() {
  machine.call(machine.kernel);
  machine.current->done = true;
  _longjmp(machine.scheduler, 1);
}

inline void resume(Fiber& fiber) {
  machine.current = &fiber;
  if (_setjmp(machine.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

// Lets go what all of `count` fibers from `first` on wait for; false where they do not.
inline bool release(unsigned first, unsigned count, Wait what) {
  for (unsigned i = first; i < first + count; ++i) {
    if (machine.fibers[i].done || machine.fibers[i].wait != what) return false;
  }
  for (unsigned i = first; i < first + count; ++i) machine.fibers[i].wait = Wait::kNothing;
  return true;
}

inline void run_block(unsigned threads) {
  unsigned order[kMost];
  for (unsigned i = 0; i < threads; ++i) {
    machine.random = machine.random * 1664525u + 1013904223u;
    const unsigned j = (machine.random >> 8) % (i + 1);
    order[i] = order[j];
    order[j] = i;
  }
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = machine.fibers[i];
    if (fiber.stack == nullptr) fiber.stack = new char[kStack];
    fiber.number = i;
    fiber.thread = {i % machine.block.x, i / machine.block.x % machine.block.y,
                    i / machine.block.x / machine.block.y};
    fiber.wait = Wait::kNothing;
    fiber.done = false;
    fiber.begun = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  while (true) {
    bool left = false;
    for (unsigned i = 0; i < threads; ++i) {
      Fiber& fiber = machine.fibers[order[i]];
      if (fiber.done) continue;
      left = true;
      if (fiber.wait != Wait::kNothing) continue;
      resume(fiber);
    }
    if (!left) return;
    bool released = release(0, threads, Wait::kBlock);
    for (unsigned first = 0; first + kWarp <= threads; first += kWarp) {
      released = release(first, kWarp, Wait::kWarp) || released;
    }
    bool waiting = false;
    for (unsigned i = 0; i < threads; ++i) {
      const Fiber& fiber = machine.fibers[i];
      if (!fiber.done && fiber.wait == Wait::kNothing) released = true;
      waiting = waiting || !fiber.done;
    }
    if (waiting && !released) fail("not all threads come to a barrier");
  }
}

template <class Kernel>
void launch_all(const Kernel& kernel, Dim3 grid, Dim3 block) {
  machine.kernel = &kernel;
  machine.call = [](const void* it) { (*static_cast<const Kernel*>(it))(); };
  machine.grid = grid;
  machine.block = block;
  const unsigned threads = block.x * block.y * block.z;
  if (threads == 0 || threads > kMost || threads % kWarp != 0) fail("a block of no whole warps");
  if (grid.x == 0 || grid.y == 0 || grid.y > 65535 || grid.z != 1) fail("a grid that is none");
  for (unsigned y = grid.y; y-- > 0;) {
    for (unsigned x = grid.x; x-- > 0;) {
      machine.block_index = {x, y, 0};
      run_block(threads);
    }
  }
}

template <class... A>
class BoundKernel : public Bound {
 public:
  BoundKernel(void (*kernel)(A...), Dim3 grid, Dim3 block, const std::tuple<A...>& arguments)
      : kernel_(kernel), grid_(grid), block_(block), arguments_(arguments) {}
  void run() override {
    launch_all([this] { std::apply(kernel_, arguments_); }, grid_, block_);
  }

 private:
  void (*const kernel_)(A...);
  const Dim3 grid_, block_;
  const std::tuple<A...> arguments_;
};

template <class... A, size_t... I>
Bound* bind(void (*kernel)(A...), Dim3 grid, Dim3 block, void** arguments,
            std::index_sequence<I...>) {
  const std::tuple<A...> values{*static_cast<A*>(arguments[I])...};
  return new BoundKernel<A...>(kernel, grid, block, values);
}

template <class... A>
Bound* bind(void (*kernel)(A...), Dim3 grid, Dim3 block, void** arguments) {
  return bind(kernel, grid, block, arguments, std::index_sequence_for<A...>());
}

// The value that the lane `from` of this warp gives.
template <class T>
T exchange(T value, unsigned from) {
  static_assert(sizeof(T) <= 16);
  const unsigned self = machine.current->number;
  memcpy(machine.slots[self], &value, sizeof(T));
  wait_for(Wait::kWarp);
  T got;
  memcpy(&got, machine.slots[self / kWarp * kWarp + from], sizeof(T));
  wait_for(Wait::kWarp);  // until all have read
  return got;
}

template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

inline unsigned lane() { return machine.current->number % kWarp; }
inline void check_mask(unsigned mask) {
  if (mask != 0xffffffffu) fail("a mask that is not the whole warp");
}

}  // namespace standin

#define threadIdx (standin::machine.current->thread)
#define blockIdx (standin::machine.block_index)
#define blockDim (standin::machine.block)
#define gridDim (standin::machine.grid)

inline void __syncthreads() { standin::wait_for(standin::Wait::kBlock); }
inline void __syncwarp() { standin::wait_for(standin::Wait::kWarp); }
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with) {
  standin::check_mask(mask);
  return standin::exchange(value, standin::lane() ^ static_cast<unsigned>(with));
}
inline unsigned __ballot_sync(unsigned mask, bool set) {
  standin::check_mask(mask);
  const unsigned self = standin::machine.current->number;
  memcpy(standin::machine.slots[self], &set, sizeof(set));
  standin::wait_for(standin::Wait::kWarp);
  unsigned lanes = 0;
  for (unsigned i = 0; i < standin::kWarp; ++i) {
    const char* slot = standin::machine.slots[self / standin::kWarp * standin::kWarp + i];
    lanes |= static_cast<unsigned>(slot[0] != 0) << i;
  }
  standin::wait_for(standin::Wait::kWarp);
  return lanes;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __float_as_uint(float x) { return standin::bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return standin::bits<float>(x); }
inline double __longlong_as_double(long long x) { return standin::bits<double>(x); }
inline float host_half_to_float(unsigned short x) {
  return static_cast<float>(standin::bits<_Float16>(x));
}
inline unsigned short host_float_to_half(float x) {
  return standin::bits<unsigned short>(static_cast<_Float16>(x));
}
