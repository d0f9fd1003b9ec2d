// Online softmax by chunks of 64 slots, and the merge of its parts.
#pragma once
#include <algorithm>
#include <array>
#include <limits>

#include "esp/lanes.h"
#include "tree_attention_multiply.h"

namespace esp {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// What is known of the softmax of queries: maximum, sum of e^(score - maximum), and sum of that times value.
struct Sums {
  float* max;    // [queries]
  float* sum;    // [queries]
  float* value;  // [queries, dim]

  Sums of(int64_t query, int64_t dim) const { return {max + query, sum + query, value + query * dim}; }
};

void clear(Sums sums, int64_t queries, int64_t dim) {
  std::fill_n(sums.max, queries, kNothing);
  std::fill_n(sums.sum, queries, 0.0f);
  std::fill_n(sums.value, queries * dim, 0.0f);
}

template <int N>
ESP_INLINE float exp_one(float x) {
  return Lanes<N>::exp(x + typename Lanes<N>::F{})[0];
}

template <int N>
ESP_INLINE void scale_row(float* x, float by, int64_t n) {
  for (int64_t i = 0; i < n; i += N) Lanes<N>::store(x + i, Lanes<N>::load(x + i) * by);
}

// From kChunk - i on, the masks of slots 0, 1, ... being below i.
constexpr auto kBelow = [] {
  std::array<int32_t, 2 * kChunk> below{};
  for (size_t i = 0; i < size_t(kChunk); ++i) below[i] = -1;
  return below;
}();

// -inf in those slots first, first + 1, ... of x that are not in [low, high).
template <int N>
ESP_INLINE typename Lanes<N>::F keep(typename Lanes<N>::F x, int64_t first, int32_t low, int32_t high) {
  using I = typename Lanes<N>::I;
  const I seen = Lanes<N>::load(kBelow.data() + kChunk - high + first) &
                 ~Lanes<N>::load(kBelow.data() + kChunk - low + first);
  return typename Lanes<N>::F((I(x) & seen) | (~seen & int32_t(0xff800000)));
}

template <int N>
ESP_INLINE void soften_lanes(float* products, float scale, float softcap, const int32_t* low,
                             const int32_t* high, int64_t queries, int64_t group, Sums sums, int64_t dim) {
  using L = Lanes<N>;
  constexpr int kParts = kChunk / N;
  for (int64_t i = 0; i < queries; ++i) {
    float* row = products + i * kChunk;
    typename L::F x[kParts], top[kParts];
    for (int j = 0; j < kParts; ++j) {
      x[j] = L::load(row + j * N) * scale;
      if (softcap > 0) x[j] = L::tanh(x[j] / softcap) * softcap;
      if (low != nullptr) x[j] = keep<N>(x[j], j * N, low[i / group], high[i / group]);
      top[j] = x[j];
    }
    for (int w = kParts / 2; w > 0; w /= 2)
      for (int j = 0; j < w; ++j) top[j] = L::max(top[j], top[j + w]);
    const float old = sums.max[i], highest = L::max(top[0]), max = highest > old ? highest : old;
    // While nothing was seen, every e^(-inf - 0) is 0.
    const float shift = max == kNothing ? 0.0f : max;
    for (int j = 0; j < kParts; ++j) {
      x[j] = L::exp(x[j] - shift);
      L::store(row + j * N, x[j]);
    }
    for (int w = kParts / 2; w > 0; w /= 2)
      for (int j = 0; j < w; ++j) x[j] += x[j + w];
    if (max != old) {
      const float fade = exp_one<N>(old - max);
      sums.sum[i] *= fade;
      scale_row<N>(sums.value + i * dim, fade, dim);
      sums.max[i] = max;
    }
    sums.sum[i] += L::sum(x[0]);
  }
}

// One online step: products [queries, 64] become e^(score - maximum). Query i sees slots [low, high) of block
// row i / group, every slot if these are null; what it does not see counts as -inf.
ESP_PER_WIDTH(soften,
              (float* products, float scale, float softcap, const int32_t* low, const int32_t* high,
               int64_t queries, int64_t group, Sums sums, int64_t dim),
              (products, scale, softcap, low, high, queries, group, sums, dim))

template <int N>
ESP_INLINE void merge_lanes(Sums into, Sums part, int64_t queries, int64_t dim) {
  using L = Lanes<N>;
  for (int64_t i = 0; i < queries; ++i) {
    if (part.sum[i] == 0) continue;
    const float max = part.max[i] > into.max[i] ? part.max[i] : into.max[i];
    const float mine = exp_one<N>(into.max[i] - max), other = exp_one<N>(part.max[i] - max);
    float* x = into.value + i * dim;
    const float* y = part.value + i * dim;
    for (int64_t d = 0; d < dim; d += N) L::store(x + d, L::load(x + d) * mine + L::load(y + d) * other);
    into.sum[i] = into.sum[i] * mine + part.sum[i] * other;
    into.max[i] = max;
  }
}

// `into` takes `part` in; exact where either saw nothing.
ESP_PER_WIDTH(merge, (Sums into, Sums part, int64_t queries, int64_t dim), (into, part, queries, dim))

template <int N>
ESP_INLINE void add_sink_lanes(float logit, Sums into, int64_t dim) {
  const float max = logit > *into.max ? logit : *into.max, fade = exp_one<N>(*into.max - max);
  *into.sum = *into.sum * fade + exp_one<N>(logit - max);
  *into.max = max;
  scale_row<N>(into.value, fade, dim);
}

// A logit without a value joins the softmax of one query.
ESP_PER_WIDTH(add_sink, (float logit, Sums into, int64_t dim), (logit, into, dim))

template <int N, typename T>
ESP_INLINE void divide_lanes(const float* x, float by, T* out, int64_t dim) {
  for (int64_t d = 0; d < dim; d += N) Lanes<N>::store(out + d, Lanes<N>::load(x + d) / by);
}

#define ESP_DIVIDE(T) \
  ESP_PER_WIDTH(divide, (const float* x, float by, T* out, int64_t dim), (x, by, out, dim))
ESP_DIVIDE(float)
ESP_DIVIDE(bf16)
ESP_DIVIDE(f16)
#undef ESP_DIVIDE

}  // namespace
}  // namespace esp
