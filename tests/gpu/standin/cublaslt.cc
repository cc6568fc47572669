// cuBLASLt without a GPU: descriptors that exist, one algorithm for everything.
#include <cstdlib>
#include <cstring>

namespace {
int make(void** handle) {
  *handle = calloc(1, 512);
  return 0;
}
int take(void* handle) {
  free(handle);
  return 0;
}
}  // namespace

extern "C" {

int cublasLtCreate(void** handle) { return make(handle); }
int cublasLtDestroy(void* handle) { return take(handle); }
int cublasLtMatmulDescCreate(void** handle, int, int) { return make(handle); }
int cublasLtMatmulDescDestroy(void* handle) { return take(handle); }
int cublasLtMatrixLayoutCreate(void** handle, int, unsigned long, unsigned long, long) {
  return make(handle);
}
int cublasLtMatrixLayoutDestroy(void* handle) { return take(handle); }
int cublasLtMatmulPreferenceCreate(void** handle) { return make(handle); }
int cublasLtMatmulPreferenceDestroy(void* handle) { return take(handle); }
int cublasLtMatrixTransformDescCreate(void** handle, int) { return make(handle); }
int cublasLtMatrixTransformDescDestroy(void* handle) { return take(handle); }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int,
                                   void* results, int* count) {
  memset(results, 0, 96);  // cublasLtMatmulHeuristicResult_t: no workspace, success
  *count = 1;
  return 0;
}
}
