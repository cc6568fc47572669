// The message of a thread's last call that failed.
#pragma once

#include <exception>
#include <stdexcept>
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

// What a program gave for an argument. Throws std::invalid_argument if it is null.
template <class T>
T& given(T* argument, const char* what) {
  if (argument == nullptr) throw std::invalid_argument(std::string("expected ") + what + ", got null");
  return *argument;
}

inline std::string text(const char* argument, const char* what) { return &given(argument, what); }

}  // namespace onnxpar
