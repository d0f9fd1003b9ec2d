#include "esp/remember_block.h"

namespace esp {
namespace {

// The history's end, then the drafts down to row r of a sequence; the root is in the history.
Context context_of(const Sequence& memory, const int32_t* tokens, const int32_t* parent, int64_t r) {
  int32_t path[kOrders];
  int drafts = 0;
  for (; parent[r] >= 0 && drafts < kOrders; r = parent[r]) path[drafts++] = tokens[r];
  Context context = memory.end();
  while (drafts > 0) context.push(path[--drafts]);
  return context;
}

}  // namespace

void remember_block_cpu(const RememberBlockArgs& a) {
#pragma omp parallel for schedule(dynamic)
  for (int64_t b = 0; b < a.batch; ++b) {
    Sequence memory(a.memory, b);
    const int32_t *tokens = a.tokens + b * a.rows, *parent = a.parent + b * a.rows;
    for (int64_t r = 0; r < a.rows; ++r) {
      if (a.mask_ordinal[b * a.rows + r] != 0) continue;
      const int64_t first = (b * a.rows + r) * a.candidates;
      memory.keep(context_of(memory, tokens, parent, r), a.ids + first, a.logprobs + first, a.candidates);
    }
    for (int64_t i = 0; i < a.steps; ++i)
      if (a.committed[b * a.steps + i] >= 0) memory.append(a.committed[b * a.steps + i]);
  }
}

}  // namespace esp
