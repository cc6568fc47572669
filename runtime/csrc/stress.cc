// A stress test of the threads transport, of collectives in shared memory and of background
// collectives, without onnxruntime, for the sanitizers (tools/sanitize). Ranks, all of them threads,
// run a random but common sequence of collectives on random groups, some in the background, and
// check every result, while another thread reads the logs of their calls; they leave gathers running
// that a later program finishes; in shared memory they disagree now and then; then one rank fails
// while the others wait, over and over, and worlds are aborted while data is copied.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "collective/world.h"
#include "kernels/host/philox.h"
#include "transport/shared.h"

using namespace onnxpar;

namespace {

struct Options : Attributes {
  std::vector<int64_t> group;
  std::optional<int64_t> integer(const char* name) const override {
    if (std::strcmp(name, "root") == 0) return group.back();
    if (std::strcmp(name, "concat_axis") == 0) return 0;
    return 1;  // axis, split_axis
  }
  std::optional<std::string> text(const char*) const override { return "sum"; }
  std::optional<std::vector<int64_t>> integers(const char* name) const override {
    if (std::strcmp(name, "group") == 0) return group;
    return std::vector<int64_t>{group.front(), group.back()};  // pairs
  }
  std::optional<double> real(const char*) const override { return std::nullopt; }
};

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong result: %s\n", what);
  std::exit(1);
}

// What a rank does that waits in shared memory.
void yield(uint64_t) { std::this_thread::yield(); }

// The memory of every group, as ranks on one node have it.
struct Node {
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::byte* memory(const std::vector<int>& ranks, Lane lane) {
    std::lock_guard lock(mutex);
    std::vector<Line>& made = groups[{lane, ranks}];
    if (made.empty()) made.resize(SharedGroup::bytes(static_cast<int>(ranks.size())) / sizeof(Line));
    return made.front().bytes;
  }
  std::mutex mutex;
  std::map<std::pair<Lane, std::vector<int>>, std::vector<Line>> groups;
};

struct NodeGroup : Group {
  std::unique_ptr<SharedGroup> shared;
};

// Collectives in shared memory; messages are those of the threads transport.
class NodeTransport : public Transport {
 public:
  NodeTransport(std::shared_ptr<Node> node, std::unique_ptr<Transport> base)
      : node_(std::move(node)), base_(std::move(base)) {}
  int rank() const override { return base_->rank(); }
  int size() const override { return base_->size(); }
  bool concurrent() const override { return true; }
  bool prompt(int peer) const override { return base_->prompt(peer); }
  bool overlaps(const Group&) const override { return true; }
  Group& group(const std::vector<int>& ranks, Lane lane) override {
    std::unique_ptr<NodeGroup>& group = groups_[{lane, ranks}];
    if (!group) {
      group = std::make_unique<NodeGroup>();
      group->ranks = ranks;
      group->lane = lane;
      group->index = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
      group->shared = std::make_unique<SharedGroup>(node_->memory(ranks, lane), group->index,
                                                    group->size(), 10, yield);
    }
    return *group;
  }
  void all_reduce(Group& g, const Call& call, const Blocks& blocks, DType type,
                  Reduction reduction, Stream) override {
    of(g).all_reduce(call, blocks, type, reduction);
  }
  void all_gather(Group& g, const Call& call, const Blocks& blocks, Stream) override {
    of(g).all_gather(call, blocks);
  }
  void reduce_scatter(Group& g, const Call& call, const Blocks& blocks, DType type,
                      Reduction reduction, Stream) override {
    of(g).reduce_scatter(call, blocks, type, reduction);
  }
  void all_to_all(Group& g, const Call& call, const void* in, void* out, size_t bytes,
                  Stream) override {
    of(g).all_to_all(call, in, out, bytes);
  }
  void broadcast(Group& g, const Call& call, const void* in, void* out, size_t bytes, int root,
                 Stream) override {
    of(g).broadcast(call, in, out, bytes, root);
  }
  void permute(Group& g, const Call& call, const void* in, void* out, size_t bytes,
               const std::vector<Pair>& pairs, Stream) override {
    of(g).permute(call, in, out, bytes, pairs);
  }
  void send(const Call& call, int peer, int tag, const void* in, size_t bytes, Stream s) override {
    base_->send(call, peer, tag, in, bytes, s);
  }
  void recv(const Call& call, int peer, int tag, void* out, size_t bytes, Lane lane,
            Stream s) override {
    base_->recv(call, peer, tag, out, bytes, lane, s);
  }
  void abort(const std::string& message) override { base_->abort(message); }
  void stop() override { base_->stop(); }
  void close() override { base_->close(); }

