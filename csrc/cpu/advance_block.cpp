// One op after the other, on copies of what the next one reads: some hundred numbers each.
#include "esp/advance_block.h"

#include <algorithm>
#include <vector>

#include "esp/expand_tree.h"
#include "esp/tree_metadata.h"
#include "esp/update_probe.h"
#include "esp/verify_tree.h"

namespace esp {
namespace {

using Ints = std::vector<int32_t>;

void verify(const AdvanceBlockArgs& a, Ints& bonus) {
  Ints choice(a.batch * a.rows);
  for (size_t i = 0; i < choice.size(); ++i) choice[i] = a.ids[i * a.candidates];
  verify_tree_cpu({choice.data(), a.tokens, a.parent, a.mask_ordinal, a.path, a.accepted, bonus.data(),
                   a.batch, a.rows});
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t i = b * a.rows; i < (b + 1) * a.rows; ++i)
      a.committed[i] = a.path[i] < 0 ? -1 : choice[b * a.rows + a.path[i]];
}

// Puts the next tree, with the candidates of the masks of the deepest accepted row, in the place of this one.
void expand(const AdvanceBlockArgs& a, const Ints& bonus) {
  const int64_t level = a.masks * a.candidates, size = a.nodes * (a.masks + 1);
  Ints ids(a.batch * level), tokens(a.batch * size), parent(a.batch * size), mask_ordinal(a.batch * size);
  std::vector<float> logprobs(a.batch * level);
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t deepest = a.accepted[b] < 0 ? 0 : a.path[b * a.rows + a.accepted[b]];
    const int64_t first = (b * a.rows + a.nodes + deepest * a.masks) * a.candidates;
    std::copy_n(a.ids + first, level, ids.data() + b * level);
    std::copy_n(a.logprobs + first, level, logprobs.data() + b * level);
  }
  expand_tree_cpu({bonus.data(), ids.data(), logprobs.data(), tokens.data(), parent.data(),
                   mask_ordinal.data(), a.batch, a.masks, a.candidates, a.nodes, a.masks, a.widths,
                   a.width_levels, a.prune});
  const auto place = [&](const Ints& next, int32_t* rows, int32_t padding) {
    for (int64_t b = 0; b < a.batch; ++b, rows += a.rows) {
      std::copy_n(next.data() + b * size, size, rows);
      std::fill(rows + size, rows + a.rows, padding);
    }
  };
  place(tokens, a.tokens, -1);
  place(parent, a.parent, kPadding);
  place(mask_ordinal, a.mask_ordinal, -1);
}

}  // namespace

void advance_block_cpu(const AdvanceBlockArgs& a) {
  Ints bonus(a.batch);
  verify(a, bonus);
  if (a.lam != 0)
    update_probe_cpu({a.dtype, a.probe, a.batch, a.probe_masks, a.n, a.stride_batch, a.stride_mask,
                      a.embedding, a.stride_token, a.committed, a.rows, a.lam});
  expand(a, bonus);
  tree_metadata_cpu({a.parent, a.depth, a.ancestors, a.batch, a.rows, a.words});
}

}  // namespace esp
