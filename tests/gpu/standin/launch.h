// A kernel with its arguments, ready to run: what NVRTC's stand-in compiles, and the driver's runs.
#pragma once

namespace standin {

struct Dim3 {
  unsigned x, y, z;
};

class Bound {
 public:
  virtual ~Bound() = default;
  virtual void run() = 0;
};

// Copies the arguments. The caller owns the result.
using Bind = Bound* (*)(Dim3 grid, Dim3 block, void** arguments);

}  // namespace standin
