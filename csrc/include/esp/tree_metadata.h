#pragma once
#include "esp/block.h"

namespace esp {

struct TreeMetadataArgs {
  const int32_t* parent;  // [batch, rows]; kRoot, kPadding or an earlier row that is no padding
  int32_t* depth;         // [batch, rows]; -1 for padding
  int64_t* ancestors;     // [batch, rows, words]
  int64_t batch, rows, words;
};

void tree_metadata_cpu(const TreeMetadataArgs& args);

}  // namespace esp
