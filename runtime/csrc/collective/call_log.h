// What a rank has communicated: its last calls, always; and all calls, while they are kept for a trace.
//
// Times are those of the steady clock, in nanoseconds. On Linux it is one clock for all processes of a
// machine (CLOCK_MONOTONIC), and that of Python's time.monotonic_ns.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "collective/device_span.h"
#include "transport/transport.h"

namespace onnxpar {

enum class CallKind : int64_t {
  kCollective,
  kSend,
  kRecv,
  kWait,   // of the foreground, for a collective in the background
  kSetUp,  // of a group's communicator
};
enum class CallState : int64_t { kRunning, kDone, kFailed };

// `met` of a call whose times are those at which a GPU began and ended it.
inline constexpr int64_t kOnDevice = -1;

// One call. Only numbers, so that logging it allocates nothing.
struct LoggedCall {
  int64_t number = -1;  // among the rank's calls
  CallKind kind = CallKind::kCollective;
  CallState state = CallState::kRunning;
  int64_t name = 0;     // of the node, or what the program calls; by its number in the log
  int64_t channel = 0;  // the members, by their number in the log
  int64_t place = 0;    // among the calls on this channel; equal for all members of a call
  int64_t tensors = 0;
  int64_t bytes = 0;      // of this rank's input; of a message
  int64_t signature = 0;  // of a collective: equal for all members, unless they disagree
  int64_t begin = 0;
  int64_t met = 0;  // when the last member had come; 0 if that is not known, or kOnDevice
  int64_t end = 0;
  int64_t behind = 0;  // 1: while the rank did something else, in another thread or on another stream
};

class CallLog {
 public:
  // How many of the last calls are known.
  static constexpr size_t kLast = 1000;

  explicit CallLog(int rank, int size) : rank_(rank), size_(size), last_(kLast) {}

  // Logs a call from construction to destruction, as failed if that is by an exception.
  class Entry {
   public:
    // A call on a group.
    Entry(CallLog& log, CallKind kind, std::string_view name, const Group& group,
          int64_t tensors = 0, int64_t bytes = 0);
    // A message, or the first call on a group.
    Entry(CallLog& log, CallKind kind, std::string_view name, const std::vector<int>& ranks,
          Lane lane, int tag, int64_t bytes);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    // What the transport is called with, which learns when the last member has come. It outlives this.
    void follow(const Call& call);
    // The stream of the call, null for the host: a trace then has the time that the call takes there.
    void on(Stream stream);
    // The rank does something else meanwhile.
    void behind() { call_.behind = 1; }

   private:
    CallLog& log_;
    LoggedCall call_;
    std::unique_ptr<DeviceSpan> span_;
    const Call* followed_ = nullptr;
    const int thrown_;
  };

  // Nanoseconds for which the foreground has communicated so far, waiting for others included. Receives
  // are left out: the program may wait for them in another thread.
  int64_t foreground_ns() const;
  // Whether to keep all calls from now on; forgets those that were kept. With the clock of a GPU,
  // calls on its streams get the times at which it carries them out.
  void keep(bool all, std::shared_ptr<DeviceClock> clock = nullptr);
  // The calls that were kept and have ended, which are forgotten. Waits for those on a GPU, in whose
  // context it is called; later calls have the times of the host.
  std::vector<LoggedCall> take();
  // The names and channels of calls, as JSON: {"names": [...], "channels": [{"ranks", "lane", "tag"}]}.
  std::string tables() const;

  // The file that `write` writes; none if empty.
  void set_file(std::string path);
  // Writes the last calls as JSON to the file, if there is one, with the reason; in its folder, which
  // is made. Not if the rank has failed before. Reports no error: it is called when the rank fails.
  void write(std::string_view reason) noexcept { save(reason, false); }
  // The same for a rank that fails; says on stderr where the file is.
  void fail(std::string_view reason) noexcept { save(reason, true); }

 private:
  struct Channel {
    std::vector<int> ranks;
    Lane lane = Lane::kMain;
    int tag = 0;
    int64_t calls = 0;
  };
  struct Kept {
    LoggedCall call;
    std::unique_ptr<DeviceSpan> span;  // null for a call of the host
  };
  // By what a channel is found again: the group's address, or the kind, peer and tag of messages.
  using Key = uint64_t;

  void save(std::string_view reason, bool fails) noexcept;
  // With the lock.
  int64_t channel(Key key, const std::vector<int>& ranks, Lane lane, int tag);
  int64_t name(std::string_view name);
  void begin(LoggedCall& call, std::string_view what, Key key, const std::vector<int>& ranks,
             Lane lane, int tag);
  void end(const LoggedCall& call, std::unique_ptr<DeviceSpan> span);
  std::string tables_locked() const;

  const int rank_;
  const int size_;
  mutable std::mutex mutex_;
  int64_t calls_ = 0;
  int64_t foreground_ns_ = 0;
  std::vector<LoggedCall> last_;  // by number, modulo the size
  bool keeps_ = false;
  std::vector<Kept> kept_;
  std::shared_ptr<DeviceClock> clock_;
  std::vector<std::string> names_;
  std::unordered_map<const char*, int64_t> name_at_;  // by address, of the last name that was there
  std::unordered_map<std::string, int64_t> name_of_;
  std::vector<Channel> channels_;
  std::unordered_map<Key, int64_t> channel_of_;
  std::string path_;
  bool failed_ = false;
};

}  // namespace onnxpar
