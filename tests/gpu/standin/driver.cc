// The part of the CUDA driver's interface that tells which devices there are.
#include <cstdio>
#include <cstring>

extern "C" {

int cudaGetDeviceCount(int* count);
int cudaGetDevice(int* device);
int cudaSetDevice(int device);
int cudaDeviceGetAttribute(int* value, int attribute, int device);
int cudaMemGetInfo(size_t* left, size_t* total);

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }
int cuDeviceGet(int* device, int ordinal) {
  int count = 0;
  cudaGetDeviceCount(&count);
  if (ordinal < 0 || ordinal >= count) return 101;  // CUDA_ERROR_INVALID_DEVICE
  *device = ordinal;
  return 0;
}
int cuDeviceGetName(char* name, int size, int device) {
  snprintf(name, static_cast<size_t>(size), "Stand-in device %d", device);
  return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int) {
  size_t left = 0;
  return cudaMemGetInfo(&left, bytes);
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);  // the numbers are the same
}
int cuMemGetInfo_v2(size_t* left, size_t* total) { return cudaMemGetInfo(left, total); }
int cuGetErrorName(int, const char** text) {
  *text = "CUDA_ERROR_STANDIN";
  return 0;
}
int cuGetErrorString(int result, const char** text) {
  *text = result == 222 ? "the provided PTX was compiled with an unsupported toolchain."
                        : "error of the stand-in";
  return 0;
}
}
