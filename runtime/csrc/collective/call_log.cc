#include "collective/call_log.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

namespace onnxpar {
namespace {

int64_t wall_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void quote(std::string& out, std::string_view text) {
  out += '"';
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) {
      out += c;
    } else {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    }
  }
  out += '"';
}

void row(std::string& out, const LoggedCall& c) {
  const int64_t numbers[] = {c.number,
                             static_cast<int64_t>(c.kind),
                             static_cast<int64_t>(c.state),
                             c.name,
                             c.channel,
                             c.place,
                             c.tensors,
                             c.bytes,
                             c.signature,
                             c.begin,
                             c.met,
                             c.end,
                             c.behind};
  out += '[';
  for (int64_t number : numbers) out += std::to_string(number) + ',';
  out.back() = ']';
}

}  // namespace

CallLog::Entry::Entry(CallLog& log, CallKind kind, std::string_view name, const Group& group,
                      int64_t tensors, int64_t bytes)
    : log_(log), thrown_(std::uncaught_exceptions()) {
  call_.kind = kind;
  call_.tensors = tensors;
  call_.bytes = bytes;
  // A wait is no call of the group: other members need not wait.
  const uint64_t waits = kind == CallKind::kWait ? 1 : 0;
  log_.begin(call_, name, reinterpret_cast<uintptr_t>(&group) | waits, group.ranks, group.lane, 0);
}

CallLog::Entry::Entry(CallLog& log, CallKind kind, std::string_view name,
                      const std::vector<int>& ranks, Lane lane, int tag, int64_t bytes)
    : log_(log), thrown_(std::uncaught_exceptions()) {
  call_.kind = kind;
  call_.bytes = bytes;
  // Addresses of this process are below 2^56.
  uint64_t key = (static_cast<uint64_t>(kind) + 1) << 60 | static_cast<uint64_t>(tag);
  for (int rank : ranks) key = hash(static_cast<uint64_t>(rank), key) | uint64_t{1} << 63;
  log_.begin(call_, name, key, ranks, lane, tag);
}

CallLog::Entry::~Entry() {
  if (followed_ != nullptr) call_.met = followed_->met_ns;
  call_.end = now_ns();
  call_.state = std::uncaught_exceptions() > thrown_ ? CallState::kFailed : CallState::kDone;
  try {
    if (span_ != nullptr) span_->end();
  } catch (const std::exception&) {
    span_.reset();  // the device has failed; what fails by it is reported elsewhere
  }
  log_.end(call_, std::move(span_));
}

void CallLog::Entry::on(Stream stream) {
  if (stream == nullptr) return;
  std::lock_guard lock(log_.mutex_);
  // The events of a captured stream have no times.
  if (log_.clock_ == nullptr || cuda::is_captured(stream)) return;
  span_ = std::make_unique<DeviceSpan>(log_.clock_, stream);
}

void CallLog::Entry::follow(const Call& call) {
  followed_ = &call;
  call_.signature = static_cast<int64_t>(call.signature);
  std::lock_guard lock(log_.mutex_);
  LoggedCall& logged = log_.last_[static_cast<size_t>(call_.number) % kLast];
  if (logged.number == call_.number) logged.signature = call_.signature;
}

int64_t CallLog::channel(Key key, const std::vector<int>& ranks, Lane lane, int tag) {
  const auto [found, added] = channel_of_.try_emplace(key, static_cast<int64_t>(channels_.size()));
  if (added) channels_.push_back({ranks, lane, tag, 0});
  return found->second;
}

int64_t CallLog::name(std::string_view text) {
  // A node's name stays at its address; that is faster to find than the text.
  const auto at = name_at_.find(text.data());
  if (at != name_at_.end() && names_[static_cast<size_t>(at->second)] == text) return at->second;
  const auto [found, added] =
      name_of_.try_emplace(std::string(text), static_cast<int64_t>(names_.size()));
  if (added) names_.emplace_back(text);
  name_at_[text.data()] = found->second;
  return found->second;
}

void CallLog::begin(LoggedCall& call, std::string_view what, Key key,
                    const std::vector<int>& ranks, Lane lane, int tag) {
  std::lock_guard lock(mutex_);
  call.number = calls_++;
  call.name = name(what);
  call.channel = channel(key, ranks, lane, tag);
  call.place = channels_[static_cast<size_t>(call.channel)].calls++;
  call.begin = now_ns();
  last_[static_cast<size_t>(call.number) % kLast] = call;
}

