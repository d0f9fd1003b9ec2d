// The arithmetic of tree attention on float32 tiles; what a tile holds is tree_attention.cpp's business.
#pragma once
#include <array>
#include <limits>

#include "esp/cpu.h"

namespace esp {
namespace {

constexpr int64_t kChunk = 64;  // slots of a softmax step
constexpr int64_t kAhead = 16;   // rows that are prefetched; hides the latency of one row a page
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------- rows of a cache to float32

// Offsets are in elements; n + kAhead of them are read.
template <typename T>
ESP_INLINE void copy_rows(const T* from, const int64_t* offsets, int64_t n, int64_t dim, float* to) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t d = 0; d < dim; d += 16) {
      store16(to + i * dim + d, load16(from + offsets[i] + d));
      __builtin_prefetch(from + offsets[i + kAhead] + d);
    }
}

#define ESP_COPY(T)                                                                                       \
  ESP_CLONES void copy(const T* from, const int64_t* offsets, int64_t n, int64_t dim, float* to) { \
    copy_rows(from, offsets, n, dim, to);                                                                 \
  }
ESP_COPY(float)
ESP_COPY(bf16)
ESP_COPY(f16)
#undef ESP_COPY

// ---------------------------------------------------------------- transpose

typedef int32_t i32x8 __attribute__((vector_size(32)));

#if defined(__clang__)
#define ESP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ESP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, i32x8{__VA_ARGS__})
#endif

