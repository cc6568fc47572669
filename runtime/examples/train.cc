// Trains a directory that `onnxpar shard --train` wrote, or runs one without training, on the ranks of
// mpirun, with no Python:
//
//     mpirun -n 2 ./train DIRECTORY LIBONNXRUNTIME [STEPS LEARNING_RATE] [ROWS]
//
// The inputs are numbers that depend on nothing but their position. Prints what the last step has
// computed: for each result its name and the sum of its elements. ROWS replaces the number of rows of
// the last input, to show what happens if inputs do not fit.
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "ort.h"

namespace {

using example::check;

// Row i of the inputs; labels are integers.
struct Batch {
  std::vector<int64_t> labels;
  std::vector<float> images;

  explicit Batch(int64_t rows, int64_t pixels) {
    for (int64_t i = 0; i < rows; ++i) labels.push_back(i * 7 % 10);
    for (int64_t i = 0; i < rows * pixels; ++i) {
      images.push_back(static_cast<float>(i * 31 % 101) / 101.0F);
    }
  }
};

void print(const onnxpar_tensor& t) {
  double sum = 0;
  for (size_t i = 0; i < t.bytes / sizeof(float); ++i) sum += static_cast<const float*>(t.data)[i];
  std::printf("%s %.9g\n", t.name, sum);
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("expected DIRECTORY LIBONNXRUNTIME");
  const int steps = argc > 4 ? std::atoi(argv[3]) : 0;
  constexpr int64_t kRows = 6, kPixels = 64;
  const int64_t last_rows = argc > 5 ? std::atoi(argv[5]) : kRows;

  onnxpar_world* world = check(onnxpar_mpi_world(60));
  const int rank = onnxpar_rank(world);
  onnxpar_directory* directory = check(onnxpar_open(argv[1], rank));
  if (onnxpar_ranks(directory) != onnxpar_size(world)) {
    throw std::runtime_error("the directory has another number of ranks than the job");
  }
  const example::Ort ort(argv[2]);
  check(onnxpar_bind(world, rank));
  const char* program = steps > 0 ? "training_model" : "model";
  example::OrtSession* model = ort.load(check(onnxpar_graph(directory, program)));

  const Batch batch(kRows, kPixels);
  const int64_t shape[] = {steps > 0 ? kRows : last_rows, 1, 8, 8};
  onnxpar_run* run = check(onnxpar_new_run(directory, program));
  check(onnxpar_give(run, "x", 1, shape, 4, batch.images.data()));
  if (steps > 0) check(onnxpar_give(run, "labels", 7, &last_rows, 1, batch.labels.data()));

  onnxpar_tensor whole{};
  if (steps == 0) {
    check(onnxpar_prepare(run, world));
    ort.run(model, run);
    check(onnxpar_whole(run, world, "logits", &whole));
    if (rank == 0) print(whole);
  } else {
    onnxpar_run* update = check(onnxpar_new_run(directory, "optimizer_model"));
    example::OrtSession* optimizer = ort.load(check(onnxpar_graph(directory, "optimizer_model")));
    check(onnxpar_set(update, "lr", std::atof(argv[4])));
    for (int step = 0; step < steps; ++step) {
      check(onnxpar_set(run, "step", step));
      check(onnxpar_prepare(run, world));
      ort.run(model, run);
      check(onnxpar_whole(run, world, "onnxpar.loss", &whole));
      if (rank == 0) print(whole);
      check(onnxpar_set(update, "step", step));
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
