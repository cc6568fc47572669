// Parameters of the gradient of Gather.
#pragma once

#include "types.cuh"

namespace onnxpar::cuda {

constexpr int kDigits = 256;
constexpr int kSortThreads = 256;
constexpr int kSortWarps = kSortThreads / 32;
constexpr int kRounds = 8;  // places of one thread
constexpr int kTile = kSortThreads * kRounds;
constexpr Index kRun = 32;

struct Place {
  unsigned row;
  unsigned from;
};


// A row of dx has `inner` elements in each of `outer` slabs; columns count through all of them.
struct Sums {
  Index count;  // of places
  Index rows;
  Index outer;
  Index inner;
};

}  // namespace onnxpar::cuda
