#pragma once
#include "esp/types.h"

namespace esp {

struct TreeAttentionArgs {
  DType dtype;           // of q, keys, values and out
  const void* q;         // [batch, rows, q_heads, dim]
  const void* keys;      // [pages, page_size, kv_heads, dim]
  const void* values;    // as keys
  const int32_t* pages;  // [batch, max_pages], of each page_size slots; null: page b holds sequence b
  const int32_t* prefix_len;  // [batch]
  const int64_t* ancestors;   // [batch, rows, words]: bit j % 64 of word j / 64 for row j
  const int32_t* depth;       // [batch, rows]
  const float* sinks;         // [q_heads] or null
  void* out;                  // [batch, rows, q_heads, dim] contiguous
  float* lse;                 // [batch, rows, q_heads]
  int64_t batch, rows, q_heads, kv_heads, dim, words, page_size, max_pages;
  int64_t q_strides[3];                     // batch, row, head; all strides in elements
  int64_t key_strides[3], value_strides[3];  // page, slot, head
  float scale;
  float softcap;   // 0: none
  int64_t window;  // 0: none
};

void tree_attention_cpu(const TreeAttentionArgs& args);

}  // namespace esp
