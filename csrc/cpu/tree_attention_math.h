// The arithmetic of tree attention on float32 tiles; what a tile holds is the business of tree_attention.cpp.
#pragma once
#include <algorithm>
#include <array>
#include <limits>

#include "esp/lanes.h"

namespace esp {
namespace {

constexpr int64_t kChunk = 64;  // slots of a softmax step
constexpr int64_t kAhead = 16;  // rows to prefetch: each may be the first of its memory page
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------- rows to float32

template <int N, typename T>
ESP_INLINE void copy_lanes(const T* from, const int64_t* offsets, int64_t n, int64_t dim, float* to) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t d = 0; d < dim; d += N) {
      Lanes<N>::store(to + i * dim + d, Lanes<N>::load(from + offsets[i] + d));
      __builtin_prefetch(from + offsets[i + kAhead] + d);
    }
}

// to [n, dim]. Offsets are in elements; n + kAhead of them are read.
#define ESP_COPY(T)                                                                                       \
  ESP_PER_WIDTH(copy, (const T* from, const int64_t* offsets, int64_t n, int64_t dim, float* to), \
                (from, offsets, n, dim, to))
ESP_COPY(float)
ESP_COPY(bf16)
ESP_COPY(f16)
#undef ESP_COPY

// ---------------------------------------------------------------- transpose

#if defined(__clang__)
#define ESP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ESP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(mask){__VA_ARGS__})
#endif

ESP_INLINE void transpose_block(const float* from, int64_t from_stride, float* to, int64_t to_stride, Lanes<4>) {
  [[maybe_unused]] Lanes<4>::I mask;
  Lanes<4>::F x[4], y[4];
  for (int i = 0; i < 4; ++i) x[i] = Lanes<4>::load(from + i * from_stride);
  for (int i = 0; i < 2; ++i) {
    y[2 * i] = ESP_SHUFFLE(x[i], x[i + 2], 0, 4, 1, 5);
    y[2 * i + 1] = ESP_SHUFFLE(x[i], x[i + 2], 2, 6, 3, 7);
  }
  for (int i = 0; i < 2; ++i) {
    x[2 * i] = ESP_SHUFFLE(y[i], y[i + 2], 0, 4, 1, 5);
    x[2 * i + 1] = ESP_SHUFFLE(y[i], y[i + 2], 2, 6, 3, 7);
  }
  for (int i = 0; i < 4; ++i) Lanes<4>::store(to + i * to_stride, x[i]);
}

ESP_INLINE void transpose_block(const float* from, int64_t from_stride, float* to, int64_t to_stride, Lanes<8>) {
  [[maybe_unused]] Lanes<8>::I mask;
  Lanes<8>::F x[8], y[8];
  for (int i = 0; i < 8; ++i) x[i] = Lanes<8>::load(from + i * from_stride);
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
  for (int i = 0; i < 8; ++i) Lanes<8>::store(to + i * to_stride, y[i]);
}

#undef ESP_SHUFFLE

template <int N>
ESP_INLINE void transpose_lanes(const float* keys, int64_t lanes, int64_t dim, float* panel) {
  constexpr int kBlock = std::min(N, 8);
  for (int64_t lane = 0; lane < lanes; lane += kBlock)
    for (int64_t d = 0; d < dim; d += kBlock)
      transpose_block(keys + lane * dim + d, dim, panel + d * kChunk + lane, kChunk, Lanes<kBlock>());
}

// keys [lanes, dim] to panel [dim, 64].
ESP_PER_WIDTH(transpose, (const float* keys, int64_t lanes, int64_t dim, float* panel), (keys, lanes, dim, panel))

// ---------------------------------------------------------------- multiply

template <int N, int R, int C>
ESP_INLINE void multiply_tile(const float* a, int64_t lda, const float* b, int64_t ldb, const int32_t* order,
                              int64_t n, float* c, int64_t ldc) {
  using L = Lanes<N>;
  typename L::F sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) sums[r][j] = L::load(c + r * ldc + j * N);
  for (int64_t k = 0; k < n; ++k) {
    const float* row = b + order[k] * ldb;
    typename L::F y[C];
    for (int j = 0; j < C; ++j) y[j] = L::load(row + j * N);
    for (int r = 0; r < R; ++r) {
      const float x = a[r * lda + k];
      for (int j = 0; j < C; ++j) sums[r][j] += x * y[j];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) L::store(c + r * ldc + j * N, sums[r][j]);
}

