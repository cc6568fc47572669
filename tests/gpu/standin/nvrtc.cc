// NVRTC's interface over the host's compiler: what it "compiles" is a library for the host, whose
// path stands for the machine code. STANDIN_HERE is the folder of this file. Programs are kept
// beside this library and not compiled twice.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

constexpr int kSuccess = 0, kCompilation = 6, kInternal = 11;  // nvrtcResult

struct Program {
  std::string source, log, image;
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

bool compiler(const std::string& arguments, const fs::path& log) {
  return std::system(("g++ -std=c++17 " + arguments + " 2>" + log.string()).c_str()) == 0;
}

}  // namespace

extern "C" {

int nvrtcCreateProgram(Program** program, const char* source, const char*, int headers,
                       const char* const* texts, const char* const* names) {
  *program = new Program{source, "", "", {}};
  for (int i = 0; i < headers; ++i) (*program)->headers.emplace_back(names[i], texts[i]);
  return kSuccess;
}
int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return kSuccess;
}

int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
  std::string defines;
  std::string all = program->source + read(fs::path(STANDIN_HERE) / "block.h");
  for (const auto& header : program->headers) all += header.second;
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    all += option;
    if (option.rfind("-D", 0) == 0) defines += " " + option;
    else if (option == "--fmad=false") defines += " -ffp-contract=off";
    else if (option == "--fmad=true") defines += " -ffp-contract=fast";
    else if (option.rfind("--std=", 0) != 0 && option.rfind("--gpu-architecture=", 0) != 0) {
      program->log = "unknown option " + option;
      return kCompilation;
    }
  }
  const fs::path folder = programs();
  const std::string name = std::to_string(std::hash<std::string>()(all));
  const fs::path made = folder / (name + ".so");
  program->image = made.string();
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
      out << "extern \"C\" void standin_launch_" << name
          << "(standin::Dim3 grid, standin::Dim3 block, void** arguments) {\n"
          << "  standin::launch(&" << name << ", grid, block, arguments);\n}\n";
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
  *size = program->image.size() + 1;
  return kSuccess;
}
int nvrtcGetCUBIN(Program* program, char* to) {
  memcpy(to, program->image.c_str(), program->image.size() + 1);
  return kSuccess;
}
int nvrtcGetPTXSize(Program* program, size_t* size) { return nvrtcGetCUBINSize(program, size); }
int nvrtcGetPTX(Program* program, char* to) { return nvrtcGetCUBIN(program, to); }
int nvrtcGetProgramLogSize(Program* program, size_t* size) {
  *size = program->log.size() + 1;
  return kSuccess;
}
int nvrtcGetProgramLog(Program* program, char* to) {
  memcpy(to, program->log.c_str(), program->log.size() + 1);
  return kSuccess;
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = 3;
  return kSuccess;
}
int nvrtcGetSupportedArchs(int* architectures) {
  architectures[0] = 80;
  architectures[1] = 90;
  architectures[2] = 100;
  return kSuccess;
}
const char* nvrtcGetErrorString(int result) {
  return result == kCompilation ? "NVRTC_ERROR_COMPILATION" : "an error of the stand-in";
}
}
