// What the stand-in libraries share: "device" memory, the log, and streams. Every process has one
// copy, in libcudart's stand-in; the others find it there.
#pragma once
#include <cstddef>

#pragma GCC visibility push(default)
extern "C" {

// Whether an address lies in "device" memory.
int standin_is_device(const void* address);

// Makes "device" memory readable for the host until the matching close (calls nest). Without
// STANDIN_GUARD it always is, and these do nothing.
void standin_open(void);
void standin_close(void);

// Appends one line, "word<TAB>text", to the file named by STANDIN_LOG, if there is one.
void standin_log(const char* word, const char* format, ...) __attribute__((format(printf, 2, 3)));
}
#pragma GCC visibility pop

struct StandinAccess {
  StandinAccess() { standin_open(); }
  ~StandinAccess() { standin_close(); }
  StandinAccess(const StandinAccess&) = delete;
  StandinAccess& operator=(const StandinAccess&) = delete;
};