// The accumulators of a tile of R rows fill the registers: 16 of 32, 12 of 16, 8 of 16.
template <int N>
constexpr int kTileRows = N == 16 ? 4 : N == 8 ? 6 : 2;

template <int N, int R, int C>
ESP_INLINE void multiply_rows(const float* a, int64_t lda, const float* b, int64_t ldb, const int32_t* order,
                              int64_t n, float* c, int64_t ldc, int64_t rows) {
  for (; rows >= R; rows -= R, a += R * lda, c += R * ldc)
    multiply_tile<N, R, C>(a, lda, b, ldb, order, n, c, ldc);
  if constexpr (R > 1)
    if (rows > 0) multiply_rows<N, R - 1, C>(a, lda, b, ldb, order, n, c, ldc, rows);
}

template <int N>
ESP_INLINE void multiply_lanes(const float* a, int64_t lda, const float* b, int64_t ldb, const int32_t* order,
                               int64_t n, float* c, int64_t ldc, int64_t rows, int64_t columns) {
  constexpr int kWide = N == 16 ? 64 : 16;
  int64_t j = 0;
  for (; j + kWide <= columns; j += kWide)
    multiply_rows<N, kTileRows<N>, kWide / N>(a, lda, b + j, ldb, order, n, c + j, ldc, rows);
  if constexpr (kWide > 16)
    for (; j < columns; j += 16)
      multiply_rows<N, 8, 16 / N>(a, lda, b + j, ldb, order, n, c + j, ldc, rows);
}

// c [rows, columns] += a [rows, n] times rows order[0..n) of b: per element one FMA chain over n in order,
// whatever the tile. columns is a multiple of 16.
ESP_PER_WIDTH(multiply,
              (const float* a, int64_t lda, const float* b, int64_t ldb, const int32_t* order, int64_t n, float* c,
               int64_t ldc, int64_t rows, int64_t columns),
              (a, lda, b, ldb, order, n, c, ldc, rows, columns))

// ---------------------------------------------------------------- softmax

// What is known of the softmax of queries: maximum, sum of e^(score - maximum), and sum of that times value.
struct Sums {
  float* max;    // [queries]
  float* sum;    // [queries]
  float* value;  // [queries, dim]

  Sums of(int64_t query, int64_t dim) const { return {max + query, sum + query, value + query * dim}; }
};

void clear(Sums sums, int64_t queries, int64_t dim) {
  std::fill_n(sums.max, queries, kNothing);
  std::fill_n(sums.sum, queries, 0.0f);
  std::fill_n(sums.value, queries * dim, 0.0f);
}

template <int N>
ESP_INLINE float exp_one(float x) {
  return Lanes<N>::exp(x + typename Lanes<N>::F{})[0];
}

template <int N>
ESP_INLINE void scale_row(float* x, float by, int64_t n) {
  for (int64_t i = 0; i < n; i += N) Lanes<N>::store(x + i, Lanes<N>::load(x + i) * by);
}

// From kChunk - i on, the masks of slots 0, 1, ... being below i.
constexpr auto kBelow = [] {
  std::array<int32_t, 2 * kChunk> below{};
  for (size_t i = 0; i < size_t(kChunk); ++i) below[i] = -1;
  return below;
}();

// -inf in those slots first, first + 1, ... of x that are not in [low, high).
template <int N>
ESP_INLINE typename Lanes<N>::F keep(typename Lanes<N>::F x, int64_t first, int32_t low, int32_t high) {
  using I = typename Lanes<N>::I;
  const I seen = Lanes<N>::load(kBelow.data() + kChunk - high + first) &
                 ~Lanes<N>::load(kBelow.data() + kChunk - low + first);
  return typename Lanes<N>::F((I(x) & seen) | (~seen & int32_t(0xff800000)));
}

