// Small kernels, right and wrong, that test the emulator.
#include <exception>

#include "esp/cuda.h"

namespace {

using namespace esp;

struct Params {
  int* out;
  int n;
};

// Each thread reads what the next one wrote.
template <bool kBarrier>
__global__ void rotate(const __grid_constant__ Params params) {
  int* shared = reinterpret_cast<int*>(dynamic_shared());
  const int i = threadIdx.x;
  shared[i] = i;
  if (kBarrier) __syncthreads();
  params.out[i] = shared[(i + 1) % params.n];
}

// Each warp adds up its lanes.
__global__ void sum_lanes(const __grid_constant__ Params params) {
  int sum = threadIdx.x;
  for (int mask = kWarp / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(kAllLanes, sum, mask);
  const unsigned odd = __ballot_sync(kAllLanes, threadIdx.x % 2 == 1);
  const unsigned least = __reduce_min_sync(kAllLanes, threadIdx.x + 7u);
  params.out[threadIdx.x] = sum + __popc(odd) + int(least) + __shfl_sync(kAllLanes, int(threadIdx.x), 3);
}

__global__ void two_barriers(const __grid_constant__ Params) {
  if (warp_index() == 0) __syncthreads();
  else __syncthreads();
}

__global__ void early_exit(const __grid_constant__ Params) {
  if (threadIdx.x == 5) return;
  __syncthreads();
}

__global__ void missing_lane(const __grid_constant__ Params) {
  if (lane_index() != 9) __syncwarp();
}

__global__ void two_collectives(const __grid_constant__ Params) {
  if (lane_index() < 16) __syncwarp();
  else __ballot_sync(kAllLanes, true);
}

__global__ void past_the_end(const __grid_constant__ Params params) {
  reinterpret_cast<int*>(dynamic_shared())[threadIdx.x + 1] = params.n;
}

}  // namespace

extern "C" const char* run(int which, int* out, int n) {
  static std::string error;
  using Kernel = void (*)(Params);
  const Kernel kernels[] = {rotate<true>,  rotate<false>,   sum_lanes,   two_barriers, early_exit,
                            missing_lane, two_collectives, past_the_end};
  try {
    launch(kernels[which], {}, n, n * sizeof(int), nullptr, Params{out, n});
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
