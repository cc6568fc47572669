// Which of the loops run on this processor.
#include "kernels/host/simd.h"

namespace onnxpar {

const Simd& simd() {
#if defined(ONNXPAR_AVX2)
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) return simd_avx2::table;
#endif
  return simd_generic::table;
}

}  // namespace onnxpar
