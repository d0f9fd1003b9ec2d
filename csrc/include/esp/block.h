// What `parent` holds for a row that hangs from no other; esp_kernels/_block.py has the same.
#pragma once
#include <cstdint>

namespace esp {

constexpr int32_t kRoot = -1;
constexpr int32_t kPadding = -2;

}  // namespace esp
