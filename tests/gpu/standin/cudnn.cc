// cuDNN without a GPU: descriptors that exist, calls that compute nothing.
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {
int make(void** handle) {
  *handle = calloc(1, 512);
  return 0;
}
}  // namespace

extern "C" {

size_t cudnnGetVersion(void) { return 91300; }
const char* cudnnGetErrorString(int) { return "status of the stand-in"; }
void cudnnGetLastErrorString(char* message, size_t size) {
  if (size != 0) *message = 0;
}
int cudnnCreate(void** handle) { return make(handle); }
int cudnnCreateActivationDescriptor(void** handle) { return make(handle); }
int cudnnCreateConvolutionDescriptor(void** handle) { return make(handle); }
int cudnnCreateDropoutDescriptor(void** handle) { return make(handle); }
int cudnnCreateFilterDescriptor(void** handle) { return make(handle); }
int cudnnCreateLRNDescriptor(void** handle) { return make(handle); }
int cudnnCreatePoolingDescriptor(void** handle) { return make(handle); }
int cudnnCreateRNNDataDescriptor(void** handle) { return make(handle); }
int cudnnCreateRNNDescriptor(void** handle) { return make(handle); }
int cudnnCreateReduceTensorDescriptor(void** handle) { return make(handle); }
int cudnnCreateTensorDescriptor(void** handle) { return make(handle); }
int cudnnBackendCreateDescriptor(int, void** handle) { return make(handle); }
int cudnnGetReductionWorkspaceSize(void*, void*, void*, void*, size_t* size) {
  *size = 0;
  return 0;
}
int cudnnGetReductionIndicesSize(void*, void*, void*, void*, size_t* size) {
  *size = 0;
  return 0;
}
int cudnnGetConvolutionForwardWorkspaceSize(void*, void*, void*, void*, void*, int, size_t* size) {
  *size = 0;
  return 0;
}
int cudnnDropoutGetStatesSize(void*, size_t* size) {
  *size = 256;
  return 0;
}
int cudnnGetRNNTempSpaceSizes(void*, void*, int, void*, size_t* workspace, size_t* reserve) {
  *workspace = 0;
  if (reserve != nullptr) *reserve = 0;
  return 0;
}
}
