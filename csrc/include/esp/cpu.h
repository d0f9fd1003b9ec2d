// How CPU kernels are compiled: one clone a micro-architecture, chosen when the library is loaded.
#pragma once
#include "esp/types.h"

// Put ESP_CLONES on the definition of a plain function that holds the loops; every helper it calls must be
// ESP_INLINE, or it is compiled for the base instruction set only. OpenMP regions stay outside of clones.
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(ESP_NO_CLONES)
#define ESP_CLONED 1
#define ESP_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ESP_CLONES
#endif

namespace esp {

// Sixteen floats as one value. Every operation is per lane, so results do not depend on the register width.
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

// A sum, since GCC builds the vector lane by lane where it can fold the operation away.
ESP_INLINE f32x16 splat(float x) { return x + f32x16{}; }

// GCC keeps a vector that is wider than a register in memory, so a kernel that must be fast without AVX-512
// is a template over its vector type: f32x16 where wide_registers(), f32xn elsewhere.
#ifdef __x86_64__
typedef float f32xn __attribute__((vector_size(32)));
typedef int32_t i32xn __attribute__((vector_size(32)));
#else
typedef float f32xn __attribute__((vector_size(16)));
typedef int32_t i32xn __attribute__((vector_size(16)));
#endif

inline bool wide_registers() {
#if defined(ESP_CLONED)
  return __builtin_cpu_supports("avx512vl");
#elif defined(__AVX512VL__)
  return true;
#else
  return false;
#endif
}

template <typename V>
ESP_INLINE V load_as(const float* p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <typename T>
ESP_INLINE f32x16 load16(const T* p) {
  f32x16 x;
  for (int i = 0; i < 16; ++i) x[i] = load(p[i]);
  return x;
}

template <>
ESP_INLINE f32x16 load16<float>(const float* p) {
  f32x16 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <>
ESP_INLINE f32x16 load16<bf16>(const bf16* p) {
  u16x16 half;
  std::memcpy(&half, p, sizeof half);
  const u32x16 bits = __builtin_convertvector(half, u32x16) << 16;
  f32x16 x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <typename T>
ESP_INLINE void store16(T* p, f32x16 x) {
  if constexpr (sizeof(T) == sizeof(float)) std::memcpy(p, &x, sizeof x);
  else for (int i = 0; i < 16; ++i) p[i] = store<T>(x[i]);
}

// The last n < 16 elements of a row go through the same lanes as all others, so that they get the same bits.
template <typename T>
ESP_INLINE f32x16 load_first(const T* p, int64_t n) {
  f32x16 x = {};
  for (int64_t i = 0; i < n; ++i) x[i] = load(p[i]);
  return x;
}

template <typename T>
ESP_INLINE void store_first(T* p, f32x16 x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = store<T>(x[i]);
}

// Fixed tree over the lanes.
ESP_INLINE float sum16(f32x16 x) {
  float s[8];
  for (int i = 0; i < 8; ++i) s[i] = x[i] + x[i + 8];
  for (int w = 4; w > 0; w /= 2)
    for (int i = 0; i < w; ++i) s[i] += s[i + w];
  return s[0];
}

ESP_INLINE f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }

// e^x for x <= 0 in softmax: Cody-Waite reduction and a degree-7 polynomial, about 1 ulp; 0 below -87.7,
// and NaN stays NaN.
// V is float or a vector of them, I is int32_t in the same shape.
template <typename V, typename I>
ESP_INLINE V exp_nonpositive(V x) {
  const V low = V{} - 88.0f;  // where the scale below is 0
  const V clamped = x < low ? low : x;
  const V shifted = clamped * 1.44269504f + 0x1.8p23f;
  const V n = shifted - 0x1.8p23f;
  V r = clamped - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  I exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent - 0x4b400000 + 127) << 23;
  V scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return p * scale;
}

ESP_INLINE f32x16 exp16(f32x16 x) { return exp_nonpositive<f32x16, i32x16>(x); }

}  // namespace esp
