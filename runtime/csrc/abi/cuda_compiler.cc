#include "abi/cuda_compiler.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "abi/cuda_driver.h"

namespace onnxpar::cuda {
namespace {

// X(member, exported name, arguments). Every entry returns an nvrtcResult.
#define ONNXPAR_NVRTC(X)                                                                        \
  X(version, "nvrtcVersion", int*, int*)                                                        \
  X(create, "nvrtcCreateProgram", void**, const char*, const char*, int, const char* const*,    \
    const char* const*)                                                                         \
  X(destroy, "nvrtcDestroyProgram", void**)                                                     \
  X(compile, "nvrtcCompileProgram", void*, int, const char* const*)                             \
  X(cubin_size, "nvrtcGetCUBINSize", void*, size_t*)                                            \
  X(cubin, "nvrtcGetCUBIN", void*, char*)                                                       \
  X(ptx_size, "nvrtcGetPTXSize", void*, size_t*)                                                \
  X(ptx, "nvrtcGetPTX", void*, char*)                                                           \
  X(log_size, "nvrtcGetProgramLogSize", void*, size_t*)                                         \
  X(log, "nvrtcGetProgramLog", void*, char*)                                                    \
  X(architecture_count, "nvrtcGetNumSupportedArchs", int*)                                      \
  X(architectures, "nvrtcGetSupportedArchs", int*)

struct Compiler {
#define X(member, name, ...) int (*member)(__VA_ARGS__) = nullptr;
  ONNXPAR_NVRTC(X)
#undef X
  const char* (*error_text)(int) = nullptr;
};

// Of random numbers, which are float32.
constexpr const char* kRandom = "philox.cu";
bool is_header(const std::string& file) { return file.find(".cuh") != std::string::npos; }

constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

// Folders where NVIDIA's wheels put NVRTC, seen from the libraries that are loaded already:
// another CUDA library, or onnxruntime or ourselves, which lie in site-packages/*/*/.
std::vector<std::string> folders() {
  std::vector<std::string> found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto& list = *static_cast<std::vector<std::string>*>(data);
        const std::string path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
        const size_t slash = path.rfind('/');
        if (slash == std::string::npos) return 0;
        const std::string folder = path.substr(0, slash);
        const std::string file = path.substr(slash + 1);
        const auto begins = [&](const char* with) { return file.rfind(with, 0) == 0; };
        if (begins("libcudart.so") || begins("libcublas") || begins("libcufft")) {
          list.push_back(folder);
        }
        if (begins("libonnxruntime") || begins("onnxruntime") || begins("libonnxpar")) {
          list.push_back(folder + "/../../nvidia/cu13/lib");
          list.push_back(folder + "/../../nvidia/cuda_nvrtc/lib");
        }
        return 0;
      },
      &found);
  return found;
}

void* open_library() {
  // Where the user says which, no other will do.
  if (const char* path = std::getenv("ONNXPAR_NVRTC"); path != nullptr && *path != '\0') {
    if (void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL)) return library;
    throw std::runtime_error(std::string("ONNXPAR_NVRTC: ") + dlerror());
  }
  for (const char* name : kNames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  const std::string why = dlerror();
  for (const std::string& folder : folders()) {
    for (const char* name : kNames) {
      if (void* library = dlopen((folder + "/" + name).c_str(), RTLD_NOW | RTLD_LOCAL)) {
        return library;
      }
    }
  }
  throw std::runtime_error("NVRTC, which compiles this operator for the GPU, cannot be opened (" +
                           why + "): " + kExtra + ", or set ONNXPAR_NVRTC to its path");
}

Compiler open_compiler() {
  void* library = open_library();
  Compiler c;
  const auto find = [&](const char* name) {
    void* entry = dlsym(library, name);
    if (entry == nullptr) {
      throw std::runtime_error(std::string("NVRTC has no ") + name +
                               ": expected that of CUDA 12 or later; " + kExtra);
    }
    return entry;
  };
#define X(member, name, ...) c.member = reinterpret_cast<decltype(c.member)>(find(name));
  ONNXPAR_NVRTC(X)
#undef X
  c.error_text = reinterpret_cast<decltype(c.error_text)>(find("nvrtcGetErrorString"));
  return c;
}

