#pragma once
#include "esp/types.h"

namespace esp {

constexpr int kMaxTopk = 256;

struct TopkLogprobsArgs {
  DType dtype;
  const void* logits;  // [rows, n], rows stride_logits elements apart
  float* logprobs;     // [rows, k] contiguous
  int32_t* ids;        // [rows, k] contiguous
  int64_t rows, n, k, stride_logits;  // 1 <= k <= min(n, kMaxTopk)
};

void topk_logprobs_cpu(const TopkLogprobsArgs& args);

}  // namespace esp
