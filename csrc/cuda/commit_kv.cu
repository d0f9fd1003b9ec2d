#include "esp/commit_kv.cuh"

#include <algorithm>

#include "esp/cuda_ops.h"

namespace esp {
namespace {

bool aligned(const CommitKvArgs& a, int64_t bytes) {
  return std::all_of(a.targets, a.targets + a.count, [&](const CommitKvArgs::Target& t) {
    const int64_t address = reinterpret_cast<intptr_t>(t.cache.data);
    const int64_t strides = t.cache.stride_page | t.cache.stride_slot | t.cache.stride_head;
    return (address | strides | t.head_bytes) % bytes == 0;
  });
}

template <int kTargets, typename Unit>
void commit(const CommitKvArgs& a, cudaStream_t stream) {
  for (int64_t first = 0; first < a.count; first += kTargets) {
    const int64_t count = std::min<int64_t>(kTargets, a.count - first);
    CommitKvParams<kTargets> params{};
    params.args = a;
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
      params.target[i] = a.targets[first + i];
      bytes = std::max(bytes, params.target[i].heads * params.target[i].head_bytes);
    }
    const int64_t columns = bytes / int64_t(sizeof(Unit));
    if (columns == 0) continue;
    const dim3 grid{unsigned((columns - 1) / kCommitThreads + 1), unsigned(count), unsigned(a.batch)};
    launch(commit_kv_kernel<kTargets, Unit>, grid, kCommitThreads, 0, stream, params);
  }
}

template <int kTargets>
void commit_units(const CommitKvArgs& a, cudaStream_t stream) {
  if (aligned(a, sizeof(uint4))) commit<kTargets, uint4>(a, stream);
  else commit<kTargets, uint8_t>(a, stream);
}

}  // namespace

void commit_kv_cuda(const CommitKvArgs& a, void* stream) {
  if (a.batch == 0 || a.length < 2) return;
  const auto s = static_cast<cudaStream_t>(stream);
  if (a.count <= kCommitFew) commit_units<kCommitFew>(a, s);
  else commit_units<kCommitMany>(a, s);
}

}  // namespace esp
