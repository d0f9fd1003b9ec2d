#pragma once
#include "esp/cache.h"

namespace esp {

struct RopeAppendArgs {
  struct Rows {
    const void* data;                               // [batch, rows, heads, head_dim]
    int64_t stride_batch, stride_row, stride_head;  // in elements
  };
  DType dtype;
  int64_t batch, rows, q_heads, kv_heads, head_dim;
  Rows q, k, v;
  const float *cos, *sin;     // [positions, half]
  int64_t half;               // the first 2 * half dimensions of a head rotate
  const int32_t* prefix_len;  // [batch]
  const int32_t* depth;       // [batch, rows], below 0 for a row that does not exist
  Cache k_cache, v_cache;
  Pages pages;
  void* rotated;  // [batch, rows, q_heads, head_dim] contiguous
};

void rope_append_cpu(const RopeAppendArgs& args);

}  // namespace esp
