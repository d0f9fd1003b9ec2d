// How CPU kernels are compiled: one clone a micro-architecture, chosen when the library is loaded.
#pragma once
#include "esp/lanes.h"
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

// A sum, since GCC builds the vector lane by lane where it can fold the operation away.
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

// Fixed tree over the lanes.
ESP_INLINE float sum16(f32x16 x) { return Lanes<16>::sum(x); }

ESP_INLINE f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }

// e^x for x <= 0; 0 below -87.33.
ESP_INLINE f32x16 exp16(f32x16 x) { return Lanes<16>::exp(x); }

}  // namespace esp
