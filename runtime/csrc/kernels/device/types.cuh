// What the host and the kernels on a device name alike. The `.cuh` files are read by NVRTC, which has no
// standard library, and by the host's compiler: each holds what the host passes to the kernels of
// the `.cu` file of the same name.
#pragma once

namespace onnxpar::cuda {

using Index = long long;

// Element is what lies in memory, Real what is computed in. ONNXPAR_ELEMENT is the type's number in
// ONNX; the host, which fills in parameters for elements of any type, has none.
#if defined(ONNXPAR_ELEMENT)
struct Half {
  unsigned short bits;
};
struct Bfloat {
  unsigned short bits;
};
#if ONNXPAR_ELEMENT == 1
using Element = float;
#elif ONNXPAR_ELEMENT == 10
using Element = Half;
#elif ONNXPAR_ELEMENT == 11
using Element = double;
#elif ONNXPAR_ELEMENT == 16
using Element = Bfloat;
#else
#error "ONNXPAR_ELEMENT must be 1, 10, 11 or 16"
#endif
#if ONNXPAR_ELEMENT == 11
using Real = double;
#else
using Real = float;
#endif
#else
using Element = void;
#endif

// Threads of a block, and of a team that takes all of a block.
constexpr int kTeamThreads = 256;

// Where a kernel tells the host of a value that no result can be made from: a place, counted from
// 1, and the value there. Of several, any. It is written in one piece.
struct alignas(16) Fault {
  Index place;
  Index value;
};

}  // namespace onnxpar::cuda
