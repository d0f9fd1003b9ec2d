// Bytes: x, residual and y once. One row is one unit of work; its sum runs over sixteen fixed lanes.
#include "esp/rms_norm.h"

#include <cmath>

#include "esp/cpu.h"

namespace esp {
namespace {

template <typename T>
ESP_INLINE void norm_row(const T* x, T* residual, const T* weight, T* y, int64_t n, float eps) {
  const int64_t whole = n / 16 * 16;
  const T* in = x;
  f32x16 squares = {};
  if (residual != nullptr) {
    for (int64_t i = 0; i < whole; i += 16) store16(residual + i, load16(x + i) + load16(residual + i));
    for (int64_t i = whole; i < n; ++i) residual[i] = store<T>(load(x[i]) + load(residual[i]));
    in = residual;
  }
  for (int64_t i = 0; i < whole; i += 16) {
    const f32x16 v = load16(in + i);
    squares += v * v;
  }
  for (int64_t i = whole; i < n; ++i) squares[i - whole] += load(in[i]) * load(in[i]);
  const float scale = 1.0f / std::sqrt(sum16(squares) / float(n) + eps);
  for (int64_t i = 0; i < whole; i += 16) store16(y + i, load16(in + i) * scale * load16(weight + i));
  for (int64_t i = whole; i < n; ++i) y[i] = store<T>(load(in[i]) * scale * load(weight[i]));
}

#define ESP_NORM_ROW(T)                                                                                \
  ESP_CLONES void norm(const T* x, T* residual, const T* weight, T* y, int64_t n, float eps) { \
    norm_row(x, residual, weight, y, n, eps);                                                          \
  }
ESP_NORM_ROW(float)
ESP_NORM_ROW(bf16)
ESP_NORM_ROW(f16)
#undef ESP_NORM_ROW

template <typename T>
void norm_rows(const RmsNormArgs& a) {
#pragma omp parallel for schedule(static) if (a.outer * a.inner * a.n > 16384)
  for (int64_t row = 0; row < a.outer * a.inner; ++row) {
    const int64_t offset = row / a.inner * a.stride_outer + row % a.inner * a.stride_inner;
    T* residual = a.residual ? static_cast<T*>(a.residual) + row * a.n : nullptr;
    norm(static_cast<const T*>(a.x) + offset, residual, static_cast<const T*>(a.weight),
         static_cast<T*>(a.y) + row * a.n, a.n, a.eps);
  }
}

}  // namespace

void rms_norm_cpu(const RmsNormArgs& a) {
  switch (a.dtype) {
    case DType::f32: return norm_rows<float>(a);
    case DType::bf16: return norm_rows<bf16>(a);
    case DType::f16: return norm_rows<f16>(a);
  }
}

}  // namespace esp
