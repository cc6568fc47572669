// The operators for tensors on the rank's GPU. All work is enqueued on the stream that onnxruntime
// gives the kernel; nothing waits for the device.
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "collective/device_rank.h"
#include "collective/op_sides.h"

namespace onnxpar {
namespace {

class DeviceKernel : public RankKernel {
 public:
  DeviceKernel(const Node& node, std::string where)
      : RankKernel(node, std::move(where)), device_(*node.rank->device()) {}

 protected:
  Stream enter(const Io& io) {
    rank_.transport();  // throws once the world was closed
    device_.device.make_current();
    return io.stream();
  }
  Transport& transport() { return *device_.transport; }
  Memory& memory(Lane lane) { return device_.memory[static_cast<int>(lane)]; }
  // A token is memory that is never written.
  void token(const Io& io, size_t index) const {
    if (has_output(index)) io.output(index, {1});
  }
  DeviceRank& device_;
};

// Begins collectives on the background stream.
class StartKernel : public CollectiveKernel<DeviceKernel> {
 public:
  using CollectiveKernel::CollectiveKernel;
  ~StartKernel() override {
    // A running collective still writes to its result.
    try {
      device_.device.make_current();
      done_.synchronize();
    } catch (const std::exception&) {
      // The device has failed, and with it the collective.
    }
    forget();
  }

  void compute(const Io& io) override {
    const Stream background = begin(enter(io));
    const Tensor x = io.input(0);
    const Shape shape = output_shape(collective_, x.shape);
    void* out = io.output(0, shape);
    token(io, 1);
    if (out == nullptr) return;  // no elements
    carry_out(Operand{x.data, out, x.shape}, x.type, {out}, background);
    count(sent_with(x));
    done_.record(background);
  }

 protected:
  // The background stream, after all that is on `stream` now; `stream` itself if nothing may run in the
  // background.
  Stream begin(Stream stream) {
    forget();
    if (!rank_.background_allowed()) return stream;
    const Stream background = device_.background.get();
    ready_.record(stream);
    ready_.hold(background);
    return background;
  }
  // Carries out one call, whose results are found by keys, one for each operand.
  void carry_out(const List<Operand>& operands, DType type, const std::vector<const void*>& keys,
                 Stream background) {
    run(operands, type, background, background == device_.background.get());
    std::lock_guard lock(device_.mutex);
    for (size_t i = 0; i < keys.size(); ++i) {
      const Operand& operand = operands[i];
      device_.started[keys[i]] = {&done_, &collective_, operand.in, operand.input, operand.out};
    }
    keys_ = keys;
  }
  // Forgets what nobody has waited for: it belongs to a run that failed.
  void forget() {
    std::lock_guard lock(device_.mutex);
    for (const void* key : keys_) {
      const auto found = device_.started.find(key);
      if (found != device_.started.end() && found->second.done == &done_) {
        device_.started.erase(found);
      }
    }
    keys_.clear();
  }
  // Memory that is kept from run to run, one for each number. What runs in the background uses it, so
  // it is freed after the destructor has waited for that.
  void* kept(size_t number, size_t bytes, Stream stream) {
    while (slabs_.size() <= number) slabs_.push_back(std::make_unique<cuda::Slab>());
    return slabs_[number]->get(bytes, stream);
  }
  cuda::EventHandle done_;

 private:
  std::vector<std::unique_ptr<cuda::Slab>> slabs_;
  cuda::EventHandle ready_;
  std::vector<const void*> keys_;
};

// As on the host.
class StartAheadKernel : public StartKernel {
 public:
  using StartKernel::StartKernel;

  void compute(const Io& io) override {
    const Stream stream = enter(io);
    token(io, 0);
    if (io.input(1).integers().at(0) == 0) return;
    const Stream background = begin(stream);
    const DType type = io.input(2).type;
    std::vector<Operand> operands;
    std::vector<const void*> keys;
    for (size_t i = 2; i < io.inputs(); ++i) {
      const Tensor x = io.input(i);
      require_type(x, type);
      void* result = const_cast<void*>(x.data);
      if (collective_.op != Op::kAllReduce) {
        const size_t bytes = bytes_of(output_shape(collective_, x.shape), x.type);
        result = kept(i - 2, bytes, background);
      }
      operands.push_back({x.data, result, x.shape});
      keys.push_back(x.data);
    }
    carry_out(operands, type, keys, background);
    done_.record(background);
  }
};

// What was started with this key, which is forgotten; nothing if there is none.
std::optional<Started> take(DeviceRank& device, const void* key) {
  std::lock_guard lock(device.mutex);
  const auto found = device.started.find(key);
  if (found == device.started.end()) return std::nullopt;
  const Started started = found->second;
  device.started.erase(found);
  return started;
}

// What is enqueued on the stream from here on comes after what was started.
void hold(CallLog& calls, const Started& started, Stream stream) {
  const Collective& collective = *started.collective;
  CallLog::Entry entry(calls, CallKind::kWait, collective.where, collective.group, Lane::kAsync, 0,
                       0);
  entry.on(stream);
  started.done->hold(stream);
}

// A collective of the foreground. It may have been started ahead.
class ForegroundKernel : public CollectiveKernel<DeviceKernel> {
 public:
  using CollectiveKernel::CollectiveKernel;

