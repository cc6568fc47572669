#include "directory/json.h"

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <stdexcept>

namespace onnxpar {
namespace {

constexpr int kDepth = 100;

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Json document() {
    Json value = read(0);
    space();
    if (at_ != text_.size()) fail("the end");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& expected) const {
    throw std::runtime_error("not JSON: expected " + expected + " at byte " + std::to_string(at_));
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  void space() {
    while (at_ < text_.size() && std::string(" \t\r\n").find(text_[at_]) != std::string::npos) ++at_;
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void want(const char* word) {
    for (const char* c = word; *c != '\0'; ++c) {
      if (!take(*c)) fail(word);
    }
  }

  Json read(int depth) {
    if (depth > kDepth) fail("fewer levels");
    space();
    Json value;
    switch (peek()) {
      case '{':
      case '[':
        return nested(depth);
      case '"':
        value.kind = Json::Kind::kString;
        value.text = string();
        return value;
      case 't':
      case 'f':
        value.kind = Json::Kind::kBool;
        value.truth = peek() == 't';
        want(value.truth ? "true" : "false");
        return value;
      case 'n':
        want("null");
        return value;
      default:
        return number();
    }
  }

  Json nested(int depth) {
    Json value;
    const bool object = peek() == '{';
    const char end = object ? '}' : ']';
    value.kind = object ? Json::Kind::kObject : Json::Kind::kList;
    ++at_;
    space();
    if (take(end)) return value;
    do {
      if (object) {
        space();
        value.keys.push_back(string());
        space();
        want(":");
      }
      value.items.push_back(read(depth + 1));
      space();
    } while (take(','));
    if (!take(end)) fail(std::string("',' or '") + end + "'");
    return value;
  }

  unsigned code_unit() {
    unsigned unit = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = peek();
      const std::string digits = "0123456789abcdef";
      const size_t digit = digits.find(static_cast<char>(c >= 'A' && c <= 'F' ? c + 32 : c));
      if (c == '\0' || digit == std::string::npos) fail("4 hexadecimal digits");
      unit = unit * 16 + static_cast<unsigned>(digit);
      ++at_;
    }
    return unit;
  }

  void utf8(std::string* to, unsigned code) {
    if (code < 0x80) {
      *to += static_cast<char>(code);
      return;
    }
    const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    const unsigned mark[] = {0, 0xc0, 0xe0, 0xf0};
    *to += static_cast<char>(mark[more] | (code >> (6 * more)));
    for (int i = more - 1; i >= 0; --i) *to += static_cast<char>(0x80 | ((code >> (6 * i)) & 0x3f));
  }

  std::string string() {
    std::string found;
    if (!take('"')) fail("a string");
    while (!take('"')) {
      if (at_ >= text_.size()) fail("the end of a string");
      if (!take('\\')) {
        found += text_[at_++];
        continue;
      }
      const char escape = peek();
      ++at_;
      const std::string from = "\"\\/bfnrt";
      const char to[] = "\"\\/\b\f\n\r\t";
      const size_t index = from.find(escape);
      if (escape == 'u') {
        unsigned code = code_unit();
        if (code >= 0xd800 && code < 0xdc00) {
          want("\\u");
          code = 0x10000 + ((code - 0xd800) << 10) + (code_unit() - 0xdc00);
        }
        utf8(&found, code);
      } else if (escape != '\0' && index != std::string::npos) {
        found += to[index];
      } else {
        fail("an escape sequence");
      }
    }
    return found;
  }

  Json number() {
    Json value;
    const char* begin = text_.c_str() + at_;
    char* end = nullptr;
    errno = 0;
    value.kind = Json::Kind::kInteger;
    value.integer = std::strtoll(begin, &end, 10);
    const char next = *end;
    if (errno != 0 || next == '.' || next == 'e' || next == 'E' || end == begin) {
      value.kind = Json::Kind::kReal;
      value.real = std::strtod(begin, &end);
    }
    if (end == begin) fail("a value");
    at_ += static_cast<size_t>(end - begin);
    return value;
  }

  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace

const Json* Json::find(const std::string& key) const {
  for (size_t i = 0; i < keys.size(); ++i) {
    if (keys[i] == key) return &items[i];
  }
  return nullptr;
}

Json parse_json(const std::string& text) { return Parser(text).document(); }

void Field::fail(const std::string& expected) const {
  throw std::runtime_error(place_ + ": expected " + expected);
}

bool Field::has(const char* key) const {
  const Json* found = json_->find(key);
  return found != nullptr && found->kind != Json::Kind::kNull;
}

Field Field::operator[](const char* key) const {
  const Json* found = json_->find(key);
  if (found == nullptr) fail(std::string("the key '") + key + "'");
  return at(*found, key);
}

Field Field::at(const Json& json, const std::string& key) const {
  return {json, place_ + key_mark_ + key, "."};
}

std::vector<Field> Field::list() const {
  if (json_->kind != Json::Kind::kList) fail("a list");
  std::vector<Field> found;
  for (const Json& item : json_->items) {
    found.emplace_back(item, place_ + "[" + std::to_string(found.size()) + "]", ".");
  }
  return found;
}

std::vector<std::pair<std::string, Field>> Field::entries() const {
  if (json_->kind != Json::Kind::kObject) fail("an object");
  std::vector<std::pair<std::string, Field>> found;
  for (size_t i = 0; i < json_->items.size(); ++i) {
    found.emplace_back(json_->keys[i], at(json_->items[i], json_->keys[i]));
  }
  return found;
}

int64_t Field::integer() const {
  if (json_->kind != Json::Kind::kInteger) fail("an integer");
  return json_->integer;
}

bool Field::truth() const {
  if (json_->kind != Json::Kind::kBool) fail("true or false");
  return json_->truth;
}

const std::string& Field::text() const {
  if (json_->kind != Json::Kind::kString) fail("a string");
  return json_->text;
}

std::vector<int> Field::indices() const {
  std::vector<int> found;
  for (const Field& field : list()) {
    const int64_t index = field.integer();
    if (index < 0 || index > INT_MAX) field.fail("an index");
    found.push_back(static_cast<int>(index));
  }
  return found;
}

std::string Field::size() const {
  return json_->kind == Json::Kind::kInteger ? std::to_string(json_->integer) : text();
}

}  // namespace onnxpar
