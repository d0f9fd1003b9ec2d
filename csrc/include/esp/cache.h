// A K or V cache [pages, page_size, heads, head_dim]: slot s of sequence b is row s % page_size of page
// block_table[b, s / page_size]. A dense cache [B, S, heads, head_dim] is one page of S slots a sequence.
#pragma once
#include "esp/types.h"

namespace esp {

struct Pages {
  int64_t count, page_size;
  const int32_t* block_table;  // [B, per_sequence], or null: sequence b owns page b
  int64_t per_sequence;

  ESP_INLINE int64_t capacity() const { return page_size * per_sequence; }
  ESP_INLINE int64_t page(int64_t b, int64_t slot) const {
    return block_table ? block_table[b * per_sequence + slot / page_size] : b;
  }
};

struct Cache {
  void* data;
  int64_t stride_page, stride_slot, stride_head;  // in elements

  ESP_INLINE int64_t offset(const Pages& pages, int64_t b, int64_t slot) const {
    return pages.page(b, slot) * stride_page + slot % pages.page_size * stride_slot;
  }
};

}  // namespace esp
