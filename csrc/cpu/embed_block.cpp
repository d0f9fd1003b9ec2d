// Bytes: one embedding or probe row in and one row out, for every row of the block.
#include "esp/embed_block.h"

#include "esp/cpu.h"

namespace esp {
namespace {

template <typename T>
ESP_INLINE void round_row(const float* x, T* y, int64_t n) {
  const int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) store16(y + i, load16(x + i));
  for (int64_t i = whole; i < n; ++i) y[i] = store<T>(x[i]);
}

#define ESP_ROUND(T) \
  ESP_CLONES void round(const float* x, T* y, int64_t n) { round_row(x, y, n); }
ESP_ROUND(float)
ESP_ROUND(bf16)
ESP_ROUND(f16)
#undef ESP_ROUND

template <typename T>
void embed_row(const EmbedBlockArgs& a, int64_t b, int64_t r) {
  const int64_t i = b * a.rows + r, ordinal = a.mask_ordinal[i];
  T* x = static_cast<T*>(a.x) + i * a.n;
  if (ordinal > 0) return round(a.probe + b * a.stride_batch + (ordinal - 1) * a.stride_mask, x, a.n);
  if (ordinal < 0) {
    std::memset(x, 0, size_t(a.n) * sizeof(T));
    return;
  }
  std::memcpy(x, static_cast<const T*>(a.embedding) + a.tokens[i] * a.stride_token, size_t(a.n) * sizeof(T));
}

template <typename T>
void embed_rows(const EmbedBlockArgs& a) {
#pragma omp parallel for schedule(static) if (a.batch * a.rows * a.n > 65536)
  for (int64_t i = 0; i < a.batch * a.rows; ++i) embed_row<T>(a, i / a.rows, i % a.rows);
}

}  // namespace

void embed_block_cpu(const EmbedBlockArgs& a) {
  switch (a.dtype) {
    case DType::f32: return embed_rows<float>(a);
    case DType::bf16: return embed_rows<bf16>(a);
    case DType::f16: return embed_rows<f16>(a);
  }
}

}  // namespace esp
