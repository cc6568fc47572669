// Flash attention (Dao et al., 2022) in the form that suits a processor: the scores of a block of
// queries against all keys stay in a cache, so that each row's softmax is computed at once, and no
// statistics need to be kept. The gradient computes the scores again.
#include <algorithm>
#include <memory>

#include "kernels/attention.h"
#include "kernels/host/simd.h"

namespace onnxpar {
namespace {

// Bytes of one block of scores, as far as it has at least kLeastRows rows: half of a second cache.
constexpr size_t kBlockBytes = size_t{1} << 18;
constexpr size_t kLeastRows = 24;
constexpr size_t kMostRows = 96;
// A number that a mask puts where a query does not see a key: with any score, its exponential is 0.
constexpr double kHidden = -1e30;
// Rows of scores begin in different sets of a cache, also if their number is a power of two.
constexpr size_t kRowPad = 16;

template <class T>
using Scratch = std::unique_ptr<T[]>;
template <class T>
Scratch<T> scratch(size_t count) {
  return Scratch<T>(new T[std::max<size_t>(count, 1)]);
}

size_t block_rows(size_t keys, size_t width) {
  const size_t rows = kBlockBytes / std::max<size_t>(keys * width, 1);
  return std::clamp(rows / kLeastRows * kLeastRows, kLeastRows, kMostRows);
}

// The keys that a block of queries sees: from `begin` to before `end`.
struct Keys {
  size_t begin, end;
};

// Each operand as T, and what the products of one head need of them.
template <class T>
struct Problem {
  const Attention::Operands& o;
  const Attention::Form form;
  const T scale;
  const T hidden;
  const bool masked = form == Attention::Form::kMasked;
  const Loops<T>& loops = simd().of<T>();
  Reader<T> q{o.q.tensor, "q"};
  Reader<T> kt{o.kt.tensor, "kt"};
  Reader<T> v{o.v.tensor, "v"};
  Reader<T> bias{masked ? Tensor{nullptr, o.q.tensor.type, {0}} : o.mask.tensor, "bias"};
  const bool* const visible = static_cast<const bool*>(o.mask.tensor.data);
  const size_t rows = block_rows(o.t, sizeof(T));
  const size_t row = o.t + kRowPad;

  // Where the part of the mask for a query begins.
  size_t mask_of(size_t head, size_t query) const {
    return o.mask.begin[head] + query * o.mask_row;
  }

  bool sees(size_t mask, size_t key) const {
    const size_t at = mask + key * o.mask_column;
    if (masked) return visible[at] || !(hidden <= T(kHidden));
    return !(bias.data()[at] <= T(kHidden));
  }

  bool sees_any(size_t mask, size_t begin, size_t end) const {
    for (size_t key = begin; key < end; ++key) {
      if (sees(mask, key)) return true;
    }
    return false;
  }

  // The keys that some of `count` queries see, from a multiple of a panel's width on. All keys if a
  // query sees none, since its shares are then equal, or no numbers.
  Keys seen(size_t head, size_t first, size_t count) const {
    const Keys all{0, o.t};
    if (o.mask_column == 0) return all;
    Keys found{o.t, 0};
    for (size_t i = count; i-- > 0;) {
      const size_t mask = mask_of(head, first + i);
      size_t end = o.t;
      while (end > found.end && !sees(mask, end - 1)) --end;
      size_t begin = 0;
      while (begin < std::min(found.begin, end) && !sees(mask, begin)) ++begin;
      if (end == found.end && !sees_any(mask, begin, end)) return all;
      found = {std::min(found.begin, begin), std::max(found.end, end)};
      if (o.mask_row == 0) break;
    }
    constexpr size_t kWidth = 64 / sizeof(T);
    return {found.begin / kWidth * kWidth, found.end};
  }

