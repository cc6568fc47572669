// The few calls of onnxruntime that an example makes, by its C interface. No onnxruntime package has
// headers: the library is opened at run time, and the entries of its table of functions, whose
// positions never change, are called by number.
#pragma once

#include <dlfcn.h>
#include <onnxpar.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace ort {

// Opaque types of onnxruntime, only used by pointer.
struct Env;
struct MemoryInfo;
struct Options;
struct Session;
struct Status;
struct Value;
struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*version_string)();
};

}  // namespace ort

extern "C" ort::Status* RegisterCustomOps(ort::Options* options, const ort::ApiBase* base);

namespace ort {

class Library {
 public:
  // `file`: libonnxruntime.so.VERSION, which onnxruntime's wheel has in its folder `capi`.
  explicit Library(const char* file) {
    void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    void* entry = library == nullptr ? nullptr : dlsym(library, "OrtGetApiBase");
    if (entry == nullptr) throw std::runtime_error(dlerror());
    base_ = reinterpret_cast<const ApiBase* (*)()>(entry)();
    table_ = base_->get_api(18);  // what RegisterCustomOps needs
    if (table_ == nullptr) throw std::runtime_error("onnxruntime is too old");
    call<int, const char*, Env**>(3, 3, "example", &env_);  // logs errors only
    call<int, int, MemoryInfo**>(69, 0, 0, &memory_);       // of the CPU
  }

  // A session of a rank's graph, with onnxpar's operators. The calling thread has bound its rank.
  Session* load(const char* graph) const {
    Options* options = nullptr;
    call<Options**>(10, &options);
    call<Options*, int>(24, options, 1);  // threads that compute
    check(RegisterCustomOps(options, base_));
    Session* session = nullptr;
    call<Env*, const char*, Options*, Session**>(7, env_, graph, options, &session);
    release(100, options);
    return session;
  }

  // Runs a session once on a prepared run.
  void run(Session* session, const onnxpar_run* arguments) const {
    std::vector<const char*> names[2];
    std::vector<Value*> values[2];
    for (int outputs = 0; outputs < 2; ++outputs) {
      const int count = outputs != 0 ? onnxpar_results(arguments) : onnxpar_feeds(arguments);
      for (int i = 0; i < count; ++i) {
        onnxpar_tensor t{};
        (outputs != 0 ? onnxpar_result : onnxpar_feed)(arguments, i, &t);
        names[outputs].push_back(t.name);
        values[outputs].push_back(nullptr);
        if (t.data == nullptr) continue;  // onnxruntime allocates it
        call<MemoryInfo*, void*, size_t, const int64_t*, size_t, int, Value**>(
            49, memory_, t.data, t.bytes, t.shape, static_cast<size_t>(t.dims), t.type,
            &values[outputs].back());
      }
    }
    call<Session*, void*, const char* const*, const Value* const*, size_t, const char* const*, size_t,
         Value**>(9, session, nullptr, names[0].data(), values[0].data(), names[0].size(),
                  names[1].data(), names[1].size(), values[1].data());
    for (const auto& some : values) {
      for (Value* value : some) release(96, value);
    }
  }

  void free(Session* session) const { release(95, session); }

 private:
  template <class... Arguments>
  void call(int slot, Arguments... arguments) const {
    check(reinterpret_cast<Status* (*)(Arguments...)>(const_cast<void*>(table_[slot]))(arguments...));
  }
  template <class T>
  void release(int slot, T* value) const {
    reinterpret_cast<void (*)(T*)>(const_cast<void*>(table_[slot]))(value);
  }
  void check(Status* status) const {
    if (status == nullptr) return;
    const auto text = reinterpret_cast<const char* (*)(Status*)>(const_cast<void*>(table_[2]));
    const std::string message = text(status);
    release(93, status);
    throw std::runtime_error(message);
  }

  const ApiBase* base_ = nullptr;
  const void* const* table_ = nullptr;
  Env* env_ = nullptr;
  MemoryInfo* memory_ = nullptr;
};

}  // namespace ort
