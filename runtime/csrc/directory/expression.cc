#include "directory/expression.h"

#include <cctype>
#include <numeric>
#include <vector>

namespace onnxpar {
namespace {

__extension__ using Wide = __int128;  // products of two 64-bit integers

constexpr int kDepth = 200;
constexpr int64_t kMaxExponent = 64;

struct Rational {
  Wide over;
  Wide under;
};

// Not an expression, but perhaps a name.
struct NotAnExpression {};

Wide magnitude(Wide n) { return n < 0 ? -n : n; }

class Parser {
 public:
  // Without `values`, every symbol is 1: only the grammar is of interest.
  Parser(const std::string& text, const Values* values) : text_(text), values_(values) {}

  Rational all() {
    const Rational found = sum(0);
    if (peek() != '\0' || at_ < text_.size()) throw NotAnExpression();
    return found;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw std::runtime_error("'" + text_ + "' " + why);
  }

  Rational made(Wide over, Wide under) const {
    if (under == 0) fail("divides by zero");
    const Wide limit = static_cast<Wide>(INT64_MAX);
    Wide a = magnitude(over);
    Wide b = magnitude(under);
    while (b != 0) std::swap(a %= b, b);
    if (a == 0) a = 1;
    if (under < 0) a = -a;
    const Rational result{over / a, under / a};
    if (magnitude(result.over) > limit || result.under > limit) fail("is beyond 64 bits");
    return result;
  }

  char peek() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(const char* word) {
    peek();
    const std::string wanted = word;
    if (text_.compare(at_, wanted.size(), wanted) != 0) return false;
    at_ += wanted.size();
    return true;
  }

  static Wide floor_of(const Rational& r) {
    Wide quotient = r.over / r.under;
    if (r.over % r.under != 0 && r.over < 0) --quotient;
    return quotient;
  }
  Rational plus(const Rational& a, const Rational& b, int sign) const {
    return made(a.over * b.under + sign * (b.over * a.under), a.under * b.under);
  }
  Rational times(const Rational& a, const Rational& b) const {
    return made(a.over * b.over, a.under * b.under);
  }
  Rational divided(const Rational& a, const Rational& b) const {
    return made(a.over * b.under, a.under * b.over);
  }
  Rational remainder(const Rational& a, const Rational& b) const {
    return plus(a, times({floor_of(divided(a, b)), 1}, b), -1);
  }

  Rational sum(int depth) {
    if (depth > kDepth) fail("is nested too deeply");
    Rational value = product(depth);
    for (;;) {
      if (take("+")) {
        value = plus(value, product(depth), 1);
      } else if (take("-")) {
        value = plus(value, product(depth), -1);
      } else {
        return value;
      }
    }
  }

  Rational product(int depth) {
    Rational value = signed_value(depth);
    for (;;) {
      if (take("//")) {
        value = {floor_of(divided(value, signed_value(depth))), 1};
      } else if (take("/")) {
        value = divided(value, signed_value(depth));
      } else if (take("*")) {
        value = times(value, signed_value(depth));
      } else if (take("%")) {
        value = remainder(value, signed_value(depth));
      } else {
        return value;
      }
    }
  }

  Rational signed_value(int depth) {
    if (depth > kDepth) fail("is nested too deeply");
    if (take("-")) return plus({0, 1}, signed_value(depth + 1), -1);
    const Rational base = atom(depth);
    if (!take("**")) return base;
    const Rational exponent = signed_value(depth + 1);
    if (exponent.under != 1 || exponent.over < 0 || exponent.over > kMaxExponent) {
      fail("has an exponent that is not an integer from 0 to 64");
    }
    Rational value{1, 1};
    for (int64_t i = 0; i < static_cast<int64_t>(exponent.over); ++i) value = times(value, base);
    return value;
  }

  Rational atom(int depth) {
    if (take("(")) {
      const Rational value = sum(depth + 1);
      if (!take(")")) throw NotAnExpression();
      return value;
    }
    const char first = peek();
    if (std::isdigit(static_cast<unsigned char>(first)) != 0) {
      Wide number = 0;
      while (at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_])) != 0) {
        number = made(number * 10 + (text_[at_++] - '0'), 1).over;
      }
      return {number, 1};
    }
    std::string name;
    while (at_ < text_.size() && is_of_name(text_[at_])) name += text_[at_++];
    if (name.empty()) throw NotAnExpression();
    if (take("(")) return call(name, depth + 1);
    if (values_ == nullptr) return {1, 1};
    const auto found = values_->find(name);
    if (found == values_->end()) {
      throw UnknownSymbol("symbol '" + name + "' in '" + text_ + "' has no value");
    }
    return {found->second, 1};
  }

  // Letters of other scripts too.
  static bool is_of_name(char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || (c & 0x80) != 0;
  }

  Rational call(std::string name, int depth) {
    for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    std::vector<Rational> given{sum(depth)};
    while (take(",")) given.push_back(sum(depth));
    if (!take(")")) throw NotAnExpression();
    if (name == "min" || name == "max") {
      Rational best = given[0];
      for (const Rational& r : given) {
        const Wide difference = plus(r, best, -1).over;
        if (name == "min" ? difference < 0 : difference > 0) best = r;
      }
      return best;
    }
    if (name == "mod" && given.size() == 2) return remainder(given[0], given[1]);
    if (given.size() == 1 && name == "floor") return {floor_of(given[0]), 1};
    if (given.size() == 1 && (name == "ceil" || name == "ceiling")) {
      return {-floor_of({-given[0].over, given[0].under}), 1};
    }
    fail("has an unknown function, or one with wrong arguments");
  }

  const std::string& text_;
  const Values* values_;
  size_t at_ = 0;
};

}  // namespace

int64_t evaluate(const std::string& text, const Values& values) {
  // A symbol may have any text as its name.
  const auto found = values.find(text);
  if (found != values.end()) return found->second;
  try {
    const Rational value = Parser(text, &values).all();
    if (value.under != 1) throw std::runtime_error("'" + text + "' is not an integer");
    return static_cast<int64_t>(value.over);
  } catch (const NotAnExpression&) {
    throw UnknownSymbol("symbol '" + text + "' has no value");
  }
}

std::optional<std::string> bare_name(const std::string& text) {
  bool name = !text.empty() && std::isdigit(static_cast<unsigned char>(text[0])) == 0;
  for (const char c : text) {
    name = name && (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || (c & 0x80) != 0);
  }
  if (name) return text;
  try {
    Parser(text, nullptr).all();
    return std::nullopt;
  } catch (const NotAnExpression&) {
    return text;
  } catch (const std::runtime_error&) {
    return std::nullopt;
  }
}

}  // namespace onnxpar