// NVRTC opens its library of built-in functions by name when it compiles. Where NVRTC came from a
// wheel, only later versions than 13.0 find it; it is opened here from NVRTC's own folder, where it
// is. If it is not there, NVRTC itself says what it misses.
Compiler with_builtins(const Compiler& c) {
  int major = 0;
  int minor = 0;
  Dl_info where{};
  if (c.version(&major, &minor) != 0 || dladdr(reinterpret_cast<void*>(c.version), &where) == 0) {
    return c;
  }
  const std::string path = where.dli_fname;
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  const std::string name =
      "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
  dlopen((folder + name).c_str(), RTLD_NOW | RTLD_LOCAL);
  return c;
}

const Compiler& compiler() {
  static const Compiler opened = with_builtins(open_compiler());  // tried again where it threw
  return opened;
}

void must(int result, const char* what) {
  if (result == 0) return;
  throw std::runtime_error(std::string(what) + ": " + compiler().error_text(result));
}

// A program's text in one of its forms.
std::string read(void* program, int (*size_of)(void*, size_t*), int (*get)(void*, char*),
                 const char* what) {
  size_t size = 0;
  must(size_of(program, &size), what);
  std::string text(size, '\0');
  must(get(program, text.data()), what);
  return text;
}

std::string version_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

// The newest capability that the compiler knows and that code for runs on `capability`.
int best_architecture(int capability) {
  int count = 0;
  must(compiler().architecture_count(&count), "nvrtcGetNumSupportedArchs");
  std::vector<int> known(static_cast<size_t>(count));
  must(compiler().architectures(known.data()), "nvrtcGetSupportedArchs");
  int best = 0;
  for (int one : known) {
    if (one <= capability) best = std::max(best, one);
  }
  if (best == 0) {
    throw std::runtime_error("the GPU has compute capability " + version_text(capability) +
                             ", which this NVRTC no longer compiles for");
  }
  return best;
}

struct ProgramHandle {
  void* program = nullptr;
  ~ProgramHandle() { compiler().destroy(&program); }
};

}  // namespace

void load_compiler() { compiler(); }

Code compile(const std::string& source, DType element, int capability) {
  const Compiler& c = compiler();
  std::vector<const char*> names;
  std::vector<const char*> texts;
  const char* main = nullptr;
  for (int i = 0; i < kSourceFileCount; ++i) {
    const SourceFile& file = kSourceFiles[i];
    if (source == file.name) main = file.text;
    if (!is_header(file.name)) continue;
    names.push_back(file.name);
    texts.push_back(file.text);
  }
  if (main == nullptr) throw std::logic_error("no device source " + source);
  ProgramHandle handle;
  must(c.create(&handle.program, main, source.c_str(), static_cast<int>(names.size()),
                texts.data(), names.data()),
       "nvrtcCreateProgram");
  const int best = best_architecture(capability);
  const bool exact = best == capability;
  const std::vector<std::string> options = {
      "--std=c++17",
      "--gpu-architecture=" + std::string(exact ? "sm_" : "compute_") + std::to_string(best),
      "-default-device",  // lambdas run on the GPU; NVRTC 13.0 takes them for the host's otherwise
      "-DONNXPAR_ELEMENT=" + std::to_string(static_cast<int>(element)),
      // Random numbers are the same to the bit everywhere.
      source == kRandom ? "--fmad=false" : "--fmad=true",
  };
  std::vector<const char*> arguments;
  for (const std::string& option : options) arguments.push_back(option.c_str());
  const int result =
      c.compile(handle.program, static_cast<int>(arguments.size()), arguments.data());
  if (result != 0) {
    throw std::runtime_error("NVRTC cannot compile " + source + ": " + c.error_text(result) + "\n" +
                             read(handle.program, c.log_size, c.log, "nvrtcGetProgramLog"));
  }
  if (exact) return {read(handle.program, c.cubin_size, c.cubin, "nvrtcGetCUBIN"), ""};
  return {read(handle.program, c.ptx_size, c.ptx, "nvrtcGetPTX"),
          " It is PTX for compute capability " + version_text(best) +
              ", the newest that this NVRTC knows for the GPU's " + version_text(capability) +
              "; a newer one makes machine code: pip install --upgrade nvidia-cuda-nvrtc"};
}

void compile_all(int capability) {
  for (int i = 0; i < kSourceFileCount; ++i) {
    const std::string source = kSourceFiles[i].name;
    if (is_header(source)) continue;
    for (DType element :
         {DType::kFloat32, DType::kFloat16, DType::kBfloat16, DType::kFloat64}) {
      if (element == DType::kFloat32 || source != kRandom) compile(source, element, capability);
    }
  }
}

}  // namespace onnxpar::cuda
