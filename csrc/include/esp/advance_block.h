#pragma once
#include "esp/types.h"

namespace esp {

struct AdvanceBlockArgs {
  const int32_t* ids;     // [batch, rows, candidates], best first: the first is the model's choice
  const float* logprobs;  // [batch, rows, candidates], descending
  int32_t* tokens;        // [batch, rows], as are the next three: the block that was run, then the next one
  int32_t* parent;
  int32_t* mask_ordinal;
  int32_t* depth;
  int64_t* ancestors;  // [batch, rows, words]
  int32_t* path;       // [batch, rows], filled up with -1
  int32_t* accepted;   // [batch]
  int32_t* committed;  // [batch, rows], filled up with -1
  int64_t batch, rows, words, candidates, nodes, masks;
  const int64_t* widths;  // [width_levels] drafts a level, their sum nodes - 1, or null: best first
  int64_t width_levels;
  bool prune;

  DType dtype;   // of embedding
  float* probe;  // [batch, probe_masks, n]
  int64_t probe_masks, n, stride_batch, stride_mask;
  const void* embedding;  // [vocabulary, n]
  int64_t vocabulary, stride_token;
  float lam;
};

void advance_block_cpu(const AdvanceBlockArgs& args);

}  // namespace esp
