// bfloat16 products by AMX tiles: one instruction adds to 16 x 16 sums the products of 32 k. How it adds those of
// one sum depends on nothing else in the tiles, so a row keeps its bits in any company. Weights are read as they
// are packed: 16 pairs of k for 16 outputs are one tile. Subnormal numbers count as 0.
#pragma once
#include <algorithm>
#include <cstring>

#include "esp/linear_rows.h"

#if defined(__x86_64__) && defined(__linux__)
#define ESP_HAS_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace esp {

constexpr int64_t kTileRows = 16, kTileK = 32;

#ifdef ESP_HAS_AMX

#define ESP_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512dq,avx512vl,avx512bw,avx512bf16")))

// GCC does not know what tile instructions read: before them, memory must be written.
#define ESP_WRITTEN() __asm__ volatile("" ::: "memory")

// Whether the CPU has the tiles and Linux lends them to this process. Every CPU with AMX has AVX-512 BF16.
inline bool has_tiles() {
  static const bool lent = [] {
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kBf16) == 0 || (d & kTile) == 0) return false;
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return lent;
}

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights. For one thread, until release.
ESP_AMX inline void take_tiles(int64_t rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  for (int tile = 0; tile < 8; ++tile) {
    shape.bytes[tile] = 64;
    shape.rows[tile] = uint8_t(tile < 6 ? rows : kTileRows);
  }
  ESP_WRITTEN();
  _tile_loadconfig(&shape);
}

ESP_AMX inline void release_tiles() { _tile_release(); }

// 32 k of the sums of a panel, for one or two tiles of rows.
template <bool kTwo>
ESP_AMX inline void add_products(const bf16* x0, const bf16* x1, int64_t stride_x, const bf16* w) {
  constexpr int64_t kStride = kPanel * 2 * sizeof(bf16);
  _tile_loadd(6, w, kStride);
  _tile_loadd(7, w + kPanel, kStride);
  _tile_loadd(4, x0, stride_x * sizeof(bf16));
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwo) {
    _tile_loadd(5, x1, stride_x * sizeof(bf16));
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// sums [kTwo ? 2 : 1][16, kPanel] = x w^T for one panel. x has zeros up to a multiple of 32 k. The memory is
// asked for what comes `ahead` elements later, while the tiles are busy; 0 when w is in the cache.
template <bool kTwo>
ESP_AMX inline void multiply_panel(const bf16* x0, const bf16* x1, int64_t stride_x, const bf16* w, int64_t k,
                                   int64_t ahead, float* sums) {
  constexpr int64_t kSize = kTileK * kPanel, kStride = kPanel * sizeof(float);
  ESP_WRITTEN();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int64_t i = 0;
  for (; i + kTileK <= k; i += kTileK, w += kSize) {
    if (ahead != 0)
      for (int64_t j = 0; j < kSize; j += 32) __builtin_prefetch(w + ahead + j);
    add_products<kTwo>(x0 + i, x1 + i, stride_x, w);
  }
  if (i < k) {
    alignas(64) bf16 rest[kSize] = {};
    std::memcpy(rest, w, (k - i + 1) / 2 * 2 * kPanel * sizeof(bf16));
    ESP_WRITTEN();
    add_products<kTwo>(x0 + i, x1 + i, stride_x, rest);
  }
  _tile_stored(0, sums, kStride);
  _tile_stored(1, sums + 16, kStride);
  if constexpr (kTwo) {
    _tile_stored(2, sums + kTileRows * kPanel, kStride);
    _tile_stored(3, sums + kTileRows * kPanel + 16, kStride);
  }
}

// A row of a panel: y [width] = sums [kPanel] + bias.
ESP_AMX inline void store_row(const float* sums, const bf16* bias, bf16* y, int64_t width) {
  const __mmask32 used = width == kPanel ? ~0u : (1u << width) - 1;
  __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
  if (bias != nullptr) {
    const __m512i b = _mm512_maskz_loadu_epi16(used, bias);
    low += _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(b)), 16));
    high += _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(b, 1)), 16));
  }
  _mm512_mask_storeu_epi16(y, used, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

#undef ESP_AMX
#undef ESP_WRITTEN

#else

inline bool has_tiles() { return false; }
inline void take_tiles(int64_t) {}
inline void release_tiles() {}
template <bool kTwo>
void multiply_panel(const bf16*, const bf16*, int64_t, const bf16*, int64_t, int64_t, float*) {}
inline void store_row(const float*, const bf16*, bf16*, int64_t) {}

#endif

}  // namespace esp
