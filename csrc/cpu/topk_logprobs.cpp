// Bytes: logits once. A row is one unit of work: it goes by in blocks that stay in L1, and its sum runs over
// sixteen fixed lanes of each block.
#include "esp/topk_logprobs.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "esp/cpu.h"

namespace esp {
namespace {

constexpr int kBlock = 512, kScan = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A candidate as one integer: the larger the better, first by its logit, then by its lower id. Both zeros
// are one logit.
ESP_INLINE uint64_t key_of(float logit, int64_t id) {
  const uint32_t u = bits_of(logit + 0.0f);
  const uint32_t ordered = u ^ (u >> 31 ? 0xffffffffu : 0x80000000u);
  return uint64_t(ordered) << 32 | uint32_t(~id);
}

ESP_INLINE float logit_of(uint64_t key) {
  const uint32_t ordered = uint32_t(key >> 32);
  return float_of(ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu));
}

template <typename V>
ESP_INLINE float max_of(const float* block) {
  constexpr int kLanes = sizeof(V) / sizeof(float);
  V lanes = load_as<V>(block);
  for (int i = kLanes; i < kBlock; i += kLanes) {
    const V x = load_as<V>(block + i);
    lanes = x > lanes ? x : lanes;
  }
  float highest = lanes[0];
  for (int j = 1; j < kLanes; ++j) highest = std::max(highest, lanes[j]);
  return highest;
}

// logit - highest, also where both are the same infinity.
template <typename V>
ESP_INLINE V below(V logit, float highest) {
  return logit == V{} + highest ? V{} : logit - highest;
}

template <typename V, typename I>
ESP_INLINE float sum_of_powers(const float* block, float highest) {
  constexpr int kLanes = sizeof(V) / sizeof(float), kParts = 16 / kLanes;
  V parts[kParts] = {};
  for (int i = 0; i < kBlock; i += 16)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p)
      parts[p] += exp_nonpositive<V, I>(below(load_as<V>(block + i + p * kLanes), highest));
  float lanes[16];
  std::memcpy(lanes, parts, sizeof lanes);
  for (int width = 8; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  return lanes[0];
}

// The k best of the candidates, first, in no order. They are pruned when they are more than 2 k, so that a
// candidate costs constant time.
struct Candidates {
  uint64_t keys[2 * kMaxTopk + kBlock];
  int64_t count = 0;
  float worst = std::numeric_limits<float>::quiet_NaN();  // a logit that is not above it cannot be among them

  void prune(int64_t k) {
    std::nth_element(keys, keys + k - 1, keys + count, std::greater<>());
    count = k;
    worst = logit_of(keys[k - 1]);
  }
};

ESP_INLINE void add(Candidates& candidates, const float* block, int64_t first) {
  for (int i = 0; i < kBlock; i += kScan) {
    int any = 0;
    for (int j = i; j < i + kScan; ++j) any |= !(block[j] <= candidates.worst);
    if (!any) continue;
    for (int j = i; j < i + kScan; ++j)
      if (!(block[j] <= candidates.worst)) candidates.keys[candidates.count++] = key_of(block[j], first + j);
  }
}

template <typename V, typename I, typename T>
ESP_INLINE void topk_row(const T* logits, int64_t n, int64_t k, float* logprobs, int32_t* ids) {
  alignas(64) float block[kBlock];
  Candidates candidates;
  float highest = -kInfinity;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t size = std::min<int64_t>(kBlock, n - begin);
    for (int64_t i = 0; i < size; ++i) {
      const float logit = load(logits[begin + i]);
      block[i] = logit == logit ? logit : -kInfinity;
    }
    std::fill(block + size, block + kBlock, -kInfinity);
    const float peak = max_of<V>(block);
    if (!(peak <= candidates.worst)) {
      add(candidates, block, begin);
      if (candidates.count > 2 * k) candidates.prune(k);
    }
    if (peak > highest) {
      total *= exp_nonpositive<float, int32_t>(highest - peak);
      highest = peak;
    }
    total += sum_of_powers<V, I>(block, highest);
  }
  candidates.prune(k);
  std::sort(candidates.keys, candidates.keys + k, std::greater<>());
  const float log_total = highest == -kInfinity ? kInfinity : float(std::log(total));
  for (int64_t i = 0; i < k; ++i) {
    logprobs[i] = below(logit_of(candidates.keys[i]), highest) - log_total;
    ids[i] = int32_t(~uint32_t(candidates.keys[i]));
  }
}

#define ESP_TOPK(T)                                                                                   \
  ESP_CLONES void wide_row(const T* logits, int64_t n, int64_t k, float* logprobs, int32_t* ids) {    \
    topk_row<f32x16, i32x16>(logits, n, k, logprobs, ids);                                            \
  }                                                                                                   \
  ESP_CLONES void narrow_row(const T* logits, int64_t n, int64_t k, float* logprobs, int32_t* ids) {  \
    topk_row<f32xn, i32xn>(logits, n, k, logprobs, ids);                                              \
  }
ESP_TOPK(float)
ESP_TOPK(bf16)
ESP_TOPK(f16)
#undef ESP_TOPK

template <typename T>
void topk_rows(const TopkLogprobsArgs& a) {
  using Row = void (*)(const T*, int64_t, int64_t, float*, int32_t*);
  const Row topk = wide_registers() ? Row(wide_row) : Row(narrow_row);
#pragma omp parallel for schedule(static) if (a.rows * a.n > 16384)
  for (int64_t row = 0; row < a.rows; ++row)
    topk(static_cast<const T*>(a.logits) + row * a.stride_logits, a.n, a.k, a.logprobs + row * a.k,
         a.ids + row * a.k);
}

}  // namespace

void topk_logprobs_cpu(const TopkLogprobsArgs& a) {
  switch (a.dtype) {
    case DType::f32: return topk_rows<float>(a);
    case DType::bf16: return topk_rows<bf16>(a);
    case DType::f16: return topk_rows<f16>(a);
  }
}

}  // namespace esp
