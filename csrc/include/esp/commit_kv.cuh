// commit_kv on a GPU: all caches in one launch. Their addresses and strides travel in the kernel's
// parameters, so there is no table to fill and a CUDA graph holds it all.
//
// Bytes: each row that moves, once in and once out. A thread owns one column (16 bytes where all is aligned,
// else one) of one cache and moves it down the path in order; no other thread reads or writes it.
#pragma once
#include "esp/commit_kv.h"
#include "esp/cuda.h"

namespace esp {

constexpr int kCommitThreads = 128;
constexpr int kCommitAhead = 4;  // rows in flight

// Targets in 4 KB of parameters, and in the 32 KB that CUDA has since 12.1.
constexpr int kCommitFew = 80, kCommitMany = 640;

template <int kTargets>
struct CommitKvParams {
  CommitKvArgs args;
  CommitKvArgs::Target target[kTargets];
};
static_assert(sizeof(CommitKvParams<kCommitFew>) <= 4096 && sizeof(CommitKvParams<kCommitMany>) <= 32764);

template <int kTargets, typename Unit>
__global__ void __launch_bounds__(kCommitThreads)
    commit_kv_kernel(const __grid_constant__ CommitKvParams<kTargets> params) {
  const CommitKvArgs& a = params.args;
  const CommitKvArgs::Target& target = params.target[blockIdx.y];
  const int64_t b = blockIdx.z, column = int64_t(blockIdx.x) * kCommitThreads + threadIdx.x;
  const int64_t columns = target.head_bytes / int64_t(sizeof(Unit));
  const int moves = int(a.accepted[b] < a.length ? a.accepted[b] : a.length - 1);
  if (column >= target.heads * columns) return;
  char* data = static_cast<char*>(target.cache.data) + column / columns * target.cache.stride_head +
               column % columns * int64_t(sizeof(Unit));
  const int32_t* path = a.path + b * a.length;
  // Null for what does not lie in the cache; it stays where it is.
  const auto at = [&](int64_t row) -> Unit* {
    const int64_t slot = a.prefix_len[b] + row;
    if (slot < 0 || slot >= a.pages.capacity()) return nullptr;
    const int64_t page = a.pages.page(b, slot);
    if (page < 0 || page >= a.pages.count) return nullptr;
    return reinterpret_cast<Unit*>(data + target.cache.offset(a.pages, b, slot));
  };

  // The path is strictly increasing from 0, so path[i] >= i: what is overwritten is no later row's source,
  // and rows may be read ahead.
  for (int first = 1; first <= moves; first += kCommitAhead) {
    Unit moved[kCommitAhead];
    Unit* to[kCommitAhead];
    ESP_UNROLL(kCommitAhead)
    for (int i = 0; i < kCommitAhead; ++i) {
      const int row = first + i;
      const int source = row <= moves ? path[row] : row;
      const Unit* from = source > row ? at(source) : nullptr;
      to[i] = from ? at(row) : nullptr;
      if (to[i]) moved[i] = *from;
    }
    ESP_UNROLL(kCommitAhead)
    for (int i = 0; i < kCommitAhead; ++i)
      if (to[i]) *to[i] = moved[i];
  }
}

}  // namespace esp
