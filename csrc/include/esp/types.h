// Element types as raw bits. No torch headers: these files also compile for CUDA and for the CPU emulator.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ESP_INLINE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define ESP_INLINE inline __attribute__((always_inline))
#else
#define ESP_INLINE inline
#endif

namespace esp {

enum class DType { f32, bf16, f16 };

struct bf16 {
  uint16_t bits;
};

struct f16 {
  uint16_t bits;
};

ESP_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

ESP_INLINE float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

ESP_INLINE float load(float x) { return x; }

ESP_INLINE float load(bf16 x) { return float_of(uint32_t(x.bits) << 16); }

// Branch-free, so that loops over it vectorise: rebias the exponent with one multiplication, which also
// normalises subnormals, then restore infinities and NaNs.
ESP_INLINE float load(f16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  const float scaled = float_of(magnitude) * 0x1p112f;
  const uint32_t special = scaled >= 65536.0f ? 0x7f800000u : 0u;
  return float_of(bits_of(scaled) | special | (uint32_t(x.bits & 0x8000) << 16));
}

template <typename T>
T store(float x);

template <>
ESP_INLINE float store<float>(float x) {
  return x;
}

template <>
ESP_INLINE bf16 store<bf16>(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const uint32_t quiet_nan = (u >> 16) | 0x40;
  return {uint16_t((u & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded)};
}

// Adding a power of two that aligns the result's last bit makes the FPU round to nearest even.
template <>
ESP_INLINE f16 store<f16>(float x) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  const float aligned = float_of(magnitude) + 0.5f;
  const uint32_t subnormal = bits_of(aligned) - bits_of(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
  return {uint16_t(sign | (magnitude >= 0x477ff000 ? special : finite))};
}

}  // namespace esp
