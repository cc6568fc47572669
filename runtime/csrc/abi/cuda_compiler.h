// The compiler of the device kernels: NVRTC, opened when the first of them is needed.
//
// The sources (kernels/device/*.cu) are text in this library, so the build needs no CUDA, and what runs is
// made for the very GPU that it runs on.
#pragma once

#include <string>

#include "abi/dtype.h"

namespace onnxpar::cuda {

// A file of kernels/device, by its name.
struct SourceFile {
  const char* name;
  const char* text;
};
extern const SourceFile kSourceFiles[];
extern const int kSourceFileCount;

// Opens NVRTC. Throws std::runtime_error saying where it was looked for and what brings it.
void load_compiler();

// What the driver loads, and what to say where it cannot.
struct Code {
  std::string image;
  std::string advice;
};

// Machine code for a GPU of compute capability `capability` (90 is 9.0) of the named source, with
// Element as given; PTX, which the driver translates, where this NVRTC does not know the capability.
// Throws std::runtime_error with the compiler's log.
Code compile(const std::string& source, DType element, int capability);

// Compiles every source that holds kernels for each element type that it is made for, and drops the
// result. Throws as compile does.
void compile_all(int capability);

}  // namespace onnxpar::cuda
