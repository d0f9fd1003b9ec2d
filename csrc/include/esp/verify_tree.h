#pragma once
#include <cstdint>

namespace esp {

struct VerifyTreeArgs {
  const int32_t* choice;        // [batch, rows], the model's own next token after each row
  const int32_t* tokens;        // [batch, rows]
  const int32_t* parent;        // [batch, rows], any value: only compared
  const int32_t* mask_ordinal;  // [batch, rows]; 0 for token rows, anything else in row 0 pads the sequence
  int32_t* path;                // [batch, rows], filled up with -1
  int32_t* accepted;            // [batch]
  int32_t* bonus;               // [batch]
  int64_t batch, rows;
};

void verify_tree_cpu(const VerifyTreeArgs& args);

}  // namespace esp
