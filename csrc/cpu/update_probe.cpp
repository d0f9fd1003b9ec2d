// Bytes: the probe once in and once out, each committed embedding once a probe vector. A probe vector is one
// unit of work; sixteen of its elements stay in registers while every token is applied to them.
#include "esp/update_probe.h"

#include "esp/cpu.h"

namespace esp {
namespace {

ESP_INLINE f32x16 toward(f32x16 probe, f32x16 target, float lam) { return probe + lam * (target - probe); }

template <typename T>
ESP_INLINE void update_vector(float* probe, const T* embedding, int64_t stride_token,
                              const int32_t* committed, int64_t length, int64_t n, float lam) {
  const int64_t whole = n / 16 * 16, rest = n - whole;
  for (int64_t i = 0; i < whole; i += 16) {
    f32x16 p = load16(probe + i);
    for (int64_t c = 0; c < length; ++c)
      if (committed[c] >= 0) p = toward(p, load16(embedding + committed[c] * stride_token + i), lam);
    store16(probe + i, p);
  }
  if (rest > 0) {
    f32x16 p = load_first(probe + whole, rest);
    for (int64_t c = 0; c < length; ++c)
      if (committed[c] >= 0)
        p = toward(p, load_first(embedding + committed[c] * stride_token + whole, rest), lam);
    store_first(probe + whole, p, rest);
  }
}

#define ESP_UPDATE(T)                                                                                    \
  ESP_CLONES void update(float* probe, const T* embedding, int64_t stride_token, const int32_t* committed, \
                         int64_t length, int64_t n, float lam) {                                         \
    update_vector(probe, embedding, stride_token, committed, length, n, lam);                            \
  }
ESP_UPDATE(float)
ESP_UPDATE(bf16)
ESP_UPDATE(f16)
#undef ESP_UPDATE

template <typename T>
void update_vectors(const UpdateProbeArgs& a) {
#pragma omp parallel for schedule(static) if (a.batch * a.masks * a.length * a.n > 65536)
  for (int64_t i = 0; i < a.batch * a.masks; ++i) {
    const int64_t b = i / a.masks, mask = i % a.masks;
    update(a.probe + b * a.stride_batch + mask * a.stride_mask, static_cast<const T*>(a.embedding),
           a.stride_token, a.committed + b * a.length, a.length, a.n, a.lam);
  }
}

}  // namespace

void update_probe_cpu(const UpdateProbeArgs& a) {
  switch (a.dtype) {
    case DType::f32: return update_vectors<float>(a);
    case DType::bf16: return update_vectors<bf16>(a);
    case DType::f16: return update_vectors<f16>(a);
  }
}

}  // namespace esp
