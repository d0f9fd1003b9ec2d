// Bytes: the weight once for every kGroup rows; x, bias and y once. FLOPs: 2 rows k n.
//
// bfloat16 on a CPU with AMX: see linear_rows_amx.h. Else an output is one float32 lane: it adds up x[i] * w[i] in order within each kDepth of k, then those sums in
// order, then the bias. Tiles and threads only choose which lanes run together, so they cannot change a bit.
#include "esp/linear_rows.h"

#include <algorithm>
#include <memory>
#include <type_traits>

#include "esp/cpu.h"
#include "linear_rows_amx.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace esp {
namespace {

constexpr int64_t kDepth = 64;    // k of a block, even: 8 KB of float32 weights in L1, and as much on its way
constexpr int64_t kGroup = 120;   // rows that share one read of a panel; a multiple of every tile
constexpr int64_t kAhead = 8192;  // elements of bfloat16 weights
constexpr int64_t kStage = 1920;  // rows that are packed at once, which bounds the scratch memory

// One block of a panel against one tile of rows.
struct Block {
  const float* x;     // [depth, rows]
  const float* w;     // [depth, kPanel]
  float* sums;        // [rows, kPanel], += x^T w
  int64_t depth;
  const char* ahead;  // what this thread reads next, asked for at `advance` bytes a step: the memory is busy
  int64_t advance;    // while the FPU is
};

template <typename V, int R, int J>
ESP_INLINE void accumulate(const Block& b) {
  constexpr int kLanes = sizeof(V) / sizeof(float);
  for (int first = 0; first < kPanel; first += kLanes * J) {
    float* sums = b.sums + first;
    V acc[R][J] = {};
    for (int64_t i = 0; i < b.depth; ++i) {
      __builtin_prefetch(b.ahead + i * b.advance);
      __builtin_prefetch(b.ahead + i * b.advance + 64);
      V w[J];
#pragma GCC unroll 16
      for (int j = 0; j < J; ++j) w[j] = load_as<V>(b.w + i * kPanel + first + kLanes * j);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int j = 0; j < J; ++j) acc[r][j] += w[j] * b.x[i * R + r];
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int j = 0; j < J; ++j) {
        float* sum = sums + r * kPanel + kLanes * j;
        acc[r][j] += load_as<V>(sum);
        std::memcpy(sum, &acc[r][j], sizeof(V));
      }
  }
}

#define ESP_ROWS(V, R, J) \
  case R: return accumulate<V, R, J>(b);

// For 32 registers of 64 bytes: 24 sums, 2 weights, one x.
ESP_CLONES void wide_tile(int64_t rows, const Block& b) {
  switch (rows) {
    ESP_ROWS(f32x16, 1, 2) ESP_ROWS(f32x16, 2, 2) ESP_ROWS(f32x16, 3, 2) ESP_ROWS(f32x16, 4, 2)
    ESP_ROWS(f32x16, 5, 2) ESP_ROWS(f32x16, 6, 2) ESP_ROWS(f32x16, 7, 2) ESP_ROWS(f32x16, 8, 2)
    ESP_ROWS(f32x16, 9, 2) ESP_ROWS(f32x16, 10, 2) ESP_ROWS(f32x16, 11, 2) ESP_ROWS(f32x16, 12, 2)
  }
}

// For 16 registers of 32 bytes: 12 sums, 2 weights, one x. For 32 of 16 bytes: 24 sums, 4 weights.
ESP_CLONES void narrow_tile(int64_t rows, const Block& b) {
  constexpr int J = 64 / sizeof(f32xn);
  switch (rows) {
    ESP_ROWS(f32xn, 1, J) ESP_ROWS(f32xn, 2, J) ESP_ROWS(f32xn, 3, J)
    ESP_ROWS(f32xn, 4, J) ESP_ROWS(f32xn, 5, J) ESP_ROWS(f32xn, 6, J)
  }
}
#undef ESP_ROWS

// [depth, 32] weights as float32, in L1: the multiplications then know one type only.
template <typename T>
ESP_INLINE void widen_each(const T* __restrict w, int64_t depth, float* __restrict wide) {
  for (int64_t i = 0; i < depth * kPanel; ++i) wide[i] = load(w[i]);
}

ESP_CLONES void widen_portably(const f16* w, int64_t depth, float* wide) { widen_each(w, depth, wide); }

#ifdef __x86_64__
// Much faster, above all where a weight is subnormal.
__attribute__((target("f16c"))) void widen_f16c(const f16* w, int64_t depth, float* wide) {
  for (int64_t i = 0; i < depth * kPanel; i += 8) {
    __m128i halves;
    std::memcpy(&halves, w + i, sizeof halves);
    _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(halves));
  }
}
#endif

