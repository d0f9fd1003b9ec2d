#pragma once
#include "esp/types.h"

namespace esp {

struct EmbedBlockArgs {
  DType dtype;
  int64_t batch, rows, n;
  const int32_t* tokens;        // [batch, rows]
  const int32_t* mask_ordinal;  // [batch, rows]: 0 a token, i >= 1 mask i, -1 nothing
  const void* embedding;        // [vocabulary, n]
  int64_t stride_token;
  const float* probe;  // [batch, masks, n]
  int64_t stride_batch, stride_mask;
  void* x;  // [batch, rows, n] contiguous
};

void embed_block_cpu(const EmbedBlockArgs& args);

}  // namespace esp