 private:
  static SharedGroup& of(Group& group) { return *static_cast<NodeGroup&>(group).shared; }

  const std::shared_ptr<Node> node_;
  const std::unique_ptr<Transport> base_;
  std::map<std::pair<Lane, std::vector<int>>, std::unique_ptr<NodeGroup>> groups_;
};

std::vector<RankContext*> make_world(int size, bool shared) {
  const auto node = std::make_shared<Node>();
  std::vector<RankContext*> ranks;
  for (auto& transport : make_threads_transport(size, {true, 60})) {
    if (shared) transport = std::make_unique<NodeTransport>(node, std::move(transport));
    ranks.push_back(new RankContext(std::move(transport)));
  }
  return ranks;
}

void free_world(std::vector<RankContext*>& ranks) {
  for (RankContext* rank : ranks) rank->close();
  for (RankContext* rank : ranks) delete rank;
}

// The value of element i in rank r's input.
int32_t element(int rank, size_t i) { return rank * 1000 + static_cast<int32_t>(i % 997); }

void check(const Collective& c, int rank, const Operand& operand) {
  const Shape& shape = operand.input;
  const int32_t* out = static_cast<const int32_t*>(operand.out);
  const size_t count = static_cast<size_t>(shape[0] * shape[1]);
  if (c.op == Op::kAllReduce) {
    for (size_t i = 0; i < count; ++i) {
      int32_t sum = 0;
      for (int member : c.group) sum += element(member, i);
      expect(out[i] == sum, "AllReduce");
    }
  }
  if (c.op == Op::kBroadcast) {
    for (size_t i = 0; i < count; ++i) expect(out[i] == element(c.group.back(), i), "Broadcast");
  }
  if (c.op == Op::kPermute) {
    const bool receives = rank == c.group.back();
    for (size_t i = 0; i < count; ++i) {
      expect(out[i] == (receives ? element(c.group.front(), i) : 0), "Permute");
    }
  }
  if (c.op == Op::kAllGather) {
    const size_t columns = static_cast<size_t>(shape[1]);
    const size_t g = c.group.size();
    for (size_t row = 0; row < static_cast<size_t>(shape[0]); ++row) {
      for (size_t m = 0; m < g; ++m) {
        for (size_t i = 0; i < columns; ++i) {
          expect(out[(row * g + m) * columns + i] == element(c.group[m], row * columns + i),
                 "AllGather");
        }
      }
    }
  }
}

void run_rank(RankContext& context, int size, int steps) {
  std::mt19937 random(1234);  // the same on every rank: all choose the same sequence
  const int rank = context.rank();
  struct Pending {
    std::vector<const void*> keys;
    std::vector<std::unique_ptr<int32_t[]>> inputs;
  };
  std::vector<Pending> pending;
  for (int step = 0; step < steps; ++step) {
    Options options;
    const int border = static_cast<int>(random() % static_cast<unsigned>(size));
    for (int r = 0; r < size; ++r) {
      if ((r < border) == (rank < border)) options.group.push_back(r);
    }
    const Op op = static_cast<Op>(random() % 6);
    const size_t tensors = op <= Op::kReduceScatter ? 1 + random() % 3 : 1;
    const bool background = random() % 3 == 0;
    const Collective c = parse_collective(op, "stress", options, size);
    auto call = std::make_shared<Request>();
    call->collective = c;
    call->group = &context.transport().group(c.group, background ? Lane::kAsync : Lane::kMain);
    call->type = DType::kInt32;
    std::vector<std::unique_ptr<int32_t[]>> inputs;
    for (size_t t = 0; t < tensors; ++t) {
      const int64_t rows = 1 + static_cast<int64_t>(random() % 5);
      // Now and then more than what ranks move at once.
      const int64_t width = random() % 8 != 0 ? 3 : random() % 8 != 0 ? 2000 : 50000;
      const Shape shape{rows, static_cast<int64_t>(options.group.size()) * width};
      const size_t count = static_cast<size_t>(shape[0] * shape[1]);
      inputs.emplace_back(new int32_t[count]);
      for (size_t i = 0; i < count; ++i) inputs.back()[i] = element(rank, i);
      size_t out_count = 1;
      for (int64_t dim : output_shape(c, shape)) out_count *= static_cast<size_t>(dim);
      call->add(inputs.back().get(), context.background_bytes(out_count * sizeof(int32_t)), shape);
    }
    if (background) {
      std::vector<const void*> keys;
      for (const Operand& operand : call->operands) keys.push_back(operand.in);
      context.start(keys, call);
      pending.push_back({std::move(keys), std::move(inputs)});
    } else {
      execute(context.transport(), *call->group, c, call->operands, DType::kInt32,
              context.memory(), nullptr, context.calls());
      for (const Operand& operand : call->operands) check(c, rank, operand);
      context.count(op, 1);
    }
    if (pending.size() > 3 || step + 1 == steps) {
      for (Pending& p : pending) {
        for (const void* key : p.keys) {
          const auto request = context.take(key);
          check(request->collective, rank, request->operands[request->find(key)]);
        }
      }
      pending.clear();
    }
    if (size > 1 && step % 16 == 0) {
      const int after = (rank + 1) % size;
      const int before = (rank + size - 1) % size;
      const int32_t sent = rank;
      int32_t got = -1;
      context.transport().send(Call("Send"), after, 0, &sent, sizeof(sent), nullptr);
      context.transport().recv(Call("Recv"), before, 0, &got, sizeof(got), Lane::kMain,
                               nullptr);
      expect(got == before, "Recv");
    }
  }
}

