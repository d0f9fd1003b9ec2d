// How CPU kernels are compiled: one clone a micro-architecture, chosen when the library is loaded.
#pragma once
#include "esp/types.h"

// Put ESP_CLONES on the definition of a plain function that holds the loops; every helper it calls must be
// ESP_INLINE, or it is compiled for the base instruction set only. OpenMP regions stay outside of clones.
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && !defined(ESP_NO_CLONES)
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

// The sum keeps GCC from building the vector lane by lane in clones.
ESP_INLINE f32x16 splat(float x) { return x + f32x16{}; }

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

// Fixed trees over the lanes, by halves of the vector: GCC would take single lanes through memory.
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));

ESP_INLINE float sum16(f32x16 x) {
  f32x8 half[2];
  std::memcpy(half, &x, sizeof half);
  const f32x8 eight = half[0] + half[1];
  f32x4 quarter[2];
  std::memcpy(quarter, &eight, sizeof quarter);
  const f32x4 four = quarter[0] + quarter[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

ESP_INLINE float max_of16(f32x16 x) {
  f32x8 half[2];
  std::memcpy(half, &x, sizeof half);
  const f32x8 eight = half[0] > half[1] ? half[0] : half[1];
  f32x4 quarter[2];
  std::memcpy(quarter, &eight, sizeof quarter);
  const f32x4 four = quarter[0] > quarter[1] ? quarter[0] : quarter[1];
  const float a = four[0] > four[2] ? four[0] : four[2], b = four[1] > four[3] ? four[1] : four[3];
  return a > b ? a : b;
}

ESP_INLINE f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }

// e^x for x <= 0 in softmax: Cody-Waite reduction and a degree-7 polynomial, below 1 ulp; 0 below -87.33,
// NaN stays NaN.
ESP_INLINE f32x16 exp16(f32x16 x) {
  const f32x16 clamped = x < splat(-87.33f) ? splat(-87.33f) : x;
  const f32x16 shifted = clamped * 1.44269504f + splat(0x1.8p23f);
  const f32x16 n = shifted - splat(0x1.8p23f);
  f32x16 r = clamped - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + r + splat(1.0f);
  i32x16 exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent - 0x4b400000 + 127) << 23;
  f32x16 scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  const f32x16 result = p * scale;
  return x < splat(-87.33f) ? f32x16{} : result;
}

// tanh x: an odd polynomial near 0, where 1 - e^(-2|x|) would cancel; below 2 ulp.
ESP_INLINE f32x16 tanh16(f32x16 x) {
  const f32x16 size = x < splat(0.0f) ? -x : x, square = x * x;
  f32x16 p = splat(-5.70498872745e-3f);
  p = p * square + splat(2.06390887954e-2f);
  p = p * square - splat(5.37397155531e-2f);
  p = p * square + splat(1.33314422036e-1f);
  p = p * square - splat(3.33332819422e-1f);
  const f32x16 small = p * square * x + x;
  const f32x16 e = exp16(size * -2.0f);
  const f32x16 large = (1.0f - e) / (1.0f + e);
  return size < splat(0.625f) ? small : x < splat(0.0f) ? -large : large;
}

}  // namespace esp
