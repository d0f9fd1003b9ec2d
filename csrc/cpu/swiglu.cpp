// Bytes: gate_up and y once. One row is one unit of work.
#include "esp/swiglu.h"

#include "esp/cpu.h"

namespace esp {
namespace {

// x / (1 + e^-x) in a form whose exponential never overflows. The bound keeps silu(-inf) at 0, where
// -inf * 0 would be NaN; a NaN passes both comparisons.
ESP_INLINE f32x16 silu16(f32x16 x) {
  const f32x16 bounded = x < splat(-128.0f) ? splat(-128.0f) : x;
  const f32x16 e = exp16(bounded < f32x16{} ? bounded : -bounded);
  const f32x16 numerator = bounded < f32x16{} ? e : splat(1.0f);
  return bounded * (numerator / (e + 1.0f));
}

template <typename T>
ESP_INLINE void gate_row(const T* gate, const T* up, T* y, int64_t n) {
  const int64_t whole = n / 16 * 16, rest = n - whole;
  for (int64_t i = 0; i < whole; i += 16) store16(y + i, silu16(load16(gate + i)) * load16(up + i));
  if (rest > 0)
    store_first(y + whole, silu16(load_first(gate + whole, rest)) * load_first(up + whole, rest), rest);
}

#define ESP_GATE(T) \
  ESP_CLONES void apply(const T* gate, const T* up, T* y, int64_t n) { gate_row(gate, up, y, n); }
ESP_GATE(float)
ESP_GATE(bf16)
ESP_GATE(f16)
#undef ESP_GATE

template <typename T>
void gate_rows(const SwigluArgs& a) {
#pragma omp parallel for schedule(static) if (a.outer * a.inner * a.n > 16384)
  for (int64_t row = 0; row < a.outer * a.inner; ++row) {
    const T* gate = static_cast<const T*>(a.gate_up) + row / a.inner * a.stride_outer +
                    row % a.inner * a.stride_inner;
    apply(gate, gate + a.n, static_cast<T*>(a.y) + row * a.n, a.n);
  }
}

}  // namespace

void swiglu_cpu(const SwigluArgs& a) {
  switch (a.dtype) {
    case DType::f32: return gate_rows<float>(a);
    case DType::bf16: return gate_rows<bf16>(a);
    case DType::f16: return gate_rows<f16>(a);
  }
}

}  // namespace esp