// What a trace and a failing rank read of the logs, while ranks call and their background calls.
void read_logs(const std::vector<RankContext*>& ranks, const std::atomic<bool>& done) {
  std::vector<std::set<int64_t>> numbers(ranks.size());
  const auto folder = std::filesystem::temp_directory_path();
  const std::string file = folder / ("onnxpar_stress." + std::to_string(getpid()));
  for (RankContext* rank : ranks) rank->calls().set_file(file);
  bool last = false;
  for (int round = 0; !last; ++round) {
    last = done;  // then everything has ended before it is taken
    for (size_t r = 0; r < ranks.size(); ++r) {
      CallLog& log = ranks[r]->calls();
      for (const LoggedCall& call : log.take()) {
        expect(numbers[r].insert(call.number).second, "a call is logged once");
        expect(call.state == CallState::kDone && call.begin <= call.end, "a logged call");
        expect(call.met == 0 || (call.begin <= call.met && call.met <= call.end), "who came last");
      }
      expect(log.tables().size() > 2 && log.foreground_ns() >= 0, "the tables of a log");
      if (round % 16 == 0) log.write("stress");
    }
    std::this_thread::yield();
  }
  for (const std::set<int64_t>& found : numbers) {
    // A rank alone logs only that it waits for what runs in the background, if it has to.
    expect(found.empty() ? ranks.size() == 1
                         : *found.rbegin() + 1 == static_cast<int64_t>(found.size()),
           "all calls");
  }
  std::filesystem::remove(file);
}

void traffic(int size, int steps, bool shared) {
  std::vector<RankContext*> ranks = make_world(size, shared);
  std::vector<std::thread> threads;
  std::atomic<bool> done{false};
  for (RankContext* rank : ranks) rank->calls().keep(true);
  std::thread reader([&] { read_logs(ranks, done); });
  for (RankContext* rank : ranks) {
    threads.emplace_back([=] { run_rank(*rank, size, steps); });
  }
  for (std::thread& thread : threads) thread.join();
  done = true;
  reader.join();
  free_world(ranks);
}

