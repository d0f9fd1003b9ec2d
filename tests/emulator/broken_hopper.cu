// Products of a warpgroup, right and wrong, that test the emulator's models of Hopper.
#include <exception>
#include <utility>

#include "esp/hopper.cuh"

namespace {

using namespace esp;

struct Params {
  const bf16 *a, *b;  // [64, 64]
  float* out;         // [64, 64]
};

enum Flaw {
  kNone,
  kNotInitialised,
  kNotWaitedFor,
  kWrongParity,
  kNoProxyFence,
  kNoRegisterFence,
  kNotCommitted,
  kReadTooEarly,
  kOverwritten,
  kOtherSwizzle,
  kOneThreadStaysAway,
  kNeverArrives,
};

ESP_DEVICE void load(const bf16* from, unsigned char* panel, bool swizzled) {
  for (int i = threadIdx.x; i < kPanelRows * 8; i += kWarpgroup) {
    unsigned char* to = swizzled ? panel_chunk(panel, i / 8, i % 8) : panel + i * 16;
    copy_async(to, from + i * 8, true);
  }
}

// The first 64 columns of b's rows, or, with kRegisters, a's rows as weights of b's.
template <int kFlaw, bool kRegisters>
__global__ void product(const __grid_constant__ Params params) {
  const int thread = threadIdx.x;
  unsigned char *a = dynamic_shared(), *b = a + kPanelBytes;
  auto* landed = reinterpret_cast<uint64_t*>(b + kPanelBytes);
  if (thread == 0 && kFlaw != kNotInitialised) mbarrier_init(landed, kWarpgroup);
  __syncthreads();
  load(params.a, a, true);
  load(params.b, b, kFlaw != kOtherSwizzle);
  if (kFlaw != kNeverArrives) mbarrier_arrive_after_copies(landed);
  if (kFlaw != kNotWaitedFor) mbarrier_wait(landed, kFlaw == kWrongParity);
  if (kFlaw != kNoProxyFence) fence_async_proxy();

  const auto row = [&](int i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; };
  const auto column = [&](int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; };
  float d[32] = {};
  uint32_t weights[4][4];
  for (int i = 0; i < 32; i += 2) {
    const bf16* from = params.a + row(i) * 64 + column(i);
    weights[i / 8][i / 2 % 4] = from[0].bits | uint32_t(from[1].bits) << 16;
  }
  if (kFlaw != kNoRegisterFence) wgmma_fence(d, weights);
  for (int k = 0; k < 4; ++k) {
    if (kFlaw == kOneThreadStaysAway && thread == 77) break;
    const uint32_t first = shared_address(a), second = shared_address(b);
    if (kRegisters) wgmma<bf16>(d, weights[k], panel_operand(second + k * 2048), k > 0);
    else wgmma<bf16>(d, panel_operand(first + k * 32), panel_operand(second + k * 32), k > 0);
  }
  if (kFlaw == kOverwritten && thread == 5) b[0] ^= 1;
  if (kFlaw != kNotCommitted) wgmma_commit();
  if (kFlaw != kReadTooEarly) wgmma_wait(d);
  for (int i = 0; i < 32; ++i) params.out[row(i) * 64 + column(i)] = d[i];
}

template <bool kRegisters, int... kFlaws>
void start(int flaw, const Params& params, std::integer_sequence<int, kFlaws...>) {
  using Kernel = void (*)(Params);
  const Kernel kernels[] = {product<kFlaws, kRegisters>...};
  launch(kernels[flaw], {}, kWarpgroup, 2 * kPanelBytes + 8, nullptr, params);
}

}  // namespace

extern "C" const char* run(int flaw, bool registers, const void* a, const void* b, float* out) {
  static std::string error;
  const Params params{static_cast<const bf16*>(a), static_cast<const bf16*>(b), out};
  const std::make_integer_sequence<int, kNeverArrives + 1> flaws;
  try {
    if (registers) start<true>(flaw, params, flaws);
    else start<false>(flaw, params, flaws);
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