  // The shares of the keys for `count` queries, in rows of `shares`.
  void shares_of(T* shares, size_t head, size_t first, size_t count, Keys keys,
                 const T* packed_kt) const {
    const size_t n = keys.end - keys.begin;
    loops.product(shares, row, q.data() + o.q.begin[head] + first * o.d, o.d, 1,
                  packed_kt + packed_size<T>(o.d, keys.begin), o.d, count, n, o.d, false);
    for (size_t i = 0; i < count; ++i) {
      T* of_row = shares + i * row;
      const size_t mask = mask_of(head, first + i) + keys.begin * o.mask_column;
      if (masked) {
        for (size_t j = 0; j < n; ++j) {
          of_row[j] = visible[mask + j * o.mask_column] ? of_row[j] * scale : hidden;
        }
        const T none = 0;
        loops.softmax_scores(of_row, &none, 0, 1, n);
      } else {
        loops.softmax_scores(of_row, bias.data() + mask, o.mask_column, scale, n);
      }
      const bool no_number = of_row[0] != of_row[0];
      if (no_number && form == Attention::Form::kSafe) std::fill_n(of_row, n, T(0));
    }
  }

  // The gradient of the scores, from that of the shares, in its place.
  void slopes_of(T* slopes, const T* shares, size_t head, size_t first, size_t count,
                 Keys keys) const {
    const size_t n = keys.end - keys.begin;
    for (size_t i = 0; i < count; ++i) {
      T* of_row = slopes + i * row;
      loops.softmax_grad(of_row, of_row, shares + i * row, n);
      if (!masked) continue;
      const size_t mask = mask_of(head, first + i) + keys.begin * o.mask_column;
      for (size_t j = 0; j < n; ++j) {
        if (!visible[mask + j * o.mask_column]) of_row[j] = 0;
      }
    }
  }
};

}  // namespace

void Attention::host(const Io& io, const Operands& o) const {
  with_real(o.q.tensor, "q", [&](auto zero) {
    using T = decltype(zero);
    const Problem<T> p{o, form_, static_cast<T>(scale_), static_cast<T>(hidden_)};
    Writer<T> y(o.y);
    if (o.t == 0) std::fill_n(y.data(), o.heads * o.s * o.e, T(0));
    if (o.t != 0 && o.s * o.e != 0) {
      // One piece of work packs keys and values again, which many blocks make up for.
      constexpr size_t kBlocks = 8;
      const size_t span = kBlocks * p.rows;
      const size_t spans = (o.s + span - 1) / span;
      pieces(io, o.heads * spans, 1, [&](size_t index, size_t) {
        const size_t head = index / spans;
        const size_t begin = index % spans * span;
        const size_t end = std::min(o.s, begin + span);
        const auto packed_kt = scratch<T>(packed_size<T>(o.d, o.t));
        const auto packed_v = scratch<T>(packed_size<T>(o.t, o.e));
        const auto shares = scratch<T>(p.rows * p.row);
        p.loops.pack(packed_kt.get(), p.kt.data() + o.kt.begin[head], o.t, 1, o.d, o.t);
        p.loops.pack(packed_v.get(), p.v.data() + o.v.begin[head], o.e, 1, o.t, o.e);
        for (size_t first = begin; first < end; first += p.rows) {
          const size_t count = std::min(p.rows, end - first);
          const Keys keys = p.seen(head, first, count);
          p.shares_of(shares.get(), head, first, count, keys, packed_kt.get());
          p.loops.product(y.data() + (head * o.s + first) * o.e, o.e, shares.get(), p.row, 1,
                          packed_v.get() + packed_size<T>(keys.begin, 1), o.t, count, o.e,
                          keys.end - keys.begin, false);
        }
      });
    }
    y.finish();
  });
}

void AttentionGrad::host(const Io& io, const Operands& o) const {
  with_real(o.q.tensor, "q", [&](auto zero) {
    using T = decltype(zero);
    const Problem<T> p{o, form_, static_cast<T>(scale_), static_cast<T>(hidden_)};
    const Reader<T> dy(o.dy, "dy");
    Writer<T> dq(o.dq);
    Writer<T> dkt(o.dkt);
    Writer<T> dv(o.dv);
    const size_t none = o.t == 0 || o.d == 0 ? o.heads * o.s * o.d : 0;
    if (dq.data() != nullptr) std::fill_n(dq.data(), none, T(0));
    // All queries of a head add to the gradients of its keys and values.
    pieces(io, o.t == 0 ? 0 : o.heads, 1, [&](size_t head, size_t) {
      const T* kt = p.kt.data() + o.kt.begin[head];
      const auto packed_kt = scratch<T>(packed_size<T>(o.d, o.t));
      const auto packed_k = scratch<T>(packed_size<T>(o.t, o.d));
      const auto packed_vt = scratch<T>(packed_size<T>(o.e, o.t));
      const auto packed_q = scratch<T>(packed_size<T>(p.rows, o.d));
      const auto packed_dy = scratch<T>(packed_size<T>(p.rows, o.e));
      const auto shares = scratch<T>(p.rows * p.row);
      const auto slopes = scratch<T>(p.rows * p.row);
      const auto dk = scratch<T>(o.t * o.d);
      const auto dv_unread = scratch<T>(dv.data() == nullptr ? o.t * o.e : 0);
      T* const dv_head = dv.data() == nullptr ? dv_unread.get() : dv.data() + head * o.t * o.e;
      std::fill_n(dk.get(), o.t * o.d, T(0));
      std::fill_n(dv_head, o.t * o.e, T(0));
      p.loops.pack(packed_kt.get(), kt, o.t, 1, o.d, o.t);
      p.loops.pack(packed_k.get(), kt, 1, o.t, o.t, o.d);
      p.loops.pack(packed_vt.get(), p.v.data() + o.v.begin[head], 1, o.e, o.e, o.t);
      for (size_t first = 0; first < o.s; first += p.rows) {
        const size_t count = std::min(p.rows, o.s - first);
        const Keys keys = p.seen(head, first, count);
        const size_t n = keys.end - keys.begin;
        p.shares_of(shares.get(), head, first, count, keys, packed_kt.get());
        const T* from = dy.data() + (head * o.s + first) * o.e;
        // dv += shares^T dy
        p.loops.pack(packed_dy.get(), from, o.e, 1, count, o.e);
        p.loops.product(dv_head + keys.begin * o.e, o.e, shares.get(), 1, p.row, packed_dy.get(),
                        count, n, o.e, count, true);
        // The slopes of the scores: scale * softmax_grad(dy v^T, shares).
        p.loops.product(slopes.get(), p.row, from, o.e, 1,
                        packed_vt.get() + packed_size<T>(o.e, keys.begin), o.e, count, n, o.e,
                        false);
        p.slopes_of(slopes.get(), shares.get(), head, first, count, keys);
        if (dq.data() != nullptr) {
          T* to = dq.data() + (head * o.s + first) * o.d;
          p.loops.product(to, o.d, slopes.get(), p.row, 1,
                          packed_k.get() + packed_size<T>(keys.begin, 1), o.t, count, o.d, n,
                          false);
          for (size_t i = 0; i < count * o.d; ++i) to[i] *= p.scale;
        }
        // dk += slopes^T q
        p.loops.pack(packed_q.get(), p.q.data() + o.q.begin[head] + first * o.d, o.d, 1, count,
                     o.d);
        p.loops.product(dk.get() + keys.begin * o.d, o.d, slopes.get(), 1, p.row, packed_q.get(),
                        count, n, o.d, count, true);
      }
      if (dkt.data() == nullptr) return;
      T* const to = dkt.data() + head * o.d * o.t;
      for (size_t i = 0; i < o.d; ++i) {
        for (size_t j = 0; j < o.t; ++j) to[i * o.t + j] = p.scale * dk[j * o.d + i];
      }
    });
    dq.finish();
    dkt.finish();
    dv.finish();
  });
}

}  // namespace onnxpar
