// Bytes: q, k and v once in and once out. One block row is one unit of work.
#include "esp/rope_append.h"

#include "esp/cpu.h"

namespace esp {
namespace {

struct Turned {
  f32x16 low, high;
};

ESP_INLINE Turned turn(f32x16 low, f32x16 high, f32x16 cos, f32x16 sin) {
  return {low * cos - high * sin, high * cos + low * sin};
}

template <typename T>
ESP_INLINE void rotate_head(const T* x, const float* cos, const float* sin, T* y, int64_t half, int64_t n) {
  const int64_t whole = half / 16 * 16, rest = half - whole;
  for (int64_t i = 0; i < whole; i += 16) {
    const Turned t = turn(load16(x + i), load16(x + half + i), load16(cos + i), load16(sin + i));
    store16(y + i, t.low);
    store16(y + half + i, t.high);
  }
  if (rest > 0) {
    const Turned t = turn(load_first(x + whole, rest), load_first(x + half + whole, rest),
                          load_first(cos + whole, rest), load_first(sin + whole, rest));
    store_first(y + whole, t.low, rest);
    store_first(y + half + whole, t.high, rest);
  }
  for (int64_t i = 2 * half; i < n; ++i) y[i] = x[i];
}

#define ESP_ROTATE(T)                                                                                     \
  ESP_CLONES void rotate(const T* x, int64_t stride_x, const float* cos, const float* sin, T* y,          \
                         int64_t stride_y, int64_t heads, int64_t half, int64_t n) {                      \
    for (int64_t h = 0; h < heads; ++h) rotate_head(x + h * stride_x, cos, sin, y + h * stride_y, half, n); \
  }
ESP_ROTATE(float)
ESP_ROTATE(bf16)
ESP_ROTATE(f16)
#undef ESP_ROTATE

template <typename T>
void append_row(const RopeAppendArgs& a, int64_t b, int64_t r) {
  const auto row = [=](const RopeAppendArgs::Rows& x) {
    return static_cast<const T*>(x.data) + b * x.stride_batch + r * x.stride_row;
  };
  const int64_t depth = a.depth[b * a.rows + r], n = a.head_dim;
  T* rotated = static_cast<T*>(a.rotated) + (b * a.rows + r) * a.q_heads * n;
  if (depth < 0) {
    std::memset(rotated, 0, size_t(a.q_heads * n) * sizeof(T));
    return;
  }
  const int64_t position = a.prefix_len[b] + depth, slot = a.prefix_len[b] + r;
  const float *cos = a.cos + position * a.half, *sin = a.sin + position * a.half;
  T* k = static_cast<T*>(a.k_cache.data) + a.k_cache.offset(a.pages, b, slot);
  T* v = static_cast<T*>(a.v_cache.data) + a.v_cache.offset(a.pages, b, slot);
  rotate(row(a.q), a.q.stride_head, cos, sin, rotated, n, a.q_heads, a.half, n);
  rotate(row(a.k), a.k.stride_head, cos, sin, k, a.k_cache.stride_head, a.kv_heads, a.half, n);
  for (int64_t h = 0; h < a.kv_heads; ++h)
    std::memcpy(v + h * a.v_cache.stride_head, row(a.v) + h * a.v.stride_head, size_t(n) * sizeof(T));
}

template <typename T>
void append_rows(const RopeAppendArgs& a) {
  const int64_t heads = a.q_heads + 2 * a.kv_heads;
#pragma omp parallel for schedule(static) if (a.batch * a.rows * heads * a.head_dim > 32768)
  for (int64_t i = 0; i < a.batch * a.rows; ++i) append_row<T>(a, i / a.rows, i % a.rows);
}

}  // namespace

void rope_append_cpu(const RopeAppendArgs& a) {
  switch (a.dtype) {
    case DType::f32: return append_rows<float>(a);
    case DType::bf16: return append_rows<bf16>(a);
    case DType::f16: return append_rows<f16>(a);
  }
}

}  // namespace esp