// Rows i and i + 1 are interleaved.
ESP_CLONES void widen_pairs(const bf16* __restrict w, int64_t depth, float* __restrict wide) {
  for (int64_t i = 0; i < depth; i += 2) {
    for (int j = 0; j < kPanel; ++j) {
      uint32_t pair;
      std::memcpy(&pair, w + i * kPanel + 2 * j, sizeof pair);
      wide[i * kPanel + j] = float_of(pair << 16);
      wide[(i + 1) * kPanel + j] = float_of(pair & 0xffff0000);
    }
  }
}

struct Machine {
  void (*tile)(int64_t rows, const Block& b);
  int64_t rows;  // of the largest tile
  void (*widen)(const f16* w, int64_t depth, float* wide);
};

const Machine machine = [] {
  Machine m = {narrow_tile, 6, widen_portably};
  if (wide_registers()) m = {wide_tile, 12, widen_portably};
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) m.widen = widen_f16c;  // every CPU with AVX2 has F16C
#endif
  return m;
}();

const float* widen(const float* w, int64_t, float*) { return w; }

const float* widen(const bf16* w, int64_t depth, float* wide) {
  widen_pairs(w, depth, wide);
  return wide;
}

const float* widen(const f16* w, int64_t depth, float* wide) {
  machine.widen(w, depth, wide);
  return wide;
}

template <typename T>
ESP_INLINE void pack_tile(const T* x, int64_t stride, int64_t rows, int64_t k, float* packed) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < k; ++i) packed[i * rows + r] = load(x[r * stride + i]);
}

template <typename T>
ESP_INLINE void finish_row(const float* sums, const T* bias, T* y, int64_t width) {
  if (width == kPanel) {
    for (int j = 0; j < kPanel; j += 16)
      store16(y + j, bias ? load16(sums + j) + load16(bias + j) : load16(sums + j));
  } else {
    for (int64_t j = 0; j < width; ++j) y[j] = store<T>(bias ? sums[j] + load(bias[j]) : sums[j]);
  }
}

#define ESP_TYPED(T)                                                                         \
  ESP_CLONES void pack(const T* x, int64_t stride, int64_t rows, int64_t k, float* packed) { \
    pack_tile(x, stride, rows, k, packed);                                                   \
  }                                                                                          \
  ESP_CLONES void finish(const float* sums, const T* bias, T* y, int64_t width) {            \
    finish_row(sums, bias, y, width);                                                        \
  }
ESP_TYPED(float)
ESP_TYPED(bf16)
ESP_TYPED(f16)
#undef ESP_TYPED

// Rows cut into tiles of sizes that differ by one at most. Tile t is packed at [row(t) * k], k-major.
struct Tiles {
  int64_t rows, count;

  explicit Tiles(int64_t rows) : rows(rows), count((rows + machine.rows - 1) / machine.rows) {}
  int64_t row(int64_t t) const { return rows * t / count; }
};

// y[:, panel] of the tiles [begin, end), which have kGroup rows at most.
template <typename T>
void multiply(const LinearRowsArgs& a, const float* x, T* y, const Tiles& tiles, int64_t begin, int64_t end,
              int64_t panel) {
  alignas(64) float sums[kGroup * kPanel], wide[kDepth * kPanel];
  const int64_t first = tiles.row(begin), last = tiles.row(end);
  std::fill_n(sums, (last - first) * kPanel, 0.0f);
  const int64_t stored = std::is_same_v<T, bf16> ? (a.k + 1) / 2 * 2 : a.k;
  const T* w = static_cast<const T*>(a.packed) + panel * stored * kPanel;
  for (int64_t i = 0; i < a.k; i += kDepth, w += kDepth * kPanel) {
    const int64_t depth = std::min(kDepth, a.k - i);
    const float* block = widen(w, depth, wide);
    const char* ahead = reinterpret_cast<const char*>(w + depth * kPanel);
    const int64_t advance = int64_t(kPanel * sizeof(T)) / (end - begin);
    for (int64_t t = begin; t < end; ++t, ahead += depth * advance) {
      const int64_t row = tiles.row(t), count = tiles.row(t + 1) - row;
      const float* at = x + row * a.k + i * count;
      machine.tile(count, {at, block, sums + (row - first) * kPanel, depth, ahead, advance});
    }
  }
  const int64_t column = panel * kPanel, width = std::min<int64_t>(kPanel, a.n - column);
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + column : nullptr;
  for (int64_t r = first; r < last; ++r)
    finish(sums + (r - first) * kPanel, bias, y + r * a.n + column, width);
}

