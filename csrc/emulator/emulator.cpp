#include "emulator/emulator.h"

#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator/hopper.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else
static void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

namespace esp::emulator {
namespace {

constexpr size_t kStack = 256 << 10;
constexpr unsigned char kPoison = 0xA5;

enum class State { ready, at_barrier, in_warp, waiting, done };

struct Fiber {
  dim3 index;
  State state;
  Place place;       // where it waits
  unsigned lanes;    // those that it waits for
  uint64_t brought;  // to the collective
  Warp met;          // what all of them brought
  Condition condition;  // that it waits for
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  void* sanitizer;
};

// The block that runs.
struct Block {
  dim3 grid, size, index;
  std::vector<Fiber> fibers;
  std::unique_ptr<unsigned char[]> shared;
  size_t shared_bytes;
  Fiber* current;
  ucontext_t scheduler;
  const void* scheduler_stack;
  size_t scheduler_stack_size;
  const std::function<void()>* thread;
  std::string error;
  std::mt19937 random;
};

Block block;
unsigned next_seed = 0;

// Back to the scheduler; the fiber goes on when it is run again.
void leave(Fiber& f) {
  __sanitizer_start_switch_fiber(f.state == State::done ? nullptr : &f.sanitizer, block.scheduler_stack,
                                 block.scheduler_stack_size);
  swapcontext(&f.context, &block.scheduler);
  __sanitizer_finish_switch_fiber(f.sanitizer, nullptr, nullptr);
}

void start() {
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack, &block.scheduler_stack_size);
  (*block.thread)();
  block.current->state = State::done;
  leave(*block.current);
}

void run(Fiber& f) {
  block.current = &f;
  void* sanitizer = nullptr;
  __sanitizer_start_switch_fiber(&sanitizer, f.stack.get(), kStack);
  swapcontext(&block.scheduler, &f.context);
  __sanitizer_finish_switch_fiber(sanitizer, nullptr, nullptr);
}

std::string where(const Place& place) {
  return std::string(place.what) + " in line " + std::to_string(place.line);
}

std::string doing(const Fiber& f) {
  return f.state == State::done ? "has ended" : "waits at " + where(f.place);
}

bool same(const Place& a, const Place& b) { return a.line == b.line && std::string(a.what) == b.what; }

// Lets everyone go on who has met; false when nobody has, so that the block is stuck.
bool release_barrier() {
  const Fiber& first = block.fibers[0];
  for (const Fiber& f : block.fibers) {
    const bool both = f.state == State::at_barrier && first.state == State::at_barrier;
    if (both && same(f.place, first.place)) continue;
    const std::string other = "thread " + std::to_string(f.index.x) + " " + doing(f);
    fail("threads of one block do not meet: thread 0 " + doing(first) + ", " + other);
    return false;
  }
  for (Fiber& f : block.fibers) f.state = State::ready;
  return true;
}

void release_warp(Fiber& last) {
  Fiber* warp = &block.fibers[last.index.x / kWarp * kWarp];
  for (int i = 0; i < kWarp; ++i) {
    if (!(last.lanes >> i & 1)) continue;
    if (warp[i].state != State::in_warp) return;
    if (warp[i].lanes != last.lanes || !same(warp[i].place, last.place))
      return fail("lanes of one warp do not meet: " + where(warp[i].place) + " and " + where(last.place));
  }
  for (int i = 0; i < kWarp; ++i)
    for (int j = 0; j < kWarp; ++j)
      if (last.lanes >> i & last.lanes >> j & 1) warp[i].met.value[j] = warp[j].brought;
  for (int i = 0; i < kWarp; ++i)
    if (last.lanes >> i & 1) warp[i].state = State::ready;
}

// Seed 0 runs threads in order, seed 1 in reverse, any other shuffled anew in each round. What is
// asynchronous ends at the latest when nothing else can go on.
void run_block(unsigned seed) {
  block.random.seed(seed);
  begin_asynchronous();
  std::vector<Fiber*> order;
  for (Fiber& f : block.fibers) order.push_back(&f);
  if (seed == 1) std::reverse(order.begin(), order.end());
  while (true) {
    if (seed > 1) std::shuffle(order.begin(), order.end(), block.random);
    bool ran = false, all_done = true;
    for (Fiber* f : order) {
      if (f->state == State::waiting && f->condition()) f->state = State::ready;
      if (f->state == State::ready) {
        run(*f);
        ran = true;
      }
      if (!block.error.empty()) return;
      all_done &= f->state == State::done;
    }
    if (all_done || (!ran && !end_asynchronous() && !release_barrier())) return;
  }
}

void prepare(size_t shared_bytes) {
  block.shared.reset(new unsigned char[shared_bytes]);
  block.shared_bytes = shared_bytes;
  std::memset(block.shared.get(), kPoison, shared_bytes);
  block.fibers.resize(block.size.x);
  for (unsigned i = 0; i < block.size.x; ++i) {
    Fiber& f = block.fibers[i];
    f.index = {i, 0, 0};
    f.state = State::ready;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStack;
    makecontext(&f.context, start, 0);
  }
}

}  // namespace

dim3 thread_index() { return block.current->index; }
dim3 block_index() { return block.index; }
dim3 block_size() { return block.size; }
dim3 grid_size() { return block.grid; }
void* dynamic_shared() { return block.shared.get(); }
size_t dynamic_shared_bytes() { return block.shared_bytes; }

void fail(const std::string& sentence) {
  if (block.error.empty()) block.error = sentence;
}

bool now() { return next_seed > 1 ? block.random() % 2 == 1 : next_seed == 1; }

void barrier(Place place) {
  Fiber& f = *block.current;
  f.place = place;
  f.state = State::at_barrier;
  leave(f);
}

const Warp& exchange(unsigned lanes, uint64_t value, Place place) {
  Fiber& f = *block.current;
  if (!(lanes >> f.index.x % kWarp & 1)) fail("a lane is not in its own mask: " + where(place));
  f.place = place;
  f.lanes = lanes;
  f.brought = value;
  f.state = State::in_warp;
  if (block.error.empty()) release_warp(f);
  if (f.state != State::ready || !block.error.empty()) leave(f);
  return f.met;
}

void wait_until(const Condition& met, Place place) {
  if (met()) return;
  Fiber& f = *block.current;
  f.place = place;
  f.condition = met;
  f.state = State::waiting;
  leave(f);
}

void launch(dim3 grid, int threads, size_t shared_bytes, const std::function<void()>& thread) {
  if (threads % kWarp != 0) throw std::runtime_error("emulator: threads must fill their warps");
  block.grid = grid;
  block.size = {unsigned(threads)};
  block.thread = &thread;
  block.error.clear();
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        block.index = {x, y, z};
        prepare(shared_bytes);
        run_block(next_seed);
        if (!block.error.empty()) throw std::runtime_error("emulator: " + block.error);
      }
}

}  // namespace esp::emulator

// The order of threads in the launches that follow.
extern "C" void esp_emulator_seed(unsigned seed) { esp::emulator::next_seed = seed; }
