// NVRTC's interface over the host's compiler: what it "compiles" is a library for the host, whose
// path stands for the code, behind the architecture that it is for: `sm_90:PATH` is machine code,
// `compute_90:PATH` PTX. STANDIN_HERE is the folder of this file. Programs are kept beside this
// library and not compiled twice.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

constexpr int kSuccess = 0, kInvalidOption = 5, kCompilation = 6;  // nvrtcResult
constexpr int kArchitectures[] = {80, 90, 100};

struct Program {
  std::string source, log, architecture, path;
  std::vector<std::pair<std::string, std::string>> headers;
};

fs::path programs() {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&programs), &info);
  const fs::path folder = fs::path(info.dli_fname).parent_path() / "programs";
  fs::create_directories(folder);
  return folder;
}

std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// The names of functions that are declared `__global__ void`. (Without <regex>, which takes the
// compiler as long as all the rest of the stand-ins.)
std::vector<std::string> kernels(const std::string& text) {
  std::vector<std::string> found;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (word != "__global__" || !(words >> word) || word != "void" || !(words >> word)) continue;
    found.push_back(word.substr(0, word.find('(')));
  }
  return found;
}

bool known(const std::string& architecture) {
  for (int one : kArchitectures) {
    const std::string number = std::to_string(one);
    if (architecture == "sm_" + number || architecture == "compute_" + number) return true;
  }
  return false;
}

// There is machine code only where the architecture is a real one.
std::string cubin(const Program& program) {
  const bool real = program.architecture.rfind("sm_", 0) == 0;
  return real ? program.architecture + ":" + program.path : "";
}
std::string ptx(const Program& program) {
  const size_t number = program.architecture.find('_');
  return "compute" + program.architecture.substr(number) + ":" + program.path;
}
size_t size_of(const std::string& code) { return code.empty() ? 0 : code.size() + 1; }
void copy(const std::string& code, char* to) { memcpy(to, code.c_str(), size_of(code)); }

bool compiler(const std::string& arguments, const fs::path& log) {
  return std::system(("g++ -std=c++17 " + arguments + " 2>" + log.string()).c_str()) == 0;
}

// Ranks begin together and need the same programs: one compiles, and the others wait for it.
class Lock {
 public:
  explicit Lock(const fs::path& path)
      : file_(open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600)) {
    flock(file_, LOCK_EX);
  }
  ~Lock() { close(file_); }

 private:
  const int file_;
};

}  // namespace

extern "C" {

int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return kSuccess;
}
int nvrtcCreateProgram(Program** program, const char* source, const char*, int headers,
                       const char* const* texts, const char* const* names) {
  *program = new Program{source, "", "", "", {}};
  for (int i = 0; i < headers; ++i) (*program)->headers.emplace_back(names[i], texts[i]);
  return kSuccess;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return kSuccess;
}

int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  // NVRTC 13.0 of a wheel finds this library only if it is open.
  const char* const builtins = "libnvrtc-builtins.so.13.0";
  if (dlopen(builtins, RTLD_NOW | RTLD_NOLOAD) == nullptr) {
    program->log = std::string("error: failed to open ") + builtins;
    return kCompilation;
  }
  std::string defines;
  std::string all = program->source;
  for (const char* header : {"block.h", "launch.h"}) all += read(fs::path(STANDIN_HERE) / header);
  for (const auto& header : program->headers) all += header.second;
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    all += option;
    if (option.rfind("-D", 0) == 0) defines += " " + option;
    else if (option == "--fmad=false") defines += " -ffp-contract=off";
    else if (option == "--fmad=true") defines += " -ffp-contract=fast";
    else if (option.rfind("--gpu-architecture=", 0) == 0)
      program->architecture = option.substr(option.find('=') + 1);
    else if (option.rfind("--std=", 0) != 0 && option != "-default-device") {
      program->log = "unknown option " + option;
      return kInvalidOption;
    }
  }
  if (!known(program->architecture)) {
    program->log = "unknown architecture " + program->architecture;
    return kInvalidOption;
  }
  const fs::path folder = programs();
  const std::string name = std::to_string(std::hash<std::string>()(all));
  const fs::path made = folder / (name + ".so");
  program->path = made.string();
  const Lock lock(folder / (name + ".lock"));
  if (fs::exists(made)) return kSuccess;
  const fs::path work = folder / (name + "." + std::to_string(getpid()));
  fs::create_directories(work);
  for (const auto& [file, text] : program->headers) std::ofstream(work / file) << text;
  std::ofstream(work / "kernels.cc") << program->source;
  const std::string with = "-include " + (fs::path(STANDIN_HERE) / "block.h").string() + defines;
  const fs::path log = work / "log";
  const std::string main = (work / "kernels.cc").string();
  const fs::path flat = work / "flat.cc";
  bool good = compiler("-E " + with + " " + main + " -o " + flat.string(), log);
  if (good) {
    // The kernels' names, known only once macros are expanded, each get an entry.
    const std::string text = read(flat);
    std::ofstream out(main, std::ios::app);
    for (const std::string& name : kernels(text)) {
      out << "extern \"C\" standin::Bound* standin_bind_" << name
          << "(standin::Dim3 grid, standin::Dim3 block, void** arguments) {\n"
          << "  return standin::bind(&" << name << ", grid, block, arguments);\n}\n";
    }
    out.close();
    // A trap where a wide access is not aligned or an index is out of its array.
    good = compiler("-shared -fPIC -fno-gnu-unique -O1 -D__global__= -Wall -Wextra -Werror "
                    "-Wno-unknown-pragmas -Wno-uninitialized -Wno-maybe-uninitialized "
                    "-fsanitize=alignment,bounds -fsanitize-undefined-trap-on-error " +
                        with + " " + main + " -o " + (work / "made.so").string(),
                    log);
  }
  program->log = read(log);
  if (good) fs::rename(work / "made.so", made);
  fs::remove_all(work);
  return good ? kSuccess : kCompilation;
}

int nvrtcGetCUBINSize(Program* program, size_t* size) {
  *size = size_of(cubin(*program));
  return kSuccess;
}
int nvrtcGetCUBIN(Program* program, char* to) {
  copy(cubin(*program), to);
  return kSuccess;
}
int nvrtcGetPTXSize(Program* program, size_t* size) {
  *size = size_of(ptx(*program));
  return kSuccess;
}
int nvrtcGetPTX(Program* program, char* to) {
  copy(ptx(*program), to);
  return kSuccess;
}
int nvrtcGetProgramLogSize(Program* program, size_t* size) {
  *size = program->log.size() + 1;
  return kSuccess;
}
int nvrtcGetProgramLog(Program* program, char* to) {
  memcpy(to, program->log.c_str(), program->log.size() + 1);
  return kSuccess;
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(kArchitectures));
  return kSuccess;
}
int nvrtcGetSupportedArchs(int* architectures) {
  std::copy(std::begin(kArchitectures), std::end(kArchitectures), architectures);
  return kSuccess;
}
const char* nvrtcGetErrorString(int result) {
  return result == kCompilation ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INVALID_OPTION";
}
}
