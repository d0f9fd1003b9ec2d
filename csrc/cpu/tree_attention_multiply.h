// Keys and values out of the cache, and products of small float32 matrices with them.
#pragma once
#include <algorithm>

#include "esp/lanes.h"

namespace esp {
namespace {

constexpr int64_t kChunk = 64;  // keys of a panel
constexpr int64_t kAhead = 16;  // rows to prefetch: each may be the first of its memory page

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

#if defined(__clang__)
#define ESP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define ESP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(mask){__VA_ARGS__})
#endif

ESP_INLINE void transpose_block(Lanes<4>::F (&x)[4]) {
  [[maybe_unused]] Lanes<4>::I mask;
  Lanes<4>::F y[4];
  for (int i = 0; i < 2; ++i) {
    y[2 * i] = ESP_SHUFFLE(x[i], x[i + 2], 0, 4, 1, 5);
    y[2 * i + 1] = ESP_SHUFFLE(x[i], x[i + 2], 2, 6, 3, 7);
  }
  for (int i = 0; i < 2; ++i) {
    x[2 * i] = ESP_SHUFFLE(y[i], y[i + 2], 0, 4, 1, 5);
    x[2 * i + 1] = ESP_SHUFFLE(y[i], y[i + 2], 2, 6, 3, 7);
  }
}

ESP_INLINE void transpose_block(Lanes<8>::F (&x)[8]) {
  [[maybe_unused]] Lanes<8>::I mask;
  Lanes<8>::F y[8];
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
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}

#undef ESP_SHUFFLE

template <int N, typename T>
ESP_INLINE void transpose_lanes(const T* keys, const int64_t* offsets, int64_t n, int64_t dim, float* panel) {
  constexpr int kBlock = std::min(N, 8);
  for (int64_t lane = 0; lane < n; lane += kBlock) {
    for (int64_t d = 0; d < dim; d += kBlock) {
      typename Lanes<kBlock>::F x[kBlock];
      for (int i = 0; i < kBlock; ++i) {
        x[i] = Lanes<kBlock>::load(keys + offsets[lane + i] + d);
        __builtin_prefetch(keys + offsets[lane + i + kAhead] + d);
      }
      transpose_block(x);
      for (int i = 0; i < kBlock; ++i) Lanes<kBlock>::store(panel + (d + i) * kChunk + lane, x[i]);
    }
  }
}

// n keys to the columns of panel [dim, 64]. n is a multiple of 8; offsets as for copy.
#define ESP_TRANSPOSE(T)                                                                              \
  ESP_PER_WIDTH(transpose, (const T* keys, const int64_t* offsets, int64_t n, int64_t dim, float* panel), \
                (keys, offsets, n, dim, panel))
ESP_TRANSPOSE(float)
ESP_TRANSPOSE(bf16)
ESP_TRANSPOSE(f16)
#undef ESP_TRANSPOSE

template <int N, int R, int C, bool kFetch, typename T>
ESP_INLINE void multiply_tile(const float* a, int64_t lda, const T* b, int64_t ldb, const int64_t* order,
                              int64_t n, float* c, int64_t ldc) {
  using L = Lanes<N>;
  typename L::F sums[R][C] = {};
  for (int64_t k = 0; k < n; ++k) {
    const T* row = b + order[k] * ldb;
    typename L::F y[C];
    for (int j = 0; j < C; ++j) {
      y[j] = L::load(row + j * N);
      if (kFetch) __builtin_prefetch(b + order[k + kAhead] * ldb + j * N);
    }
    for (int r = 0; r < R; ++r) {
      const float x = a[r * lda + k];
      for (int j = 0; j < C; ++j) sums[r][j] += x * y[j];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < C; ++j) L::store(c + r * ldc + j * N, L::load(c + r * ldc + j * N) + sums[r][j]);
}

// The accumulators of a tile of R rows fill the registers: 16 of 32, 12 of 16, 8 of 16.
template <int N>
constexpr int kTileRows = N == 16 ? 4 : N == 8 ? 6 : 2;

template <int N, int R, int C, bool kFetch, typename T>
ESP_INLINE void multiply_rows(const float* a, int64_t lda, const T* b, int64_t ldb, const int64_t* order,
                              int64_t n, float* c, int64_t ldc, int64_t rows) {
  for (; rows >= R; rows -= R, a += R * lda, c += R * ldc)
    multiply_tile<N, R, C, kFetch>(a, lda, b, ldb, order, n, c, ldc);
  if constexpr (R > 1)
    if (rows > 0) multiply_rows<N, R - 1, C, kFetch>(a, lda, b, ldb, order, n, c, ldc, rows);
}

template <int N, bool kFetch, typename T>
ESP_INLINE void multiply_columns(const float* a, int64_t lda, const T* b, int64_t ldb, const int64_t* order,
                                 int64_t n, float* c, int64_t ldc, int64_t rows, int64_t columns) {
  constexpr int kWide = N == 16 ? 64 : 16;
  int64_t j = 0;
  for (; j + kWide <= columns; j += kWide)
    multiply_rows<N, kTileRows<N>, kWide / N, kFetch>(a, lda, b + j, ldb, order, n, c + j, ldc, rows);
  if constexpr (kWide > 16)
    for (; j < columns; j += 16)
      multiply_rows<N, 4, 16 / N, kFetch>(a, lda, b + j, ldb, order, n, c + j, ldc, rows);
}

template <int N>
ESP_INLINE void multiply_lanes(const float* a, int64_t lda, const float* b, int64_t ldb, const int64_t* order,
                               int64_t n, float* c, int64_t ldc, int64_t rows, int64_t columns) {
  multiply_columns<N, false>(a, lda, b, ldb, order, n, c, ldc, rows, columns);
}

// c [rows, columns] += a [rows, n] times rows order[0..n) of b: per element one FMA chain over n in order,
// from 0, whatever the tile. columns is a multiple of 16.
ESP_PER_WIDTH(multiply,
              (const float* a, int64_t lda, const float* b, int64_t ldb, const int64_t* order, int64_t n,
               float* c, int64_t ldc, int64_t rows, int64_t columns),
              (a, lda, b, ldb, order, n, c, ldc, rows, columns))

template <int N, typename T>
ESP_INLINE void multiply_cached_lanes(const float* a, int64_t lda, const T* b, const int64_t* offsets,
                                      int64_t n, float* c, int64_t ldc, int64_t rows, int64_t columns) {
  multiply_columns<N, true>(a, lda, b, 1, offsets, n, c, ldc, rows, columns);
}

// The same with b still in the cache: for so few rows that a copy would not pay. Offsets as for copy.
#define ESP_MULTIPLY(T)                                                                                   \
  ESP_PER_WIDTH(multiply_cached,                                                                          \
                (const float* a, int64_t lda, const T* b, const int64_t* offsets, int64_t n, float* c,    \
                 int64_t ldc, int64_t rows, int64_t columns),                                             \
                (a, lda, b, offsets, n, c, ldc, rows, columns))
ESP_MULTIPLY(float)
ESP_MULTIPLY(bf16)
ESP_MULTIPLY(f16)
#undef ESP_MULTIPLY

}  // namespace
}  // namespace esp
