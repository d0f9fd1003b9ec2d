// What Hopper adds (sm_90a, not what follows it): barriers in shared memory, copies that arrive at them, and
// products of 64 x 64 by a warpgroup. One PTX instruction each; csrc/emulator/hopper.h has their twins.
#pragma once
#include "esp/cuda.h"
#include "esp/types.h"

#ifdef ESP_EMULATED
#include "emulator/hopper.h"
#define ESP_HOPPER 1
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ESP_HOPPER 1
#else
#define ESP_HOPPER 0
#endif

namespace esp {

constexpr int kWarpgroup = 128;

// A panel: 64 rows of 128 bytes, whose 16-byte chunks are permuted as wgmma's widest swizzle has it, so that
// 8 rows of one column of chunks lie in different banks. It starts at a multiple of 1024.
constexpr int kPanelRows = 64, kPanelColumns = 64, kPanelRowBytes = 128;
constexpr int kPanelBytes = kPanelRows * kPanelRowBytes;

ESP_DEVICE unsigned char* panel_chunk(unsigned char* panel, int row, int chunk) {
  return panel + row * kPanelRowBytes + (chunk ^ row % 8) * 16;
}

// An operand of wgmma: the panel that starts at this shared address, or a part of it. Bits 0..13 are the
// address, 32..45 the bytes from 8 rows to the next 8, both in units of 16, and bit 62 names the swizzle. The
// offset in bits 16..29 is for operands wider than one panel.
ESP_DEVICE uint64_t panel_operand(uint32_t address) {
  constexpr uint64_t kConstant =
      uint64_t{1} << 62 | uint64_t{8 * kPanelRowBytes / 16} << 32 | uint64_t{1} << 16;
  return kConstant | (address & 0x3ffff) >> 4;
}

#ifndef ESP_EMULATED

ESP_DEVICE uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

ESP_DEVICE void mbarrier_init(uint64_t* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
}

ESP_DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Until the phase of this parity is over; a new barrier is in phase 0.
ESP_DEVICE void mbarrier_wait(uint64_t* barrier, unsigned parity) {
  unsigned over = 0;
  while (over == 0)
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p; }"
        : "=r"(over)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// 16 bytes into shared memory: from a global address, or zeros.
ESP_DEVICE void copy_async(void* to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(real ? 16 : 0)
               : "memory");
}

// Arrives when this thread's copies so far have landed.
ESP_DEVICE void mbarrier_arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

ESP_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Between what threads or their copies write in shared memory and the wgmma that reads it.
ESP_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// To the compiler, registers that a product in flight owns look like any others: pinned, they are neither set
// after a fence nor read before a wait.
ESP_DEVICE void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
ESP_DEVICE void pin(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }

template <typename T, int N>
ESP_DEVICE void pin(T (&x)[N]) {
  ESP_UNROLL(N)
  for (int i = 0; i < N; ++i) pin(x[i]);
}

// Before the first product that takes registers which other instructions have written.
template <typename... Registers>
ESP_DEVICE void wgmma_fence(Registers&... x) {
  (pin(x), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

ESP_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// For all that was committed, before its accumulators x are read.
template <typename D>
ESP_DEVICE void wgmma_wait(D& x) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  pin(x);
}

#define ESP_D8(i)                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define ESP_D ESP_D8(0), ESP_D8(8), ESP_D8(16), ESP_D8(24)
#define ESP_D_NAMES                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19," \
  " %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define ESP_WGMMA_SHARED(type)                                                    \
  asm volatile(                                                                   \
      "{ .reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                 \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " ESP_D_NAMES \
      ", %32, %33, p, 1, 1, 0, 0; }"                                              \
      : ESP_D                                                                     \
      : "l"(a), "l"(b), "r"(int(accumulate)))
#define ESP_WGMMA_REGISTERS(type)                                                 \
  asm volatile(                                                                   \
      "{ .reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                 \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " ESP_D_NAMES \
      ", {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"                                \
      : ESP_D                                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)))

// d = a b^T, or d += a b^T: 64 rows of a, 64 rows of b, 16 columns of both, in shared memory.
//
// Thread t of the warpgroup holds of d in its register i row t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column
// i / 4 * 8 + t % 4 * 2 + i % 2.
template <typename T>
ESP_DEVICE void wgmma(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) ESP_WGMMA_SHARED("bf16");
  else ESP_WGMMA_SHARED("f16");
}

// d = a b, or d += a b: 64 rows and 16 columns of a in registers, 16 rows and 64 columns of b in shared
// memory. Registers 0 and 1 of a lie where 0..3 of d do, 2 and 3 where 4..7 do, two elements in each.
template <typename T>
ESP_DEVICE void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<T, bf16>) ESP_WGMMA_REGISTERS("bf16");
  else ESP_WGMMA_REGISTERS("f16");
}

#undef ESP_WGMMA_REGISTERS
#undef ESP_WGMMA_SHARED
#undef ESP_D_NAMES
#undef ESP_D
#undef ESP_D8

// How many registers each thread of this warpgroup has from here on.
template <int kCount>
ESP_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
ESP_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Two numbers, rounded, in one register.
template <typename T>
ESP_DEVICE uint32_t packed(float low, float high) {
  uint32_t both;
  if constexpr (std::is_same_v<T, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

#endif

}  // namespace esp
