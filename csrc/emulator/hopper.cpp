#include "emulator/hopper.h"

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace esp::emulator {
namespace {

constexpr int kRows = 64, kDepth = 16, kAccumulators = 32;

struct Barrier {
  int count, pending;
  unsigned phase;
};

// A copy of 16 bytes or, where `arrival` is not null, an arrival when all before it are done.
struct Copy {
  void* to;
  const void* from;
  bool real;
  uint64_t* arrival;
};

using Elements = std::array<uint16_t, kRows * kDepth>;  // [row or column, k]

struct Product {
  uint64_t a, b;
  bool a_in_registers, accumulate;
  Convert convert;
  Place place;
  Elements a_shared, b_shared;  // as they were when it was issued
  int issued;
  float* d[kWarpgroup];
  bool first[kWarpgroup];  // of those on the same accumulators
  float before[kWarpgroup][kAccumulators];
  uint32_t a_registers[kWarpgroup][4];
};

struct Thread {
  std::deque<Copy> copies;
  size_t products = 0, committed = 0;
  bool registers_fenced = false, proxy_fenced = true;
};

struct Warpgroup {
  std::vector<Product> products;
  int waiting = 0;
  unsigned waits = 0;
};

std::map<uint64_t*, Barrier> barriers;
std::multiset<uint64_t*> awaited;
std::vector<Thread> threads;
std::vector<Warpgroup> warpgroups;

std::string in_line(const char* what, const Place& place) {
  return std::string(what) + " in line " + std::to_string(place.line);
}

Thread& current() { return threads[thread_index().x]; }

void land(const Copy& copy) {
  if (copy.arrival) arrive(copy.arrival);
  else if (copy.real) std::memcpy(copy.to, copy.from, 16);
  else std::memset(copy.to, 0, 16);
}

// Everything down to the first arrival at a barrier for which someone waits.
bool land_awaited(std::deque<Copy>& copies) {
  const auto wanted = [](const Copy& c) { return c.arrival && awaited.contains(c.arrival); };
  const auto last = std::find_if(copies.begin(), copies.end(), wanted);
  if (last == copies.end()) return false;
  std::for_each(copies.begin(), last + 1, land);
  copies.erase(copies.begin(), last + 1);
  return true;
}

Barrier* find(uint64_t* barrier) {
  const auto found = barriers.find(barrier);
  if (found != barriers.end()) return &found->second;
  fail("a barrier in shared memory is used before it is initialised");
  return nullptr;
}

// The 64 rows of 16 elements (or, transposed, 16 rows of 64) that a descriptor means.
void gather(uint64_t descriptor, bool transposed, Place place, Elements& out) {
  const uint32_t start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
    return fail(in_line("a descriptor that is not emulated", place));
  for (uint32_t i = 0; i < kRows * kDepth; ++i) {
    const uint32_t outer = i / kDepth, k = i % kDepth;
    const uint32_t row = transposed ? k : outer, column = transposed ? outer : k;
    const uint32_t plain = start + row / 8 * stride + row % 8 * 128 + column * 2;
    const uint32_t at = (plain ^ (plain >> 7 & 7) << 4) - kSharedStart;
    if (at + 2 > dynamic_shared_bytes()) return fail(in_line("an operand outside of shared memory", place));
    std::memcpy(&out[i], static_cast<const unsigned char*>(dynamic_shared()) + at, 2);
  }
}

void gather(const Product& p, Elements& a, Elements& b) {
  if (!p.a_in_registers) gather(p.a, false, p.place, a);
  gather(p.b, p.a_in_registers, p.place, b);
}

// Accumulator i of a thread of the warpgroup.
int row_of(int thread, int i) { return thread / kWarp * 16 + thread % kWarp / 4 + i / 2 % 2 * 8; }
int column_of(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

// Row r of the product takes row r of A alone, and adds over k in order.
__attribute__((optimize("O3"))) void add_product(const float* a, const float* b, float* c) {
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < kDepth; ++k)
      for (int column = 0; column < kRows; ++column)
        c[row * kRows + column] += a[row * kDepth + k] * b[k * kRows + column];
}

void finish(Product& p) {
  static float a[kRows * kDepth], b[kDepth * kRows], c[kRows * kRows];
  Elements a_now = p.a_shared, b_now = p.b_shared;
  gather(p, a_now, b_now);
  if (a_now != p.a_shared || b_now != p.b_shared)
    return fail(in_line("shared memory changed before the end of wgmma", p.place));
  if (p.issued != kWarpgroup) return fail(in_line("not all of a warpgroup issued wgmma", p.place));
  for (int i = 0; i < kRows * kDepth; ++i) {
    if (!p.a_in_registers) a[i] = p.convert(a_now[i]);
    b[i % kDepth * kRows + i / kDepth] = p.convert(b_now[i]);
  }
  for (int t = 0; t < kWarpgroup; ++t) {
    if (p.a_in_registers)
      for (int i = 0; i < 8; ++i) {
        const int row = row_of(t, i / 2 % 2 * 2), k = i / 4 * 8 + t % 4 * 2 + i % 2;
        a[row * kDepth + k] = p.convert(uint16_t(p.a_registers[t][i / 2] >> i % 2 * 16));
      }
    if (p.first[t]) std::copy_n(p.before[t], kAccumulators, p.d[t]);
    for (int i = 0; i < kAccumulators; ++i)
      c[row_of(t, i) * kRows + column_of(t, i)] = p.accumulate ? p.d[t][i] : 0.0f;
  }
  add_product(a, b, c);
  for (int t = 0; t < kWarpgroup; ++t)
    for (int i = 0; i < kAccumulators; ++i) p.d[t][i] = c[row_of(t, i) * kRows + column_of(t, i)];
}

}  // namespace

void begin_asynchronous() {
  barriers.clear();
  awaited.clear();
  threads.assign(block_size().x, {});
  warpgroups.assign((block_size().x + kWarpgroup - 1) / kWarpgroup, {});
}

bool end_asynchronous() {
  bool ended = false;
  for (Thread& t : threads) ended |= land_awaited(t.copies);
  return ended;
}

void init(uint64_t* barrier, int count) { barriers[barrier] = {count, count, 0}; }

void arrive(uint64_t* barrier) {
  Barrier* b = find(barrier);
  if (b == nullptr || --b->pending > 0) return;
  b->pending = b->count;
  ++b->phase;
}

void wait(uint64_t* barrier, unsigned parity, Place place) {
  const Barrier* b = find(barrier);
  if (b == nullptr) return;
  const auto here = awaited.insert(barrier);
  wait_until([b, parity] { return (b->phase & 1) != parity; }, place);
  awaited.erase(here);
  current().proxy_fenced = false;
}

void copy(void* to, const void* from, bool real) {
  std::deque<Copy>& copies = current().copies;
  const Copy one{to, from, real, nullptr};
  if (now()) land(one);
  else copies.push_back(one);
}

void arrive_after_copies(uint64_t* barrier) {
  std::deque<Copy>& copies = current().copies;
  if (copies.empty()) arrive(barrier);
  else copies.push_back({nullptr, nullptr, false, barrier});
}

void wait_for_copies() {
  std::deque<Copy>& copies = current().copies;
  std::for_each(copies.begin(), copies.end(), land);
  copies.clear();
}

void fence_proxy() { current().proxy_fenced = true; }
void fence_products() { current().registers_fenced = true; }

void multiply(float* d, const MatrixA& a, uint64_t b, bool accumulate, Convert convert, Place place) {
  const int thread = int(thread_index().x), t = thread % kWarpgroup;
  Thread& self = threads[thread];
  std::vector<Product>& products = warpgroups[thread / kWarpgroup].products;
  if (!self.registers_fenced) return fail(in_line("no wgmma_fence before wgmma", place));
  if (!self.proxy_fenced) return fail(in_line("no fence_async_proxy before wgmma", place));
  const size_t mine = self.products++;
  if (mine == products.size()) {
    products.push_back(
        {a.descriptor, b, a.registers != nullptr, accumulate, convert, place, {}, {}, 0, {}, {}, {}, {}});
    gather(products.back(), products.back().a_shared, products.back().b_shared);
  }
  Product& p = products[mine];
  if (p.a != a.descriptor || p.b != b || p.accumulate != accumulate || p.place.line != place.line)
    return fail(in_line("threads of a warpgroup do not agree on wgmma", place));
  ++p.issued;
  p.d[t] = d;
  p.first[t] =
      std::none_of(products.begin(), products.begin() + mine, [&](const Product& q) { return q.d[t] == d; });
  if (p.first[t]) std::copy_n(d, kAccumulators, p.before[t]);
  if (p.a_in_registers) std::copy_n(a.registers, 4, p.a_registers[t]);
  std::fill_n(d, kAccumulators, std::numeric_limits<float>::quiet_NaN());
}

void commit_products(Place) { current().committed = current().products; }

void wait_for_products(Place place) {
  const int thread = int(thread_index().x);
  Thread& self = threads[thread];
  Warpgroup& group = warpgroups[thread / kWarpgroup];
  if (self.committed != self.products) return fail(in_line("wgmma_wait for what was not committed", place));
  self.products = self.committed = 0;
  self.registers_fenced = false;
  if (++group.waiting < kWarpgroup) {
    const unsigned before = group.waits;
    return wait_until([&group, before] { return group.waits != before; }, place);
  }
  std::for_each(group.products.begin(), group.products.end(), finish);
  group.products.clear();
  group.waiting = 0;
  ++group.waits;
}

}  // namespace esp::emulator
