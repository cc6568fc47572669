#include "capi/launcher.h"

#include <algorithm>
#include <cstdlib>

namespace onnxpar {
namespace {

struct Launcher {
  const char* rank;
  const char* size;
  const char* name;
};

constexpr const char* kSrun = "srun";
constexpr const char* kTorchrun = "torchrun";
constexpr Launcher kLaunchers[] = {
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"},
    {"PMIX_RANK", "SLURM_STEP_NUM_TASKS", kSrun},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", kSrun},
    {"PMI_RANK", "PMI_SIZE", "mpirun"},
    {"PALS_RANKID", "PALS_SIZE", "PALS"},
    {"RANK", "WORLD_SIZE", kTorchrun},
};

bool is_number(const char* text) {
  if (text == nullptr || *text == '\0') return false;
  const std::string all = text;
  return std::all_of(all.begin(), all.end(), [](char c) { return c >= '0' && c <= '9'; });
}

}  // namespace

Launched launched() {
  for (const Launcher& each : kLaunchers) {
    const char* size = std::getenv(each.size);
    if (!is_number(std::getenv(each.rank)) || !is_number(size)) continue;
    const int count = std::atoi(size);
    const bool srun = each.name == kSrun;
    const bool torchrun = each.name == kTorchrun;
    // A shell in a step of one task, and a torchrun of one process, are no launcher.
    if ((srun || torchrun) && count == 1) continue;
    // Hydra's processes inherit the place of the proxy that srun has started for them.
    if (srun && std::getenv("MPI_LOCALRANKID") != nullptr) continue;
    if (torchrun && std::getenv("MASTER_ADDR") == nullptr) continue;
    return {count, each.name, torchrun};
  }
  return {};
}

}  // namespace onnxpar
