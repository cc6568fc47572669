// The launcher that started this process, as the environment tells it before MPI starts.
#pragma once

#include <string>

namespace onnxpar {

// The processes that one launcher has started.
struct Launched {
  int size = 1;
  std::string launcher;     // for people; empty without a launcher
  bool without_mpi = false;  // it starts processes that MPI does not connect
};

// What `find_place` in `onnxpar_format/place.py` finds.
Launched launched();

}  // namespace onnxpar
