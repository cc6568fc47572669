// The few calls of onnxruntime that the examples make, by its C interface, which no onnxruntime package
// has headers for: the library is opened at run time, and entries of its table are declared by position.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "abi/ort_abi.h"
#include "capi/onnxpar.h"

extern "C" onnxpar::ort::Status* RegisterCustomOps(onnxpar::ort::SessionOptions* options,
                                                   const onnxpar::ort::ApiBase* base);

namespace example {

namespace ort = onnxpar::ort;
struct OrtSession;

// Throws what onnxpar says of a call that failed.
inline void check(int status) {
  if (status != 0) throw std::runtime_error(onnxpar_error());
}
template <class T>
T* check(T* made) {
  if (made == nullptr) throw std::runtime_error(onnxpar_error());
  return made;
}

class Ort {
 public:
  // `file`: libonnxruntime.so.VERSION, which onnxruntime's wheel has in its folder `capi`.
  explicit Ort(const char* file) {
    void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    void* entry = dlsym(library, "OrtGetApiBase");
    if (entry == nullptr) throw std::runtime_error(dlerror());
    base_ = reinterpret_cast<const ort::ApiBase* (*)()>(entry)();
    table_ = base_->get_api(ort::kVersion);
    if (table_ == nullptr) throw std::runtime_error("onnxruntime is too old");
    api_ = ort::Api::load(table_);
    check(api_.create_env(ort::kLogError, "example", &env_));
    check(api_.cpu_memory_info(ort::kDeviceAllocator, ort::kMemoryDefault, &memory_));
  }

  // A session of a rank's graph, with onnxpar's operators. The calling thread has bound its rank.
  OrtSession* load(const char* graph) const {
    ort::SessionOptions* options = nullptr;
    check(call<ort::SessionOptions**>(10, &options));
    check(call<ort::SessionOptions*, int>(24, options, 1));  // threads that compute
    check(RegisterCustomOps(options, base_));
    OrtSession* session = nullptr;
    check(call<ort::Env*, const char*, ort::SessionOptions*, OrtSession**>(7, env_, graph, options,
                                                                          &session));
    return session;
  }

  // Runs a session once on a prepared run.
  void run(OrtSession* session, const onnxpar_run* arguments) const {
    std::vector<const char*> names[2];
    std::vector<ort::Value*> values[2];
    for (int outputs = 0; outputs < 2; ++outputs) {
      const int count = outputs != 0 ? onnxpar_results(arguments) : onnxpar_feeds(arguments);
      for (int i = 0; i < count; ++i) {
        onnxpar_tensor t;
        example::check((outputs != 0 ? onnxpar_result : onnxpar_feed)(arguments, i, &t));
        names[outputs].push_back(t.name);
        values[outputs].push_back(nullptr);
        if (t.data == nullptr) continue;  // onnxruntime allocates it
        check(call<ort::MemoryInfo*, void*, size_t, const int64_t*, size_t, int, ort::Value**>(
            49, memory_, t.data, t.bytes, t.shape, static_cast<size_t>(t.dims), t.type,
            &values[outputs].back()));
      }
    }
    check(call<OrtSession*, void*, const char* const*, const ort::Value* const*, size_t,
               const char* const*, size_t, ort::Value**>(
        9, session, nullptr, names[0].data(), values[0].data(), names[0].size(), names[1].data(),
        names[1].size(), values[1].data()));
    for (const auto& some : values) {
      for (ort::Value* value : some) release(96, value);
    }
  }

  void free(OrtSession* session) const { release(95, session); }

 private:
  // An entry of onnxruntime's table that returns a status.
  template <class... Arguments>
  ort::Status* call(int slot, Arguments... arguments) const {
    return reinterpret_cast<ort::Status* (*)(Arguments...)>(const_cast<void*>(table_[slot]))(
        arguments...);
  }
  template <class T>
  void release(int slot, T* value) const {
    reinterpret_cast<void (*)(T*)>(const_cast<void*>(table_[slot]))(value);
  }
  void check(ort::Status* status) const {
    if (status == nullptr) return;
    const std::string message = api_.get_error_message(status);
    api_.release_status(status);
    throw std::runtime_error(message);
  }

  const ort::ApiBase* base_ = nullptr;
  const void* const* table_ = nullptr;
  ort::Api api_;
  ort::Env* env_ = nullptr;
  ort::MemoryInfo* memory_ = nullptr;
};

}  // namespace example
