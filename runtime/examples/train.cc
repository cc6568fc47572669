// Trains a directory that `onnxpar shard --train` wrote, or runs one without training, on the ranks of
// mpirun, with no Python:
//
//     mpirun -n 2 ./train DIRECTORY LIBONNXRUNTIME [STEPS LEARNING_RATE [ROWS]]
//
// It is made for the network of `python models/mlp.py -o mlp.onnx --image 8 --hidden 16`: an input `x`
// [batch, 1, 8, 8], an output `logits`, a weight `fc1.weight`. The inputs, 6 rows, depend on nothing but
// their position. Prints what each step has computed, and at last a weight: the name and the sum of the
// elements. ROWS is another number of rows, in training only of the labels, to show what happens if
// inputs do not fit together.
#include <cstdio>
#include <cstdlib>

#include "ort.h"

namespace {

// Throws what onnxpar says of a call that failed.
void check(int status) {
  if (status != 0) throw std::runtime_error(onnxpar_error());
}
template <class T>
T* check(T* made) {
  if (made == nullptr) throw std::runtime_error(onnxpar_error());
  return made;
}

double number(const char* name, const char* text, bool whole = false) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  const bool fits = end != text && *end == '\0' && value >= 0 && value <= 1e6;
  if (fits && (!whole || value == double(int64_t(value)))) return value;
  throw std::runtime_error(std::string(name) + ": expected " + (whole ? "an integer" : "a number") +
                           " from 0 to 1000000, got " + text);
}

void print(const onnxpar_tensor& t) {
  double sum = 0;
  for (size_t i = 0; i < t.bytes / sizeof(float); ++i) sum += static_cast<const float*>(t.data)[i];
  std::printf("%s %.9g\n", t.name, sum);
}
}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3 || argc == 4 || argc > 6) {
    throw std::runtime_error("expected DIRECTORY LIBONNXRUNTIME [STEPS LEARNING_RATE [ROWS]]");
  }
  const int64_t steps = argc > 4 ? static_cast<int64_t>(number("STEPS", argv[3], true)) : 0;
  const double rate = argc > 4 ? number("LEARNING_RATE", argv[4]) : 0;
  const int64_t label_rows = argc > 5 ? static_cast<int64_t>(number("ROWS", argv[5], true)) : 6;
  const int64_t shape[] = {steps > 0 ? 6 : label_rows, 1, 8, 8};
  std::vector<float> images;
  for (int64_t i = 0; i < shape[0] * 64; ++i) images.push_back(float(i * 31 % 101) / 101.0F);
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < label_rows; ++i) labels.push_back(i * 7 % 10);

  onnxpar_world* world = check(onnxpar_mpi_world(60));
  const int rank = onnxpar_rank(world);
  onnxpar_directory* directory = check(onnxpar_open(argv[1], rank));
  const ort::Library runtime(argv[2]);
  check(onnxpar_bind(world, rank));
  const char* program = steps > 0 ? "training_model" : "model";
  ort::Session* model = runtime.load(check(onnxpar_graph(directory, program)));
  onnxpar_run* run = check(onnxpar_new_run(directory, program));
  check(onnxpar_give(run, "x", 1, shape, 4, images.data(), 4 * images.size()));

  onnxpar_tensor whole{};
  if (steps == 0) {
    check(onnxpar_prepare(run, world));
    runtime.run(model, run);
    check(onnxpar_whole(run, world, "logits", &whole));
    if (rank == 0) print(whole);
  } else {
    check(onnxpar_give(run, "labels", 7, &label_rows, 1, labels.data(), 8 * labels.size()));
    onnxpar_run* update = check(onnxpar_new_run(directory, "optimizer_model"));
    ort::Session* optimizer = runtime.load(check(onnxpar_graph(directory, "optimizer_model")));
    check(onnxpar_set(update, "lr", rate));
    for (int64_t step = 0; step < steps; ++step) {
      check(onnxpar_set(run, "step", static_cast<double>(step)));
      check(onnxpar_prepare(run, world));
      runtime.run(model, run);
      check(onnxpar_whole(run, world, "onnxpar.loss", &whole));
      if (rank == 0) print(whole);
      check(onnxpar_set(update, "step", static_cast<double>(step)));
      check(onnxpar_prepare(update, world));
      runtime.run(optimizer, update);
    }
    check(onnxpar_whole_state(directory, world, "fc1.weight", &whole));
    if (rank == 0) print(whole);
    runtime.free(optimizer);
    onnxpar_free_run(update);
  }
  runtime.free(model);
  onnxpar_free_run(run);
  onnxpar_free_directory(directory);
  check(onnxpar_close(world));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
