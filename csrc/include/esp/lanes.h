// Vectors of N floats. GCC keeps a vector wider than the target's registers in memory, many times slower, so
// a hot kernel is a template over N and every target gets its own width.
#pragma once
#include <cstdint>
#include <cstring>

#include "esp/cpu.h"
#include "esp/types.h"

// Defines void name(parameters), which calls name_lanes<N>(arguments) with the width of the processor at
// hand. Everything that it calls must be ESP_INLINE; OpenMP regions stay outside.
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(ESP_NO_CLONES)
#define ESP_PER_WIDTH(name, parameters, arguments)                                                \
  __attribute__((target("arch=x86-64-v4"))) void name parameters { name##_lanes<16> arguments; } \
  __attribute__((target("arch=x86-64-v3"))) void name parameters { name##_lanes<8> arguments; }  \
  __attribute__((target("default"))) void name parameters { name##_lanes<4> arguments; }
#elif defined(__AVX512F__)
#define ESP_PER_WIDTH(name, parameters, arguments) void name parameters { name##_lanes<16> arguments; }
#elif defined(__AVX__)
#define ESP_PER_WIDTH(name, parameters, arguments) void name parameters { name##_lanes<8> arguments; }
#else
#define ESP_PER_WIDTH(name, parameters, arguments) void name parameters { name##_lanes<4> arguments; }
#endif

namespace esp {

// The attributes of a type cannot depend on a template's parameter. `Any` types are for any address and
// whatever is stored there; a memcpy would be split up for the narrowest target.
template <int N>
struct Vectors;

#define ESP_VECTORS(N)                                                        \
  template <>                                                                 \
  struct Vectors<N> {                                                         \
    typedef float F __attribute__((vector_size(4 * N)));                      \
    typedef int32_t I __attribute__((vector_size(4 * N)));                    \
    typedef uint32_t U __attribute__((vector_size(4 * N)));                   \
    typedef uint16_t H __attribute__((vector_size(2 * N)));                   \
    typedef F AnyF __attribute__((aligned(4), may_alias));                    \
    typedef I AnyI __attribute__((aligned(4), may_alias));                    \
    typedef H AnyH __attribute__((aligned(2), may_alias));                    \
  };
ESP_VECTORS(4)
ESP_VECTORS(8)
ESP_VECTORS(16)
#undef ESP_VECTORS

template <int N>
struct Lanes {
  using V = Vectors<N>;
  using F = typename V::F;
  using I = typename V::I;
  using U = typename V::U;

  ESP_INLINE static F load(const float* p) { return *reinterpret_cast<const typename V::AnyF*>(p); }

  ESP_INLINE static I load(const int32_t* p) { return *reinterpret_cast<const typename V::AnyI*>(p); }

  ESP_INLINE static F load(const bf16* p) {
    return F(__builtin_convertvector(*reinterpret_cast<const typename V::AnyH*>(p), U) << 16);
  }

  ESP_INLINE static F load(const f16* p) {
    const U half = __builtin_convertvector(*reinterpret_cast<const typename V::AnyH*>(p), U);
    const F scaled = F((half & 0x7fff) << 13) * 0x1p112f;
    const U special = scaled >= 65536.0f ? U{} + 0x7f800000u : U{};
    return F(U(scaled) | special | (half & 0x8000) << 16);
  }

  ESP_INLINE static void store(float* p, F x) { *reinterpret_cast<typename V::AnyF*>(p) = x; }

  template <typename T>
  ESP_INLINE static void store(T* p, F x) {
    float value[N];
    store(value, x);
    for (int i = 0; i < N; ++i) p[i] = esp::store<T>(value[i]);
  }

  ESP_INLINE static F max(F a, F b) { return a > b ? a : b; }

  // Over the lanes, by halves.
  ESP_INLINE static float sum(F x) {
    if constexpr (N == 4) return (x[0] + x[2]) + (x[1] + x[3]);
    else return Lanes<N / 2>::sum(low(x) + high(x));
  }

  ESP_INLINE static float max(F x) {
    if constexpr (N == 4) {
      const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
      return a > b ? a : b;
    } else {
      return Lanes<N / 2>::max(Lanes<N / 2>::max(low(x), high(x)));
    }
  }

  ESP_INLINE static F exp(F x) { return exp_nonpositive<F, I>(x); }

  // tanh x: a polynomial near 0, where 1 - e^(-2|x|) would cancel; below 2 ulp.
  ESP_INLINE static F tanh(F x) {
    const F size = x < 0.0f ? -x : x, square = x * x;
    F p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const F near = p * square * x + x;
    const F e = exp(size * -2.0f);
    const F far = (1.0f - e) / (1.0f + e);
    return size < 0.625f ? near : x < 0.0f ? -far : far;
  }

 private:
  using Half = typename Vectors<N == 4 ? 4 : N / 2>::F;

  ESP_INLINE static Half low(F x) {
    Half half;
    std::memcpy(&half, &x, sizeof half);
    return half;
  }

  ESP_INLINE static Half high(F x) {
    Half half;
    std::memcpy(&half, reinterpret_cast<const char*>(&x) + sizeof half, sizeof half);
    return half;
  }
};

}  // namespace esp
