#pragma once
#include "esp/block.h"

namespace esp {

struct ExpandTreeArgs {
  const int32_t* root;    // [batch], negative for a padded sequence
  const int32_t* ids;     // [batch, levels, candidates], negative for no candidate
  const float* logprobs;  // [batch, levels, candidates], descending in each level
  int32_t* tokens;        // [batch, nodes * (masks + 1)], as are the next two
  int32_t* parent;
  int32_t* mask_ordinal;
  int64_t batch, levels, candidates, nodes, masks;
  const int64_t* widths;  // [width_levels] drafts a level, their sum nodes - 1, or null: best first
  int64_t width_levels;
  bool prune;
};

void expand_tree_cpu(const ExpandTreeArgs& args);

}  // namespace esp
