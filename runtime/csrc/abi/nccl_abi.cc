#include "abi/nccl_abi.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace onnxpar::nccl {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

Library open_library(const char* path) {
  const std::string advice = std::string("; ") + cuda::kExtra + " brings NCCL " +
                             version_text(kLeastVersion) + " or later";
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw std::runtime_error(std::string("NCCL cannot be opened (") + dlerror() + ")" + advice);
  }
  Library opened;
  const auto find = [&](const char* name) {
    void* entry = dlsym(handle, name);
    if (entry == nullptr) {
      throw std::runtime_error(std::string(path) + " has no " + name + advice);
    }
    return entry;
  };
#define X(member, name, ...) opened.member = reinterpret_cast<decltype(opened.member)>(find(name));
  ONNXPAR_NCCL(X)
#undef X
  opened.error_text = reinterpret_cast<decltype(opened.error_text)>(find("ncclGetErrorString"));
  opened.last_error = reinterpret_cast<decltype(opened.last_error)>(find("ncclGetLastError"));
  if (opened.get_version(&opened.version) != kSuccess || opened.version < kLeastVersion) {
    throw std::runtime_error(std::string(path) + " is NCCL " + version_text(opened.version) +
                             advice);
  }
  return opened;
}

}  // namespace

const Library& library(const char* path) {
  static std::mutex mutex;
  static auto* opened = new std::map<std::string, Library>();
  std::lock_guard lock(mutex);
  const auto found = opened->find(path);
  if (found != opened->end()) return found->second;
  return opened->emplace(path, open_library(path)).first->second;
}

}  // namespace onnxpar::nccl
