#pragma once
#include "esp/cache.h"

namespace esp {

struct CommitKvArgs {
  struct Target {
    Cache cache;  // strides in BYTES
    int64_t heads, head_bytes;
  };
  const Target* targets;
  int64_t count;
  Pages pages;
  const int32_t* path;        // [batch, length], strictly increasing from path[b, 0] = 0
  const int32_t* accepted;    // [batch]
  const int32_t* prefix_len;  // [batch]
  int64_t batch, length;
  int64_t bytes;  // to be moved in all, at most
};

void commit_kv_cpu(const CommitKvArgs& args);

}  // namespace esp