void CallLog::end(const LoggedCall& call, std::unique_ptr<DeviceSpan> span) {
  std::lock_guard lock(mutex_);
  LoggedCall& logged = last_[static_cast<size_t>(call.number) % kLast];
  if (logged.number == call.number) logged = call;
  if (keeps_) kept_.push_back({call, std::move(span)});
  if (call.behind == 0 && call.kind != CallKind::kRecv) foreground_ns_ += call.end - call.begin;
}

int64_t CallLog::foreground_ns() const {
  std::lock_guard lock(mutex_);
  return foreground_ns_;
}

void CallLog::keep(bool all, std::shared_ptr<DeviceClock> clock) {
  std::lock_guard lock(mutex_);
  keeps_ = all;
  kept_.clear();
  clock_ = std::move(clock);
}

std::vector<LoggedCall> CallLog::take() {
  std::vector<Kept> kept;
  std::shared_ptr<DeviceClock> clock;
  {
    std::lock_guard lock(mutex_);
    kept = std::exchange(kept_, {});
    clock = std::exchange(clock_, nullptr);
  }
  if (clock != nullptr) clock->stop();
  std::vector<LoggedCall> found;
  for (auto& [call, span] : kept) {
    if (span != nullptr) {
      call.begin = span->begin_ns();
      call.end = span->end_ns();
      call.met = kOnDevice;
    }
    found.push_back(call);
  }
  return found;
}

std::string CallLog::tables() const {
  std::lock_guard lock(mutex_);
  return "{" + tables_locked() + "}";
}

std::string CallLog::tables_locked() const {
  std::string out = "\"names\":[";
  for (size_t i = 0; i < names_.size(); ++i) {
    if (i != 0) out += ',';
    quote(out, names_[i]);
  }
  out += "],\"channels\":[";
  for (size_t i = 0; i < channels_.size(); ++i) {
    const Channel& c = channels_[i];
    if (i != 0) out += ',';
    out += "{\"ranks\":[";
    for (size_t r = 0; r < c.ranks.size(); ++r) {
      if (r != 0) out += ',';
      out += std::to_string(c.ranks[r]);
    }
    out += "],\"lane\":" + std::to_string(static_cast<int>(c.lane)) +
           ",\"tag\":" + std::to_string(c.tag) + "}";
  }
  return out + "]";
}

void CallLog::set_file(std::string path) {
  std::lock_guard lock(mutex_);
  path_ = std::move(path);
  failed_ = false;
}

void CallLog::save(std::string_view reason, bool fails) noexcept {
  try {
    std::lock_guard lock(mutex_);
    if (path_.empty() || failed_) return;
    failed_ = fails;
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    std::string out = "{\"rank\":" + std::to_string(rank_) + ",\"size\":" + std::to_string(size_) +
                      ",\"process\":" + std::to_string(getpid()) + ",\"host\":";
    quote(out, host);
    out += ",\"reason\":";
    quote(out, reason);
    out += ",\"time_ns\":" + std::to_string(now_ns()) + ",\"wall_ns\":" + std::to_string(wall_ns()) +
           "," + tables_locked() + ",\"calls\":[";
    const size_t known = std::min(static_cast<size_t>(calls_), kLast);
    for (size_t i = 0; i < known; ++i) {
      if (i != 0) out += ',';
      out += '\n';
      row(out, last_[(static_cast<size_t>(calls_) - known + i) % kLast]);
    }
    out += "]}\n";
    const std::string part = path_ + ".part";
    const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
    std::error_code ignored;
    if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
    std::FILE* file = std::fopen(part.c_str(), "w");
    if (file == nullptr) return;
    const bool complete = std::fwrite(out.data(), 1, out.size(), file) == out.size();
    if (std::fclose(file) != 0 || !complete || std::rename(part.c_str(), path_.c_str()) != 0) {
      std::remove(part.c_str());
    } else if (fails) {
      std::fprintf(stderr, "    which rank is behind: onnxpar diagnose %s\n", folder.c_str());
      std::fflush(stderr);
    }
  } catch (const std::exception&) {
    // Out of memory; the failure itself is reported elsewhere.
  }
}

}  // namespace onnxpar
