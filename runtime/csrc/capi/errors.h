// The message of a thread's last call that failed.
#pragma once

#include <exception>
#include <string>

namespace onnxpar {

inline thread_local std::string t_error;

// Returns 0, or 1 if `f` throws.
template <class F>
int guarded(F&& f) {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    t_error = e.what();
    return 1;
  }
}

}  // namespace onnxpar
