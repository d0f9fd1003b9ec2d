// Parents come before their children, so one pass over the rows extends each parent's words by one bit.
#include "esp/tree_metadata.h"

#include <algorithm>

namespace esp {
namespace {

void sequence(const int32_t* parent, int32_t* depth, int64_t* ancestors, int64_t rows, int64_t words) {
  std::fill_n(ancestors, rows * words, 0);
  for (int64_t r = 0; r < rows; ++r) {
    depth[r] = -1;
    if (parent[r] == kPadding) continue;
    int64_t* own = ancestors + r * words;
    if (parent[r] != kRoot) {
      depth[r] = depth[parent[r]];
      std::copy_n(ancestors + parent[r] * words, words, own);
    }
    ++depth[r];
    own[r / 64] |= int64_t(uint64_t{1} << r % 64);
  }
}

}  // namespace

void tree_metadata_cpu(const TreeMetadataArgs& a) {
#pragma omp parallel for schedule(static) if (a.batch > 1 && a.batch * a.rows * a.words > 65536)
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t first = b * a.rows;
    sequence(a.parent + first, a.depth + first, a.ancestors + first * a.words, a.rows, a.words);
  }
}

}  // namespace esp
