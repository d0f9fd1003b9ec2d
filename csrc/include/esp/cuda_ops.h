// The CUDA kernels' launches, on a cudaStream_t of the current device. They throw std::runtime_error.
#pragma once
#include "esp/advance_block.h"
#include "esp/commit_kv.h"
#include "esp/tree_attention.h"

namespace esp {

constexpr int kTreeAttentionSplits = 16;

// What the splits of the prefix leave for the tail, in powers of two: the highest score, the sum of weights,
// and the weighted sum of values. A split that no row uses is not written.
struct TreeAttentionParts {
  float *tops, *totals;  // [kTreeAttentionSplits, batch, rows, q_heads]
  float* sums;           // [kTreeAttentionSplits, batch, rows, q_heads, dim]
};

void advance_block_cuda(const AdvanceBlockArgs& args, void* stream);
void commit_kv_cuda(const CommitKvArgs& args, void* stream);

// bf16 and f16 on compute capability 9.0; q, keys and values have strides and addresses of multiples of 16
// bytes.
void tree_attention_cuda(const TreeAttentionArgs& args, int64_t page_count, const TreeAttentionParts& parts,
                         void* stream);

}  // namespace esp
