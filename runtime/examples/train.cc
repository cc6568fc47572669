// Trains a directory that `onnxpar shard --train` wrote, or runs one without training, on the ranks of
// mpirun, with no Python:
//
//     mpirun -n 2 ./train DIRECTORY LIBONNXRUNTIME [STEPS LEARNING_RATE] [ROWS]
//
// It is made for the network of `python models/mlp.py -o mlp.onnx --image 8 --hidden 16`: an input `x`
// [batch, 1, 8, 8], an output `logits`, a weight `fc1.weight`. The inputs are numbers that depend on
// nothing but their position, 6 rows of them. Prints what each step has computed, and at last a weight:
// the name and the sum of the elements. ROWS is another number of rows, in training only of the labels,
// to show what happens if inputs do not fit together.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "ort.h"

namespace {

using example::check;

std::vector<int64_t> labels_of(int64_t rows) {
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < rows; ++i) labels.push_back(i * 7 % 10);
  return labels;
}

std::vector<float> images_of(int64_t rows) {
  std::vector<float> images;
  for (int64_t i = 0; i < rows * 64; ++i) {
    images.push_back(static_cast<float>(i * 31 % 101) / 101.0F);
  }
  return images;
}

template <class T>
size_t bytes_of(const std::vector<T>& values) {
  return values.size() * sizeof(T);
}

// A number of the command line. Throws if the text is not one, or a number that is not from 0 to `most`.
double number(const char* name, const char* text, double most) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (end == text || *end != '\0' || !(value >= 0 && value <= most)) {
    char limit[32];
    std::snprintf(limit, sizeof limit, "%.9g", most);
    throw std::runtime_error(std::string(name) + ": expected a number from 0 to " + limit +
                             ", got '" + text + "'");
  }
  return value;
}

int64_t whole_number(const char* name, const char* text) {
  const double value = number(name, text, 1e6);
  if (value != std::floor(value)) {
    throw std::runtime_error(std::string(name) + ": expected an integer, got '" + text + "'");
  }
  return static_cast<int64_t>(value);
}

void print(const onnxpar_tensor& t) {
  double sum = 0;
  for (size_t i = 0; i < t.bytes / sizeof(float); ++i) sum += static_cast<const float*>(t.data)[i];
  std::printf("%s %.9g\n", t.name, sum);
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("expected DIRECTORY LIBONNXRUNTIME");
  if (argc == 4 || argc > 6) throw std::runtime_error("expected STEPS LEARNING_RATE [ROWS]");
  const int64_t steps = argc > 4 ? whole_number("STEPS", argv[3]) : 0;
  const double rate = argc > 4 ? number("LEARNING_RATE", argv[4], 1e6) : 0;
  const int64_t last_rows = argc > 5 ? whole_number("ROWS", argv[5]) : 6;
  const int64_t rows = steps > 0 ? 6 : last_rows;

  onnxpar_world* world = check(onnxpar_mpi_world(60));
  const int rank = onnxpar_rank(world);
  onnxpar_directory* directory = check(onnxpar_open(argv[1], rank));
  const std::string ranks = std::to_string(onnxpar_ranks(directory));
  if (ranks != std::to_string(onnxpar_size(world))) {
    throw std::runtime_error("expected " + ranks + " ranks, got " +
                             std::to_string(onnxpar_size(world)) + ": mpirun -n " + ranks);
  }
  const example::Ort ort(argv[2]);
  check(onnxpar_bind(world, rank));
  const char* program = steps > 0 ? "training_model" : "model";
  example::OrtSession* model = ort.load(check(onnxpar_graph(directory, program)));

  const std::vector<float> images = images_of(rows);
  const std::vector<int64_t> labels = labels_of(last_rows);
  const int64_t shape[] = {rows, 1, 8, 8};
  onnxpar_run* run = check(onnxpar_new_run(directory, program));
  check(onnxpar_give(run, "x", 1, shape, 4, images.data(), bytes_of(images)));
  if (steps > 0) {
    check(onnxpar_give(run, "labels", 7, &last_rows, 1, labels.data(), bytes_of(labels)));
  }

  onnxpar_tensor whole{};
  if (steps == 0) {
    check(onnxpar_prepare(run, world));
    ort.run(model, run);
    check(onnxpar_whole(run, world, "logits", &whole));
    if (rank == 0) print(whole);
  } else {
    onnxpar_run* update = check(onnxpar_new_run(directory, "optimizer_model"));
    example::OrtSession* optimizer = ort.load(check(onnxpar_graph(directory, "optimizer_model")));
    check(onnxpar_set(update, "lr", rate));
    for (int64_t step = 0; step < steps; ++step) {
      check(onnxpar_set(run, "step", static_cast<double>(step)));
      check(onnxpar_prepare(run, world));
      ort.run(model, run);
      check(onnxpar_whole(run, world, "onnxpar.loss", &whole));
      if (rank == 0) print(whole);
      check(onnxpar_set(update, "step", static_cast<double>(step)));
      check(onnxpar_prepare(update, world));
      ort.run(optimizer, update);
    }
    check(onnxpar_whole_state(directory, world, "fc1.weight", &whole));
    if (rank == 0) print(whole);
    ort.free(optimizer);
    onnxpar_free_run(update);
  }
  ort.free(model);
  onnxpar_free_run(run);
  onnxpar_free_directory(directory);
  check(onnxpar_close(world));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
