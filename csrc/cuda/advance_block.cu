#include "esp/advance_block.cuh"

#include "esp/cuda_ops.h"

namespace esp {
namespace {

constexpr int kPack = 4;

template <typename T, int V>
void advance(const AdvanceBlockArgs& a, cudaStream_t stream) {
  AdvanceBlockParams params{a, {}};
  for (int64_t i = 0; i < a.width_levels; ++i) params.width[i] = int16_t(a.widths[i]);
  launch(advance_block_kernel<T, V>, {unsigned(a.batch)}, kAdvanceThreads, Scratch::bytes(a), stream, params);
}

template <typename T>
bool packs(const AdvanceBlockArgs& a) {
  const auto fits = [](const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
  return (a.n | a.stride_batch | a.stride_mask | a.stride_token) % kPack == 0 &&
         fits(a.probe, kPack * sizeof(float)) && fits(a.embedding, kPack * sizeof(T));
}

template <typename T>
void advance(const AdvanceBlockArgs& a, cudaStream_t stream) {
  if (packs<T>(a)) advance<T, kPack>(a, stream);
  else advance<T, 1>(a, stream);
}

}  // namespace

void advance_block_cuda(const AdvanceBlockArgs& a, void* stream) {
  if (a.batch == 0) return;
  const auto s = static_cast<cudaStream_t>(stream);
  switch (a.dtype) {
    case DType::f32: return advance<float>(a, s);
    case DType::bf16: return advance<bf16>(a, s);
    case DType::f16: return advance<f16>(a, s);
  }
}

}  // namespace esp