template <int N>
ESP_INLINE void soften_lanes(float* products, float scale, float softcap, const int32_t* low, const int32_t* high,
                             int64_t queries, int64_t group, Sums sums, int64_t dim) {
  using L = Lanes<N>;
  constexpr int kParts = kChunk / N;
  for (int64_t i = 0; i < queries; ++i) {
    float* row = products + i * kChunk;
    typename L::F x[kParts], top[kParts];
    for (int j = 0; j < kParts; ++j) {
      x[j] = L::load(row + j * N) * scale;
      if (softcap > 0) x[j] = L::tanh(x[j] / softcap) * softcap;
      if (low != nullptr) x[j] = keep<N>(x[j], j * N, low[i / group], high[i / group]);
      top[j] = x[j];
    }
    for (int w = kParts / 2; w > 0; w /= 2)
      for (int j = 0; j < w; ++j) top[j] = L::max(top[j], top[j + w]);
    const float old = sums.max[i], highest = L::max(top[0]), max = highest > old ? highest : old;
    // While nothing was seen, every e^(-inf - 0) is 0.
    const float shift = max == kNothing ? 0.0f : max;
    for (int j = 0; j < kParts; ++j) {
      x[j] = L::exp(x[j] - shift);
      L::store(row + j * N, x[j]);
    }
    for (int w = kParts / 2; w > 0; w /= 2)
      for (int j = 0; j < w; ++j) x[j] += x[j + w];
    if (max != old) {
      const float fade = exp_one<N>(old - max);
      sums.sum[i] *= fade;
      scale_row<N>(sums.value + i * dim, fade, dim);
      sums.max[i] = max;
    }
    sums.sum[i] += L::sum(x[0]);
  }
}

// One online step: products [queries, 64] become e^(score - maximum). Query i sees slots [low, high) of block row
// i / group, every slot if these are null; what it does not see counts as -inf.
ESP_PER_WIDTH(soften,
              (float* products, float scale, float softcap, const int32_t* low, const int32_t* high,
               int64_t queries, int64_t group, Sums sums, int64_t dim),
              (products, scale, softcap, low, high, queries, group, sums, dim))

template <int N>
ESP_INLINE void merge_lanes(Sums into, Sums part, int64_t queries, int64_t dim) {
  using L = Lanes<N>;
  for (int64_t i = 0; i < queries; ++i) {
    if (part.sum[i] == 0) continue;
    const float max = part.max[i] > into.max[i] ? part.max[i] : into.max[i];
    const float mine = exp_one<N>(into.max[i] - max), other = exp_one<N>(part.max[i] - max);
    float* x = into.value + i * dim;
    const float* y = part.value + i * dim;
    for (int64_t d = 0; d < dim; d += N) L::store(x + d, L::load(x + d) * mine + L::load(y + d) * other);
    into.sum[i] = into.sum[i] * mine + part.sum[i] * other;
    into.max[i] = max;
  }
}

// `into` takes `part` in; exact where either saw nothing.
ESP_PER_WIDTH(merge, (Sums into, Sums part, int64_t queries, int64_t dim), (into, part, queries, dim))

template <int N>
ESP_INLINE void add_sink_lanes(float logit, Sums into, int64_t dim) {
  const float max = logit > *into.max ? logit : *into.max, fade = exp_one<N>(*into.max - max);
  *into.sum = *into.sum * fade + exp_one<N>(logit - max);
  *into.max = max;
  scale_row<N>(into.value, fade, dim);
}

// A logit without a value joins the softmax of one query.
ESP_PER_WIDTH(add_sink, (float logit, Sums into, int64_t dim), (logit, into, dim))

template <int N, typename T>
ESP_INLINE void divide_lanes(const float* x, float by, T* out, int64_t dim) {
  for (int64_t d = 0; d < dim; d += N) Lanes<N>::store(out + d, Lanes<N>::load(x + d) / by);
}

#define ESP_DIVIDE(T) \
  ESP_PER_WIDTH(divide, (const float* x, float by, T* out, int64_t dim), (x, by, out, dim))
ESP_DIVIDE(float)
ESP_DIVIDE(bf16)
ESP_DIVIDE(f16)
#undef ESP_DIVIDE

}  // namespace
}  // namespace esp
