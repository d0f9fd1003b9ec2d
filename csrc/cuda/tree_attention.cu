#include <algorithm>
#include <climits>

#include "esp/cuda_ops.h"
#include "esp/tree_attention_prefix.cuh"

namespace esp {
namespace {

#ifdef ESP_EMULATED
void require_hopper() {}
#else
void require_hopper() {
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device));
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major != 9 || minor != 0)
    throw std::runtime_error("tree_attention_cuda needs compute capability 9.0, got " +
                             std::to_string(major) + "." + std::to_string(minor));
}
#endif

template <typename T, int kDim, int kGroups>
void launch_prefix(const TreeAttentionParams& p, cudaStream_t stream) {
  using Shape = PrefixShape<kDim, kGroups>;
  const TreeAttentionArgs& a = p.args;
  const int64_t packed = a.rows * (a.q_heads / a.kv_heads);
  const dim3 grid{kTreeAttentionSplits, unsigned(a.batch * a.kv_heads),
                  unsigned((packed - 1) / Shape::kRows + 1)};
  launch(tree_attention_prefix_kernel<T, kDim, kGroups>, grid, Shape::kThreads, Shape::kBytes, stream, p);
}

template <typename T, int kDim>
void attend(const TreeAttentionParams& p, cudaStream_t stream) {
  const TreeAttentionArgs& a = p.args;
  const int64_t group = a.q_heads / a.kv_heads;
  if (a.rows * group <= kPanelRows) launch_prefix<T, kDim, 1>(p, stream);
  else launch_prefix<T, kDim, 2>(p, stream);

  const int warps = int(std::clamp<int64_t>(group, 4, kTailWarps));  // 4 at least, to load
  const dim3 grid{unsigned(a.rows * ((group - 1) / warps + 1)), unsigned(a.kv_heads), unsigned(a.batch)};
  launch(tree_attention_tail_kernel<T, kDim>, grid, warps * kWarp, Tail<T, kDim>::bytes(warps), stream, p);
}

template <typename T>
void attend(const TreeAttentionParams& p, cudaStream_t stream) {
  if (p.args.dim <= 64) attend<T, 64>(p, stream);
  else if (p.args.dim <= 128) attend<T, 128>(p, stream);
  else attend<T, 256>(p, stream);
}

}  // namespace

void tree_attention_cuda(const TreeAttentionArgs& args, int64_t page_count, const TreeAttentionParts& parts,
                         void* stream) {
  require_hopper();
  const int64_t slots = args.page_size * (args.pages == nullptr ? 1 : args.max_pages);
  TreeAttentionParams p{args, parts, int(page_count), int(std::min<int64_t>(slots, INT_MAX))};
  if (args.softcap == 0) {
    p.args.scale *= kLog2E;
  } else {
    p.args.scale /= args.softcap;
    p.args.softcap *= kLog2E;
  }
  p.args.window = std::min<int64_t>(args.window, INT_MAX);
  const auto s = static_cast<cudaStream_t>(stream);
  switch (args.dtype) {
    case DType::bf16: return attend<bf16>(p, s);
    case DType::f16: return attend<f16>(p, s);
    case DType::f32: throw std::runtime_error("tree_attention_cuda takes bfloat16 and float16");
  }
}

}  // namespace esp
