// Bytes: each row that moves, once in and once out. One sequence of one cache is one unit of work.
#include "esp/commit_kv.h"

#include <cstring>

namespace esp {
namespace {

// The path is strictly increasing from 0, so path[i] >= i: no row is overwritten before it has moved.
void commit(const CommitKvArgs& a, const CommitKvArgs::Target& target, int64_t b) {
  char* data = static_cast<char*>(target.cache.data);
  for (int64_t i = 1; i <= a.accepted[b]; ++i) {
    const int64_t row = a.path[b * a.length + i];
    const char* from = data + target.cache.offset(a.pages, b, a.prefix_len[b] + row);
    char* to = data + target.cache.offset(a.pages, b, a.prefix_len[b] + i);
    if (from == to) continue;
    for (int64_t h = 0; h < target.heads; ++h) {
      const int64_t head = h * target.cache.stride_head;
      std::memcpy(to + head, from + head, size_t(target.head_bytes));
    }
  }
}

}  // namespace

void commit_kv_cpu(const CommitKvArgs& a) {
#pragma omp parallel for schedule(static) if (a.bytes > 262144)
  for (int64_t i = 0; i < a.count * a.batch; ++i) commit(a, a.targets[i / a.batch], i % a.batch);
}

}  // namespace esp
