// Device code compiles for CUDA by nvcc and, under ESP_EMULATED, for the CPU, where fibers run its threads.
#pragma once
#include <stdexcept>
#include <string>
#include <type_traits>

#ifdef ESP_EMULATED
#include "emulator/emulator.h"
#define ESP_DEVICE inline
#define ESP_UNROLL(n)
#else
#include <cuda_runtime.h>
#define ESP_DEVICE __device__ __forceinline__
#define ESP_PRAGMA(text) _Pragma(#text)
#define ESP_UNROLL(n) ESP_PRAGMA(unroll n)
#endif

namespace esp {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = ~0u;

ESP_DEVICE int lane_index() { return int(threadIdx.x) % kWarp; }
ESP_DEVICE int warp_index() { return int(threadIdx.x) / kWarp; }

// The lanes before this one.
ESP_DEVICE unsigned lanes_below() { return (1u << lane_index()) - 1; }

template <typename Join>
ESP_DEVICE float over_warp(float x, Join join) {
  ESP_UNROLL(5)
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x = join(x, __shfl_xor_sync(kAllLanes, x, mask));
  return x;
}

// The same bits in every lane.
ESP_DEVICE float warp_max(float x) {
  return over_warp(x, [](float a, float b) { return fmaxf(a, b); });
}
ESP_DEVICE float warp_sum(float x) {
  return over_warp(x, [](float a, float b) { return a + b; });
}

// 2 ** x by the special function unit, to about 2 units in the last place; 0 where that is not normal.
ESP_DEVICE float fast_exp2(float x) {
#ifdef ESP_EMULATED
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// What the launch asked for, 16-byte aligned.
ESP_DEVICE unsigned char* dynamic_shared() {
#ifdef ESP_EMULATED
  return static_cast<unsigned char*>(emulator::dynamic_shared());
#else
  extern __shared__ uint4 esp_dynamic_shared[];
  return reinterpret_cast<unsigned char*>(esp_dynamic_shared);
#endif
}

// N neighbouring elements, moved by one instruction where they fill 4, 8 or 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T value[N];
};

#ifdef ESP_EMULATED

template <typename Params>
void launch(void (*kernel)(Params), dim3 grid, int threads, size_t shared_bytes, cudaStream_t,
            const Params& params) {
  emulator::launch(grid, threads, shared_bytes, [&] { kernel(params); });
}

#else

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

constexpr size_t kSharedWithoutAsking = 48 << 10;

template <typename Params>
void launch(void (*kernel)(Params), dim3 grid, int threads, size_t shared_bytes, cudaStream_t stream,
            const Params& params) {
  if (shared_bytes > kSharedWithoutAsking)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)));
  kernel<<<grid, threads, shared_bytes, stream>>>(params);
  check_cuda(cudaGetLastError());
}

#endif

}  // namespace esp