// keys [lanes, dim] to panel [dim, 64]; lanes a multiple of 8.
ESP_CLONES void transpose(const float* keys, int64_t lanes, int64_t dim, float* panel) {
  for (int64_t lane = 0; lane < lanes; lane += 8) {
    for (int64_t d = 0; d < dim; d += 8) {
      f32x8 x[8], y[8];
      for (int i = 0; i < 8; ++i) std::memcpy(&x[i], keys + (lane + i) * dim + d, sizeof x[i]);
      for (int i = 0; i < 8; i += 2) {
        y[i] = ESP_SHUFFLE(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        y[i + 1] = ESP_SHUFFLE(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
      }
      for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; ++j) {
          x[i + 2 * j] = ESP_SHUFFLE(y[i + j], y[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
          x[i + 2 * j + 1] = ESP_SHUFFLE(y[i + j], y[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
      }
      for (int i = 0; i < 4; ++i) {
        y[i] = ESP_SHUFFLE(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        y[i + 4] = ESP_SHUFFLE(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
      }
      for (int i = 0; i < 8; ++i) std::memcpy(panel + (d + i) * kChunk + lane, &y[i], sizeof y[i]);
    }
  }
}

#undef ESP_SHUFFLE

// ---------------------------------------------------------------- multiply

template <int R, int C>
ESP_INLINE void multiply_tile(const float* a, int64_t lda, const float* b, int64_t ldb, const int32_t* order,
                              int64_t n, float* c, int64_t ldc) {
  f32x16 sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) sums[r][j] = load16(c + r * ldc + j * 16);
  for (int64_t k = 0; k < n; ++k) {
    const float* row = b + order[k] * ldb;
    f32x16 y[C];
    for (int j = 0; j < C; ++j) y[j] = load16(row + j * 16);
    for (int r = 0; r < R; ++r) {
      const float x = a[r * lda + k];
      for (int j = 0; j < C; ++j) sums[r][j] += x * y[j];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) store16(c + r * ldc + j * 16, sums[r][j]);
}

template <int C>
ESP_INLINE void multiply_columns(const float* a, int64_t lda, const float* b, int64_t ldb,
                                 const int32_t* order, int64_t n, float* c, int64_t ldc, int64_t rows) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) multiply_tile<4, C>(a + r * lda, lda, b, ldb, order, n, c + r * ldc, ldc);
  a += r * lda;
  c += r * ldc;
  switch (rows - r) {
    case 3: return multiply_tile<3, C>(a, lda, b, ldb, order, n, c, ldc);
    case 2: return multiply_tile<2, C>(a, lda, b, ldb, order, n, c, ldc);
    case 1: return multiply_tile<1, C>(a, lda, b, ldb, order, n, c, ldc);
  }
}

// c [rows, columns] += a [rows, n] times rows order[0..n) of b: per element one FMA chain over n, in order,
// whatever the tile. columns is a multiple of 16.
ESP_CLONES void multiply(const float* a, int64_t lda, const float* b, int64_t ldb, const int32_t* order,
                         int64_t n, float* c, int64_t ldc, int64_t rows, int64_t columns) {
  int64_t j = 0;
  for (; j + 64 <= columns; j += 64) multiply_columns<4>(a, lda, b + j, ldb, order, n, c + j, ldc, rows);
  switch (columns - j) {
    case 48: return multiply_columns<3>(a, lda, b + j, ldb, order, n, c + j, ldc, rows);
    case 32: return multiply_columns<2>(a, lda, b + j, ldb, order, n, c + j, ldc, rows);
    case 16: return multiply_columns<1>(a, lda, b + j, ldb, order, n, c + j, ldc, rows);
  }
}

// ---------------------------------------------------------------- softmax

// What is known of a query's softmax: its maximum, the sum of e^(score - maximum), and the values' sum.
struct Sums {
  float* max;    // [queries]
  float* sum;    // [queries]
  float* value;  // [queries, dim]
};

ESP_INLINE float exp1(float x) { return exp16(splat(x))[0]; }

// Lanes [64 - i, 64 - i + 16) are the mask of slots [0, 16) below i; without compares, which GCC splits up here.
constexpr auto kBelow = [] {
  std::array<int32_t, 2 * kChunk> below{};
  for (size_t i = 0; i < size_t(kChunk); ++i) below[i] = -1;
  return below;
}();

// -inf in the lanes of x, slots [first, first + 16), that are not in [low, high).
ESP_INLINE f32x16 keep(f32x16 x, int64_t first, int64_t low, int64_t high) {
  i32x16 bits, out, in;
  std::memcpy(&out, kBelow.data() + kChunk - low + first, sizeof out);
  std::memcpy(&in, kBelow.data() + kChunk - high + first, sizeof in);
  std::memcpy(&bits, &x, sizeof bits);
  in &= ~out;
  bits = (bits & in) | (~in & int32_t(0xff800000));
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

ESP_INLINE void scale_row(float* x, float by, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) store16(x + i, load16(x + i) * by);
}

ESP_CLONES void clear(Sums sums, int64_t queries, int64_t dim) {
  for (int64_t i = 0; i < queries; ++i) sums.max[i] = kNothing, sums.sum[i] = 0;
  std::memset(sums.value, 0, size_t(queries * dim) * sizeof(float));
}

// One online step: products [queries, 64] become e^(score - maximum). Query i sees slots [low, high) of block
// row i / group, every slot if these are null; what it does not see counts as -inf.
ESP_CLONES void soften(float* products, float scale, float softcap, const int32_t* low, const int32_t* high,
                       int64_t queries, int64_t group, Sums sums, int64_t dim) {
  for (int64_t i = 0; i < queries; ++i) {
    float* row = products + i * kChunk;
    f32x16 x[4];
    for (int j = 0; j < 4; ++j) x[j] = load16(row + j * 16) * scale;
    if (softcap > 0)
      for (int j = 0; j < 4; ++j) x[j] = tanh16(x[j] / softcap) * softcap;
    if (low != nullptr)
      for (int j = 0; j < 4; ++j) x[j] = keep(x[j], j * 16, low[i / group], high[i / group]);
    const float top = max_of16(max16(max16(x[0], x[1]), max16(x[2], x[3])));
    const float old = sums.max[i], max = top > old ? top : old;
    // With nothing seen so far every e^(-inf - 0) is 0.
    const float shift = max == kNothing ? 0.0f : max;
    for (int j = 0; j < 4; ++j) {
      x[j] = exp16(x[j] - shift);
      store16(row + j * 16, x[j]);
    }
    if (max != old) {
      const float fade = exp1(old - max);
      sums.sum[i] *= fade;
      scale_row(sums.value + i * dim, fade, dim);
      sums.max[i] = max;
    }
    sums.sum[i] += sum16((x[0] + x[1]) + (x[2] + x[3]));
  }
}

// `into` takes `part` in. Exact where either saw nothing.
ESP_CLONES void merge(Sums into, Sums part, int64_t queries, int64_t dim) {
  for (int64_t i = 0; i < queries; ++i) {
    if (part.sum[i] == 0) continue;
    const float max = part.max[i] > into.max[i] ? part.max[i] : into.max[i];
    const float mine = exp1(into.max[i] - max), other = exp1(part.max[i] - max);
    float* x = into.value + i * dim;
    const float* y = part.value + i * dim;
    for (int64_t d = 0; d < dim; d += 16) store16(x + d, load16(x + d) * mine + load16(y + d) * other);
    into.sum[i] = into.sum[i] * mine + part.sum[i] * other;
    into.max[i] = max;
  }
}

// A logit without a value joins the softmax.
ESP_CLONES void sink(Sums into, int64_t i, float logit, int64_t dim) {
  const float max = logit > into.max[i] ? logit : into.max[i];
  const float fade = exp1(into.max[i] - max);
  into.sum[i] = into.sum[i] * fade + exp1(logit - max);
  into.max[i] = max;
  scale_row(into.value + i * dim, fade, dim);
}

#define ESP_FINISH(T)                                                                  \
  ESP_CLONES void divide(const float* x, float by, T* out, int64_t dim) {       \
    for (int64_t d = 0; d < dim; d += 16) store16(out + d, load16(x + d) / by); \
  }
ESP_FINISH(float)
ESP_FINISH(bf16)
ESP_FINISH(f16)
#undef ESP_FINISH

}  // namespace
}  // namespace esp