// What a FinishLater and its Finish do: a program leaves gathers running in the memory of states, from
// copies of its shards, and the next program, or `settle`, completes them, with collectives of the
// foreground meanwhile. Now and then nobody finishes them, or the program fails before it has started
// them, on all ranks.
void leave_rank(RankContext& context, int size, int steps) {
  constexpr int kCalls = 4;
  constexpr size_t kTensors = 2;
  std::mt19937 random(4321);  // the same on every rank
  Options options;
  for (int r = 0; r < size; ++r) options.group.push_back(r);
  const Collective gather = parse_collective(Op::kAllGather, "stress", options, size);
  const Collective sum = parse_collective(Op::kAllReduce, "stress", options, size);
  struct State {
    std::vector<int32_t> shard;
    std::vector<int32_t> copy;
    std::vector<int32_t> gathered;
  };
  std::vector<std::vector<State>> states(kCalls);
  for (auto& tensors : states) {
    for (size_t t = 0; t < kTensors; ++t) {
      const size_t width = random() % 4 != 0 ? 300 : 20000;
      tensors.push_back({std::vector<int32_t>(width), {}, std::vector<int32_t>(width * size)});
    }
  }
  const auto value = [](int rank, int step, size_t i) {
    return element(rank, i) + 1000000 * (step % 50);
  };
  const auto expect_gathered = [&](const State& state, int step) {
    const size_t width = state.shard.size();
    for (size_t i = 0; i < state.gathered.size(); ++i) {
      expect(state.gathered[i] == value(static_cast<int>(i / width), step, i % width), "left running");
    }
  };
  for (int step = 0; step < steps; ++step) {
    context.drop_held();
    const bool fails = random() % 8 == 0;
    // The order in which the program makes its calls.
    std::vector<int> order{0, 1, 2, 3};
    std::shuffle(order.begin(), order.end(), random);
    for (const int call : order) {
      auto request = std::make_shared<Request>();
      request->collective = gather;
      request->group = &context.transport().group(gather.group, Lane::kAsync);
      request->type = DType::kInt32;
      request->later = true;
      std::vector<const void*> keys;
      for (State& state : states[static_cast<size_t>(call)]) {
        // Nobody may have finished what still reads the copy.
        context.take(state.gathered.data());
        for (size_t i = 0; i < state.shard.size(); ++i) {
          state.shard[i] = value(context.rank(), step, i);
        }
        state.copy = state.shard;
        const auto width = static_cast<int64_t>(state.shard.size());
        request->add(state.copy.data(), state.gathered.data(), {1, width});
        keys.push_back(state.gathered.data());
      }
      context.hold(call, std::move(keys), std::move(request));
    }
    if (fails) continue;
    context.start_held();
    std::vector<int32_t> numbers(500, context.rank());
    std::vector<int32_t> sums(500);
    execute(context.transport(), context.transport().group(sum.group, Lane::kMain), sum,
            Operand{numbers.data(), sums.data(), {500, 1}}, DType::kInt32, context.memory(), nullptr,
            context.calls());
    for (const int32_t found : sums) expect(found == size * (size - 1) / 2, "meanwhile");
    const unsigned way = random() % 4;
    if (way == 0) continue;  // The next program waits itself.
    if (way == 1) context.settle();
    for (const auto& tensors : states) {
      for (const State& state : tensors) {
        if (way != 1) context.take(state.gathered.data());
        expect_gathered(state, step);
      }
    }
  }
  context.settle();
}

void left_running(int size, int steps, bool shared) {
  std::vector<RankContext*> ranks = make_world(size, shared);
  std::vector<std::thread> threads;
  for (RankContext* rank : ranks) {
    threads.emplace_back([=] { leave_rank(*rank, size, steps); });
  }
  for (std::thread& thread : threads) thread.join();
  free_world(ranks);
}

struct Named : Call {
  explicit Named(std::string text) : Call("Named", hash(text)), name(std::move(text)) {}
  std::string detail() const override { return name; }
  const std::string name;
};

