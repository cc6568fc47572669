// cuFFT without a GPU: plans that exist, transforms that compute nothing.
#include <cstddef>

extern "C" {

int cufftCreate(int* plan) {
  *plan = 1;
  return 0;
}
int cufftXtMakePlanMany(int, int, void*, void*, long long, long long, int, void*, long long,
                        long long, int, long long, size_t* workspace, int) {
  *workspace = 0;
  return 0;
}
}