template <typename T>
void linear_rows(const LinearRowsArgs& a) {
  const int64_t panels = (a.n + kPanel - 1) / kPanel;
  const auto packed = std::make_unique_for_overwrite<float[]>(std::min(a.rows, kStage) * a.k);
  for (int64_t done = 0; done < a.rows; done += kStage) {
    const Tiles tiles(std::min(kStage, a.rows - done));
    const int64_t groups = (tiles.count * machine.rows + kGroup - 1) / kGroup;
    const T* x = static_cast<const T*>(a.x) + done * a.stride_x;
    T* y = static_cast<T*>(a.y) + done * a.n;
    // A few rows are packed before the threads meet: waiting for them would cost more.
#pragma omp parallel for schedule(static) if (tiles.rows * a.k > 16384)
    for (int64_t t = 0; t < tiles.count; ++t) {
      const int64_t row = tiles.row(t);
      pack(x + row * a.stride_x, a.stride_x, tiles.row(t + 1) - row, a.k, packed.get() + row * a.k);
    }
#pragma omp parallel for collapse(2) schedule(static) if (tiles.rows * a.k * a.n > 65536)
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t p = 0; p < panels; ++p)
        multiply(a, packed.get(), y, tiles, tiles.count * g / groups, tiles.count * (g + 1) / groups, p);
  }
}

// Tiles of equally many rows, at most 16; the last one may begin within the one before it.
struct RowTiles {
  int64_t rows, count, size;

  explicit RowTiles(int64_t rows)
      : rows(rows), count((rows + kTileRows - 1) / kTileRows), size((rows + count - 1) / count) {}
  int64_t row(int64_t t) const { return std::min(t * size, rows - size); }
};

void multiply_by_tiles(const LinearRowsArgs& a, const bf16* x, int64_t stride_x, const RowTiles& tiles,
                       int64_t panel) {
  alignas(64) float sums[2 * kTileRows * kPanel];
  const int64_t column = panel * kPanel, width = std::min<int64_t>(kPanel, a.n - column);
  const bf16* w = static_cast<const bf16*>(a.packed) + column * ((a.k + 1) / 2 * 2);
  const bf16* bias = a.bias ? static_cast<const bf16*>(a.bias) + column : nullptr;
  for (int64_t t = 0; t < tiles.count; t += 2) {
    const bool two = t + 1 < tiles.count;
    const int64_t ahead = t == 0 ? kAhead : 0;
    const bf16 *x0 = x + tiles.row(t) * stride_x, *x1 = x + tiles.row(t + two) * stride_x;
    if (two) multiply_panel<true>(x0, x1, stride_x, w, a.k, ahead, sums);
    else multiply_panel<false>(x0, x1, stride_x, w, a.k, ahead, sums);
    for (int64_t i = 0; i <= two; ++i)
      for (int64_t r = 0; r < tiles.size; ++r)
        store_row(sums + (i * kTileRows + r) * kPanel, bias,
                  static_cast<bf16*>(a.y) + (tiles.row(t + i) + r) * a.n + column, width);
  }
}

void linear_rows_by_tiles(const LinearRowsArgs& a) {
  const RowTiles tiles(a.rows);
  const int64_t panels = (a.n + kPanel - 1) / kPanel, padded = (a.k + kTileK - 1) / kTileK * kTileK;
  const bf16* x = static_cast<const bf16*>(a.x);
  int64_t stride_x = a.stride_x;
  std::unique_ptr<bf16[]> copy;
  if (padded != a.k) {
    copy = std::make_unique<bf16[]>(a.rows * padded);
    for (int64_t r = 0; r < a.rows; ++r) std::copy_n(x + r * stride_x, a.k, copy.get() + r * padded);
    x = copy.get();
    stride_x = padded;
  }
#pragma omp parallel if (a.rows * a.k * a.n > 65536)
  {
    take_tiles(tiles.size);
#pragma omp for schedule(static) nowait
    for (int64_t p = 0; p < panels; ++p) multiply_by_tiles(a, x, stride_x, tiles, p);
    release_tiles();
  }
}

}  // namespace

void linear_rows_cpu(const LinearRowsArgs& a) {
  if (a.rows == 0) return;
  switch (a.dtype) {
    case DType::f32: return linear_rows<float>(a);
    case DType::bf16: return has_tiles() ? linear_rows_by_tiles(a) : linear_rows<bf16>(a);
    case DType::f16: return linear_rows<f16>(a);
  }
}

}  // namespace esp
