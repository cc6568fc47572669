// The operators for tensors on the rank's GPU. All work is enqueued on the stream that onnxruntime
// gives the kernel; nothing waits for the device.
#include <stdexcept>

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

// Start runs the collective on the background stream, into its own memory, because that of Wait's
// output is not known yet.
class StartKernel : public CollectiveKernel<DeviceKernel> {
 public:
  using CollectiveKernel::CollectiveKernel;
  ~StartKernel() override {
    // A running collective still writes to the result.
    try {
      device_.device.make_current();
      done_.synchronize();
    } catch (const std::exception&) {
      // The device has failed, and with it the collective.
    }
  }

  void compute(const Io& io) override {
    const Stream stream = enter(io);
    const Tensor x = io.input(0);
    const size_t bytes = bytes_of(output_shape(collective_, x.shape), x.type);
    const Stream background = device_.background.get();
    ready_.record(stream);
    ready_.hold(background);
    std::byte* result = result_.get(bytes, background);
    run(x, result, background);
    done_.record(background);
    const void* handle = io.output(0, {1});
    token(io, 1);
    std::lock_guard lock(device_.mutex);
    device_.started[handle] = {&done_, &collective_, x.data, x.shape, result, bytes};
  }

 private:
  cuda::EventHandle ready_;
  cuda::EventHandle done_;
  cuda::Slab result_;
};

// As on the host. One event is enough for all operands, since the stream carries them out in order.
class StartAheadKernel : public CollectiveKernel<DeviceKernel> {
 public:
  using CollectiveKernel::CollectiveKernel;
  ~StartAheadKernel() override {
    try {
      device_.device.make_current();
      done_.synchronize();
    } catch (const std::exception&) {
      // The device has failed, and with it the collective.
    }
    for (const void* in : operands_) device_.ahead.erase(in);
  }

  void compute(const Io& io) override {
    const Stream stream = enter(io);
    token(io, 0);
    if (io.input(1).integers().at(0) == 0) return;
    const Stream background = device_.background.get();
    ready_.record(stream);
    ready_.hold(background);
    operands_.clear();
    results_.resize(io.inputs() - 2);
    for (size_t i = 2; i < io.inputs(); ++i) {
      const Tensor x = io.input(i);
      void* result = const_cast<void*>(x.data);
      size_t bytes = x.bytes();
      if (collective_.op != Op::kAllReduce) {
        bytes = bytes_of(output_shape(collective_, x.shape), x.type);
        if (!results_[i - 2]) results_[i - 2] = std::make_unique<cuda::Slab>();
        result = results_[i - 2]->get(bytes, background);
      }
      execute(transport(), group(), collective_, x.data, result, x.shape, x.type,
              memory(Lane::kAsync), background);
      device_.ahead[x.data] = {&done_, &collective_, x.data, x.shape, result, bytes};
      operands_.push_back(x.data);
    }
    done_.record(background);
  }

 private:
  cuda::EventHandle ready_;
  cuda::EventHandle done_;
  std::vector<std::unique_ptr<cuda::Slab>> results_;
  std::vector<const void*> operands_;
};

// As on the host.
class ForegroundKernel : public CollectiveKernel<DeviceKernel> {
 public:
  using CollectiveKernel::CollectiveKernel;

  void compute(const Io& io) override {
    const Stream stream = enter(io);
    const Tensor x = io.input(0);
    const auto found = device_.ahead.find(x.data);
    if (found == device_.ahead.end()) return CollectiveKernel::compute(io);
    const Started started = found->second;
    device_.ahead.erase(found);
    void* out = io.output(0, waited_shape(collective_, x, *started.collective, started.in,
                                          started.input));
    started.done->hold(stream);
    if (out != started.result) cuda::copy(out, started.result, started.result_bytes, stream);
    group();
    count(x);
    token(io, 1);
  }
};

class WaitKernel : public DeviceKernel {
 public:
  WaitKernel(const Node& node, Collective collective)
      : DeviceKernel(node, collective.where), collective_(std::move(collective)) {}

  void compute(const Io& io) override {
    const Stream stream = enter(io);
    const Started started = take(io.input(0).data);
    const Tensor x = io.input(1);
    const Shape shape =
        waited_shape(collective_, x, *started.collective, started.in, started.input);
    void* out = io.output(0, shape);
    started.done->hold(stream);
    cuda::copy(out, started.result, started.result_bytes, stream);
  }

 private:
  Started take(const void* handle) {
    std::lock_guard lock(device_.mutex);
    const auto found = device_.started.find(handle);
    if (found == device_.started.end()) {
      throw std::runtime_error(describe() + ": its handle is not one of a Start that still runs");
    }
    const Started started = found->second;
    device_.started.erase(found);
    return started;
  }
  const Collective collective_;
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
  const auto collective = [&] { return collective_of(op, node); };
  switch (op) {
    case Op::kSend: return std::make_unique<SendKernel<DeviceKernel>>(node);
    case Op::kRecv: return std::make_unique<RecvKernel<DeviceKernel>>(node);
    case Op::kBarrier: return std::make_unique<BarrierKernel>(node, where_of(op, node));
    case Op::kStart: return std::make_unique<StartKernel>(node, collective(), Lane::kAsync);
    case Op::kWait: return std::make_unique<WaitKernel>(node, collective());
    case Op::kStartAhead:
      return std::make_unique<StartAheadKernel>(node, collective(), Lane::kAsync);
    default: return std::make_unique<ForegroundKernel>(node, collective(), Lane::kMain);
  }
}

}  // namespace onnxpar
