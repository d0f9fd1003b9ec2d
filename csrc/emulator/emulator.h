// CUDA C++ on the CPU, to test kernels where no GPU is. The threads of a block are fibers of one OS thread:
// each runs until a barrier or a warp collective holds it, and a seed decides who runs next. A missing
// barrier then reads what is not yet written (shared memory starts poisoned); a barrier or collective that
// not all of its threads reach is an error, and so is a thread that ends while others wait for it.
//
// Included by esp/cuda.h in the place of CUDA's own headers. Compile with -fno-strict-aliasing.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

using cudaStream_t = void*;

namespace esp::emulator {

constexpr int kWarp = 32;

// Where in the source threads meet. All who meet must have come from the same line.
struct Place {
  const char* what;
  int line;
};

struct Warp {
  uint64_t value[kWarp];  // what each lane brought
};

// What a thread cannot go on before.
using Condition = std::function<bool()>;

// The running thread's.
dim3 thread_index();
dim3 block_index();
dim3 block_size();
dim3 grid_size();
void* dynamic_shared();
size_t dynamic_shared_bytes();

void barrier(Place place);
const Warp& exchange(unsigned lanes, uint64_t value, Place place);
void wait_until(const Condition& met, Place place);

// Ends the launch with this sentence, unless another came first.
void fail(const std::string& sentence);

// Whether something that may happen now or later happens now: seed 0 says never, seed 1 always.
bool now();

// Runs the blocks one after the other; throws std::runtime_error when a kernel breaks the rules.
void launch(dim3 grid, int threads, size_t shared_bytes, const std::function<void()>& thread);

template <typename T>
uint64_t packed(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <typename T>
T unpacked(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int lane() { return int(thread_index().x % kWarp); }

}  // namespace esp::emulator

#define threadIdx (::esp::emulator::thread_index())
#define blockIdx (::esp::emulator::block_index())
#define blockDim (::esp::emulator::block_size())
#define gridDim (::esp::emulator::grid_size())

inline void __syncthreads(int line = __builtin_LINE()) { esp::emulator::barrier({"__syncthreads", line}); }

inline void __syncwarp(unsigned lanes = ~0u, int line = __builtin_LINE()) {
  esp::emulator::exchange(lanes, 0, {"__syncwarp", line});
}

template <typename T>
T __shfl_sync(unsigned lanes, T value, int source, int line = __builtin_LINE()) {
  namespace emulator = esp::emulator;
  const auto& warp = emulator::exchange(lanes, emulator::packed(value), {"__shfl_sync", line});
  return emulator::unpacked<T>(warp.value[source % emulator::kWarp]);
}

template <typename T>
T __shfl_xor_sync(unsigned lanes, T value, int mask, int line = __builtin_LINE()) {
  namespace emulator = esp::emulator;
  const auto& warp = emulator::exchange(lanes, emulator::packed(value), {"__shfl_xor_sync", line});
  return emulator::unpacked<T>(warp.value[emulator::lane() ^ mask]);
}

inline unsigned __ballot_sync(unsigned lanes, bool vote, int line = __builtin_LINE()) {
  const auto& warp = esp::emulator::exchange(lanes, vote, {"__ballot_sync", line});
  unsigned votes = 0;
  for (int i = 0; i < esp::emulator::kWarp; ++i)
    if (lanes >> i & 1) votes |= unsigned(warp.value[i]) << i;
  return votes;
}

inline unsigned __reduce_min_sync(unsigned lanes, unsigned value, int line = __builtin_LINE()) {
  const auto& warp = esp::emulator::exchange(lanes, value, {"__reduce_min_sync", line});
  unsigned least = ~0u;
  for (int i = 0; i < esp::emulator::kWarp; ++i)
    if (lanes >> i & 1 && warp.value[i] < least) least = unsigned(warp.value[i]);
  return least;
}

inline unsigned __reduce_max_sync(unsigned lanes, unsigned value, int line = __builtin_LINE()) {
  const auto& warp = esp::emulator::exchange(lanes, value, {"__reduce_max_sync", line});
  unsigned most = 0;
  for (int i = 0; i < esp::emulator::kWarp; ++i)
    if (lanes >> i & 1 && warp.value[i] > most) most = unsigned(warp.value[i]);
  return most;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
