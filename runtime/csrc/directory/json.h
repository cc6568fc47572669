// JSON as in `manifest.json` and in the headers of safetensors files.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace onnxpar {

struct Json {
  enum class Kind { kNull, kBool, kInteger, kReal, kString, kList, kObject };

  Kind kind = Kind::kNull;
  bool truth = false;
  int64_t integer = 0;
  double real = 0;
  std::string text;
  std::vector<Json> items;
  std::vector<std::string> keys;  // of `items`, if it is an object

  const Json* find(const std::string& key) const;
};

// Throws std::runtime_error with the place in the text.
Json parse_json(const std::string& text);

// A value of a document and its place, for messages: every function throws std::runtime_error with the
// place if the value is not what is asked for.
class Field {
 public:
  // `place`: of the document, such as its file. The document must outlive its fields.
  Field(const Json& json, std::string place, const char* key_mark = ": ")
      : json_(&json), place_(std::move(place)), key_mark_(key_mark) {}

  bool has(const char* key) const;  // and it is not null
  bool is_null() const { return json_->kind == Json::Kind::kNull; }
  Field operator[](const char* key) const;
  std::vector<Field> list() const;
  std::vector<std::pair<std::string, Field>> entries() const;
  int64_t integer() const;
  bool truth() const;
  const std::string& text() const;
  std::vector<int> indices() const;
  // An integer, or an expression.
  std::string size() const;
  [[noreturn]] void fail(const std::string& expected) const;

 private:
  Field at(const Json& json, const std::string& key) const;

  const Json* json_;
  std::string place_;
  const char* key_mark_;  // stands between this place and a key
};

}  // namespace onnxpar
