// The twins of esp/hopper.cuh: what Hopper does asynchronously, done as late, or as early, as is allowed.
//
// A copy lands at once, or when nobody can go on but a thread waits for a barrier at which it is to arrive;
// the seed decides. A product is done where its warpgroup waits for it: until then its accumulators are NaN,
// and its operands in shared memory must stay as they were when it was issued. Which proxy wrote what is not
// modelled, but that a thread fences after each wait at a barrier, as data which non-bulk copies brought need
// it. Only what our kernels use is here: operands of 64 rows or columns swizzled over 128 bytes, and waits
// for all.
#pragma once
#include "emulator/emulator.h"
#include "esp/types.h"

namespace esp {
namespace emulator {

constexpr uint32_t kSharedStart = 1024;  // the system's own share lies before
constexpr int kWarpgroup = 128;

using Convert = float (*)(uint16_t);

struct MatrixA {
  uint64_t descriptor;
  const uint32_t* registers;  // null: in shared memory
};

// Of the block that starts; and true when something could be ended that a thread waits for.
void begin_asynchronous();
bool end_asynchronous();

void init(uint64_t* barrier, int count);
void arrive(uint64_t* barrier);
void wait(uint64_t* barrier, unsigned parity, Place place);
void copy(void* to, const void* from, bool real);
void arrive_after_copies(uint64_t* barrier);
void wait_for_copies();
void fence_proxy();
void fence_products();
void multiply(float* d, const MatrixA& a, uint64_t b, bool accumulate, Convert convert, Place place);
void commit_products(Place place);
void wait_for_products(Place place);

template <typename T>
float convert(uint16_t bits) {
  return load(T{bits});
}

}  // namespace emulator

inline uint32_t shared_address(const void* p) {
  const auto* base = static_cast<const unsigned char*>(emulator::dynamic_shared());
  return uint32_t(static_cast<const unsigned char*>(p) - base) + emulator::kSharedStart;
}

inline void mbarrier_init(uint64_t* barrier, int count) { emulator::init(barrier, count); }
inline void mbarrier_arrive(uint64_t* barrier) { emulator::arrive(barrier); }
inline void mbarrier_wait(uint64_t* barrier, unsigned parity, int line = __builtin_LINE()) {
  emulator::wait(barrier, parity, {"mbarrier_wait", line});
}
inline void copy_async(void* to, const void* from, bool real) { emulator::copy(to, from, real); }
inline void mbarrier_arrive_after_copies(uint64_t* barrier) { emulator::arrive_after_copies(barrier); }
inline void wait_for_copies() { emulator::wait_for_copies(); }
inline void fence_async_proxy() { emulator::fence_proxy(); }

template <typename... Registers>
void wgmma_fence(Registers&...) {
  emulator::fence_products();
}

template <typename T>
void wgmma(float (&d)[32], uint64_t a, uint64_t b, bool accumulate, int line = __builtin_LINE()) {
  emulator::multiply(d, {a, nullptr}, b, accumulate, emulator::convert<T>, {"wgmma", line});
}

template <typename T>
void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate, int line = __builtin_LINE()) {
  emulator::multiply(d, {0, a}, b, accumulate, emulator::convert<T>, {"wgmma", line});
}

inline void wgmma_commit(int line = __builtin_LINE()) { emulator::commit_products({"wgmma_commit", line}); }

// Registers in one argument each, so that the line can follow; see esp/hopper.cuh.
template <typename D>
void wgmma_wait(D&, int line = __builtin_LINE()) {
  emulator::wait_for_products({"wgmma_wait", line});
}

template <int>
void take_registers() {}
template <int>
void give_registers() {}

template <typename T>
uint32_t packed(float low, float high) {
  return uint32_t(store<T>(low).bits) | uint32_t(store<T>(high).bits) << 16;
}

}  // namespace esp
