// cuBLAS and cuBLASLt without a GPU: handles that exist, products that compute nothing.
#include <cstdlib>
#include <cstring>

extern "C" {

int cublasCreate_v2(void** handle) {
  *handle = calloc(1, 64);
  return 0;
}
int cublasDestroy_v2(void* handle) {
  free(handle);
  return 0;
}
int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}
const char* cublasGetStatusName(int) { return "CUBLAS_STATUS"; }
const char* cublasGetStatusString(int) { return "status of the stand-in"; }
}
