// A child comes after its parent, so one pass over the rows meets the whole walk in order.
#include "esp/verify_tree.h"

#include <algorithm>

namespace esp {
namespace {

void sequence(const VerifyTreeArgs& a, int64_t b) {
  const int32_t *choice = a.choice + b * a.rows, *tokens = a.tokens + b * a.rows;
  const int32_t *parent = a.parent + b * a.rows, *mask_ordinal = a.mask_ordinal + b * a.rows;
  int32_t* path = a.path + b * a.rows;
  std::fill_n(path, a.rows, -1);
  a.accepted[b] = a.bonus[b] = -1;
  if (a.rows == 0 || mask_ordinal[0] != 0) return;

  int32_t current = 0, accepted = 0;
  path[0] = 0;
  for (int32_t r = 1; r < a.rows; ++r) {
    if (parent[r] != current || mask_ordinal[r] != 0 || tokens[r] != choice[current]) continue;
    current = r;
    path[++accepted] = r;
  }
  a.accepted[b] = accepted;
  a.bonus[b] = choice[current];
}

}  // namespace

void verify_tree_cpu(const VerifyTreeArgs& a) {
#pragma omp parallel for schedule(static) if (a.batch > 1 && a.batch * a.rows > 65536)
  for (int64_t b = 0; b < a.batch; ++b) sequence(a, b);
}

}  // namespace esp