// In shared memory: one rank calls something else, every rank gets the error, and all go on.
void disagreements(int size, int rounds) {
  const size_t memory = SharedGroup::bytes(size) / sizeof(Node::Line);
  std::vector<Node::Line> lines(memory);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&lines, rank, size, rounds] {
      SharedGroup group(lines.front().bytes, rank, size, 10, yield);
      for (int round = 0; round < rounds; ++round) {
        const int odd = round % size;
        const std::string own = rank == odd ? "odd" : "even";
        const std::vector<float> x(100, 1.0f);
        std::vector<float> y(100);
        std::string caught;
        try {
          group.broadcast(Named(own), x.data(), y.data(), 400, 0);
        } catch (const Conflict& e) {
          caught = e.what();
          expect((e.member == odd) != (rank == odd), "the other rank of a conflict");
        }
        expect(caught == (rank == odd ? "Named with even" : "Named with odd"), "the text of a conflict");
        group.all_reduce(Named("sum"), Block(x.data(), y.data(), 100), DType::kFloat32,
                         Reduction::kSum);
        for (float value : y) expect(value == static_cast<float>(size), "after a conflict");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// One rank fails at a random moment; every other must come back with an error.
void failures(int size, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    std::vector<RankContext*> ranks = make_world(size, false);
    std::atomic<int> failed{0};
    std::vector<std::thread> threads;
    for (RankContext* rank : ranks) {
      threads.emplace_back([=, &failed] {
        std::mt19937 random(static_cast<unsigned>(round * size + rank->rank()));
        Options options;
        for (int r = 0; r < size; ++r) options.group.push_back(r);
        const Collective c = parse_collective(Op::kAllReduce, "stress", options, size);
        const int last = static_cast<int>(random() % 20);
        std::vector<float> x(1000, 1.0f);
        try {
          for (int step = 0;; ++step) {
            if (rank->rank() == 0 && step == last) {
              rank->abort("rank 0: on purpose");
              throw std::runtime_error("on purpose");
            }
            execute(rank->transport(), rank->transport().group(c.group, Lane::kMain), c,
                    Operand{x.data(), x.data(), {1000, 1}}, DType::kFloat32, rank->memory(),
                    nullptr, rank->calls());
          }
        } catch (const std::exception& e) {
          expect(std::string(e.what()).find("on purpose") != std::string::npos, e.what());
          ++failed;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    expect(failed == size, "every rank fails");
    free_world(ranks);
  }
}

// The root of a broadcast has nothing to copy, so it waits while others do; then the world is aborted.
// It must not come back, and write to its memory, before they have finished.
void aborted_copies(int rounds) {
  constexpr size_t kCount = size_t{4} << 20;
  std::mt19937 random(7);
  for (int round = 0; round < rounds; ++round) {
    std::vector<RankContext*> ranks = make_world(2, false);
    std::vector<int32_t> given(kCount, 1);
    std::vector<int32_t> taken(kCount, 1);
    const auto act = [&ranks](int rank, std::vector<int32_t>& data) {
      Transport& transport = ranks[static_cast<size_t>(rank)]->transport();
      try {
        transport.broadcast(transport.group({0, 1}, Lane::kMain), Call("Broadcast"), data.data(),
                            data.data(), kCount * sizeof(int32_t), 0, nullptr);
      } catch (const std::runtime_error& e) {
        expect(std::string(e.what()).find("on purpose") != std::string::npos, e.what());
      }
    };
    std::thread other([&] { act(1, taken); });
    std::thread aborting([&, wait = std::chrono::microseconds(random() % 5000)] {
      std::this_thread::sleep_for(wait);
      ranks[0]->abort("on purpose");
    });
    act(0, given);
    std::fill(given.begin(), given.end(), 2);
    other.join();
    aborting.join();
    for (const int32_t value : taken) expect(value == 1, "a copy while the world is aborted");
    free_world(ranks);
  }
}

// Sizes of which no memory can have been made.
void products() {
  const auto refused = [](auto f) {
    try {
      f();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  const int64_t large = int64_t{1} << 32;
  const std::vector<int64_t> key{1, 2, 3, 4};
  expect(refused([&] { product({large, large, 4}); }), "a product beyond 2^64");
  expect(refused([&] { product({3, -1}); }), "a negative dim");
  expect(product({0, large, large, large}) == 0, "no elements");
  expect(product({large, large, large, 0}) == 0, "no elements");
  const Shape many{large, large, 2};
  expect(refused([&] { philox_count(key, many, many, {0, 0, 0}); }), "the count of Philox");
  expect(refused([&] { philox_count(key, {2, 1}, {large, 4}, {0, INT64_MAX}); }), "Philox's last element");
}

void types() {
  for (int type : {1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16}) {
    for (int reduction = 0; reduction < 4; ++reduction) {
      std::vector<uint8_t> a(8 * 1500, 0xff);
      std::vector<uint8_t> b(8 * 1500, 0x7f);
      if (type == 9) a.assign(a.size(), 1), b.assign(b.size(), 0);
      const void* sources[] = {a.data(), b.data()};
      reduce_many(b.data(), sources, 2, 1500, static_cast<DType>(type),
                  static_cast<Reduction>(reduction));
    }
  }
  std::vector<float> numbers(3 * 5);
  for (Distribution kind : {Distribution::kUniform, Distribution::kNormal}) {
    philox_fill(numbers.data(), {1, 2, 3, 4}, {3, 5}, {1 << 20, 1 << 20}, {1 << 19, 7}, kind);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 300;
  types();
  products();
  for (int size : {1, 2, 3, 5, 8}) traffic(size, steps, false);
  // Ranks that wait there keep looking, which is slow where cores are few.
  for (int size : {1, 2, 3, 5, 8}) traffic(size, steps / 3, true);
  for (int size : {1, 2, 5}) left_running(size, steps / 3, false);
  for (int size : {2, 3}) left_running(size, steps / 6, true);
  for (int size : {2, 5}) disagreements(size, steps);
  failures(4, steps / 10);
  aborted_copies(steps / 10);
  std::puts("ok");
  return 0;
}