 protected:
  bool taken(const Io& io, size_t number, const Tensor& x, Stream stream) override {
    const std::optional<Started> started = take(device_, x.data);
    if (!started) return false;
    const Shape shape =
        waited_shape(collective_, x, *started->collective, started->in, started->input);
    void* out = io.output(number, shape);
    hold(rank_.calls(), *started, stream);
    if (out != started->result) {
      cuda::copy(out, started->result, bytes_of(shape, x.type), stream);
    }
    return true;
  }
};

// As on the host. What it begins is on the background stream, after the program so far.
class FinishLaterKernel : public StartKernel {
 public:
  FinishLaterKernel(const Node& node, Collective collective)
      : StartKernel(node, std::move(collective), Lane::kAsync, 2),
        order_(node.attributes.need_integer("order")),
        first_(node.attributes.need_integer("first") != 0),
        last_(node.attributes.need_integer("last") != 0) {}
  ~FinishLaterKernel() override { device_.held.erase(order_); }

  void compute(const Io& io) override {
    const Stream stream = enter(io);
    forget();
    if (first_) device_.held.clear();
    token(io, 0);
    const DType type = io.input(2).type;
    const bool later = io.input(1).integers().at(0) != 0 && rank_.background_allowed();
    std::vector<Operand> operands;
    std::vector<const void*> keys;
    int64_t sent = 0;
    for (size_t i = 2; i < io.inputs(); ++i) {
      const Tensor x = io.input(i);
      require_type(x, type);
      void* const out = io.output(result_of(i), output_shape(collective_, x.shape));
      sent += sent_with(x);
      const void* in = x.data;
      if (later) {
        void* const copy = kept(i - 2, x.bytes(), stream);
        cuda::copy(copy, x.data, x.bytes(), stream);
        in = copy;
      }
      operands.push_back({in, out, x.shape});
      keys.push_back(out);
    }
    count(sent);
    if (!later) {
      run(operands, type, stream);
      return;
    }
    device_.held[order_] = [this, operands, type, keys](Stream background) {
      carry_out(operands, type, keys, background);
      done_.record(background);
    };
    if (!last_) return;
    const Stream background = begin(stream);
    for (const auto& [order, start] : std::exchange(device_.held, {})) start(background);
  }

 private:
  const int64_t order_;
  const bool first_;
  const bool last_;
};

// As on the host.
class FinishKernel : public DeviceKernel {
 public:
  using DeviceKernel::DeviceKernel;

  void compute(const Io& io) override {
    const Stream stream = enter(io);
    const Tensor x = io.input(0);
    if (const std::optional<Started> started = take(device_, x.data)) {
      hold(rank_.calls(), *started, stream);
    }
    void* const out = io.output(0, x.shape);
    if (out != nullptr && out != x.data) cuda::copy(out, x.data, x.bytes(), stream);
  }
};

class WaitKernel : public CollectiveKernel<DeviceKernel> {
 public:
  using CollectiveKernel::CollectiveKernel;

  void compute(const Io& io) override {
    const Stream stream = enter(io);
    const Tensor y = io.input(0);
    const std::optional<Started> started = take(device_, y.data);
    if (started) {
      waited_shape(collective_, io.input(1), *started->collective, started->in, started->input);
      hold(rank_.calls(), *started, stream);
    } else if (y.count() != 0) {
      throw std::runtime_error(not_started());
    }
    void* out = io.output(0, y.shape);
    if (out != nullptr && out != y.data) cuda::copy(out, y.data, y.bytes(), stream);
    token(io, 1);
  }
};

class BarrierKernel : public RankKernel {
 public:
  using RankKernel::RankKernel;
  void compute(const Io& io) override {
    const Tensor x = io.input(0);
    void* out = io.output(0, x.shape);
    if (out != nullptr && out != x.data) cuda::copy(out, x.data, x.bytes(), io.stream());
  }
};

}  // namespace

std::unique_ptr<Kernel> make_device_kernel(Op op, const Node& node) {
  return make_kernel<DeviceKernel, BarrierKernel, StartKernel, StartAheadKernel, WaitKernel,
                     FinishLaterKernel, FinishKernel, ForegroundKernel>(op, node);
}

std::unique_ptr<Kernel> make_device_collective(const Node& node, Collective collective) {
  return std::make_unique<ForegroundKernel>(node, std::move(collective), Lane::kMain);
}

}  // namespace onnxpar
