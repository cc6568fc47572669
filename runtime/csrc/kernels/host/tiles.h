// Products of matrices that stay in a cache. Only simd.cc includes this file, once for each
// instruction set and inside its own namespace.

// Elements of B are packed in panels of 64 bytes of columns: a panel has one row of them for each k.
template <class T>
constexpr size_t kPanel = 64 / sizeof(T);

// Half a row of a panel: one register of AVX2, two of SSE2.
template <class T>
struct HalfOf {
  typedef T Type __attribute__((vector_size(32), aligned(alignof(T)), may_alias));
};
template <class T>
using Half = typename HalfOf<T>::Type;

// Rows of C that are computed together: 2 * kTileRows sums and what they need fit into 16 registers.
constexpr size_t kTileRows = 6;
// Rows of a panel that are read again and again, so that they stay in the first cache: 16 KiB.
constexpr size_t kDepth = 256;

template <class T>
void pack(T* to, const T* b, size_t row, size_t column, size_t k, size_t n) {
  constexpr size_t kWidth = kPanel<T>;
  for (size_t begin = 0; begin < n; begin += kWidth) {
    const size_t width = n - begin < kWidth ? n - begin : kWidth;
    const T* from = b + begin * column;
    if (width < kWidth) {
      for (size_t i = 0; i < k * kWidth; ++i) to[i] = T(0);
    }
    if (column == 1 && width == kWidth) {
      for (size_t i = 0; i < k; ++i) memcpy(to + i * kWidth, from + i * row, sizeof(T) * kWidth);
    } else if (column == 1) {
      for (size_t i = 0; i < k; ++i) {
        for (size_t j = 0; j < width; ++j) to[i * kWidth + j] = from[i * row + j];
      }
    } else {
      for (size_t j = 0; j < width; ++j) {
        for (size_t i = 0; i < k; ++i) to[i * kWidth + j] = from[i * row + j * column];
      }
    }
    to += k * kWidth;
  }
}

template <class T, size_t kRows>
inline __attribute__((always_inline)) void tile(T* c, size_t c_row, const T* a, size_t a_row,
                                                size_t a_column, const T* panel, size_t k,
                                                size_t width, bool add) {
  constexpr size_t kHalf = kPanel<T> / 2;
  Half<T> sums[kRows][2] = {};
  for (size_t p = 0; p < k; ++p) {
    const Half<T> left = *reinterpret_cast<const Half<T>*>(panel);
    const Half<T> right = *reinterpret_cast<const Half<T>*>(panel + kHalf);
#pragma GCC unroll 6
    for (size_t i = 0; i < kRows; ++i) {
      const T factor = a[i * a_row];
      sums[i][0] += factor * left;
      sums[i][1] += factor * right;
    }
    a += a_column;
    panel += kPanel<T>;
  }
#pragma GCC unroll 6
  for (size_t i = 0; i < kRows; ++i) {
    T* row = c + i * c_row;
    if (width == kPanel<T>) {
      Half<T>* halves[2] = {reinterpret_cast<Half<T>*>(row),
                            reinterpret_cast<Half<T>*>(row + kHalf)};
      *halves[0] = add ? *halves[0] + sums[i][0] : sums[i][0];
      *halves[1] = add ? *halves[1] + sums[i][1] : sums[i][1];
    } else {
      for (size_t j = 0; j < width; ++j) {
        const T sum = sums[i][j / kHalf][j % kHalf];
        row[j] = add ? row[j] + sum : sum;
      }
    }
  }
}

template <class T>
void product(T* c, size_t c_row, const T* a, size_t a_row, size_t a_column, const T* packed,
             size_t packed_k, size_t m, size_t n, size_t k, bool add) {
  for (size_t from = 0; from < k || from == 0; from += kDepth) {
    const size_t depth = k - from < kDepth ? k - from : kDepth;
    const bool sum = add || from > 0;
    for (size_t begin = 0; begin < n; begin += kPanel<T>) {
      const size_t width = n - begin < kPanel<T> ? n - begin : kPanel<T>;
      const T* panel = packed + begin * packed_k + from * kPanel<T>;
      for (size_t row = 0; row < m; row += kTileRows) {
        T* to = c + row * c_row + begin;
        const T* left = a + row * a_row + from * a_column;
        switch (m - row) {
          case 1: tile<T, 1>(to, c_row, left, a_row, a_column, panel, depth, width, sum); break;
          case 2: tile<T, 2>(to, c_row, left, a_row, a_column, panel, depth, width, sum); break;
          case 3: tile<T, 3>(to, c_row, left, a_row, a_column, panel, depth, width, sum); break;
          case 4: tile<T, 4>(to, c_row, left, a_row, a_column, panel, depth, width, sum); break;
          case 5: tile<T, 5>(to, c_row, left, a_row, a_column, panel, depth, width, sum); break;
          default: tile<T, 6>(to, c_row, left, a_row, a_column, panel, depth, width, sum);
        }
      }
    }
  }
}

// x = softmax(scale x + bias), a row of n elements; `bias_step` is 0 if it has one element.
template <class T>
void softmax_scores(T* x, const T* bias, size_t bias_step, T scale, size_t n) {
  T most = x[0] * scale + bias[0];
  if (bias_step != 0) {
#pragma omp simd reduction(max : most)
    for (size_t i = 0; i < n; ++i) {
      const T score = x[i] * scale + bias[i];
      x[i] = score;
      most = score > most ? score : most;
    }
  } else {
    const T every = *bias;
#pragma omp simd reduction(max : most)
    for (size_t i = 0; i < n; ++i) {
      const T score = x[i] * scale + every;
      x[i] = score;
      most = score > most ? score : most;
    }
  }
#pragma omp simd
  for (size_t i = 0; i < n; ++i) x[i] = exponential(x[i] - most);
  const T share = T(1) / blocked_sum<T>(n, [=](size_t i) { return x[i]; });
#pragma omp simd
  for (size_t i = 0; i < n; ++i) x[i] *= share;
}
