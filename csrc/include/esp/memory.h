// What one batch has shown (esp_kernels/ops/_memory.py tells the layout), and how it is read and written.
#pragma once
#include "esp/types.h"

namespace esp {

constexpr int kOrders = 4;  // contexts of 1 to 4 tokens
constexpr int kMaxList = 16;

struct Memory {
  int32_t* history;  // [batch, capacity]
  int32_t* length;   // [batch]
  int32_t* heads;    // [batch, kOrders, buckets]
  int32_t* links;    // [batch, kOrders, capacity]
  int32_t* keys;     // [batch, kOrders, slots, kOrders]
  int32_t* list_ids;     // [batch, kOrders, slots, width]
  float* list_logprobs;  // [batch, kOrders, slots, width]
  int64_t capacity, buckets, slots, width;
};

// Up to 4 tokens that end somewhere, the oldest first.
struct Context {
  int32_t token[kOrders];
  int count;

  ESP_INLINE void push(int32_t next) {
    if (count == kOrders) {
      for (int i = 1; i < kOrders; ++i) token[i - 1] = token[i];
      --count;
    }
    token[count++] = next;
  }

  ESP_INLINE const int32_t* last(int n) const { return token + count - n; }
};

ESP_INLINE bool same_tokens(const int32_t* a, const int32_t* b, int n) {
  for (int i = 0; i < n; ++i)
    if (a[i] != b[i]) return false;
  return true;
}

ESP_INLINE int64_t bucket_of(const int32_t* gram, int n, int64_t buckets) {
  uint32_t h = 0;
  for (int i = 0; i < n; ++i) h = (h ^ (uint32_t(gram[i]) + 1)) * 0x9E3779B1u;
  h ^= h >> 15;
  return int64_t(uint64_t(h) * uint64_t(buckets) >> 32);
}

// The memory of one sequence.
struct Sequence {
  int32_t* history;
  int32_t* length;
  int32_t *heads, *links, *keys, *list_ids;
  float* list_logprobs;
  int64_t capacity, buckets, slots, width;

  ESP_INLINE Sequence(const Memory& m, int64_t b)
      : history(m.history + b * m.capacity),
        length(m.length + b),
        heads(m.heads + b * kOrders * m.buckets),
        links(m.links + b * kOrders * m.capacity),
        keys(m.keys + b * kOrders * m.slots * kOrders),
        list_ids(m.list_ids + b * kOrders * m.slots * m.width),
        list_logprobs(m.list_logprobs + b * kOrders * m.slots * m.width),
        capacity(m.capacity),
        buckets(m.buckets),
        slots(m.slots),
        width(m.width) {}

  // The end of the history.
  ESP_INLINE Context end() const {
    Context context{};
    for (int32_t i = *length < kOrders ? 0 : *length - kOrders; i < *length; ++i) context.push(history[i]);
    return context;
  }

  // The slot of the list behind the last n tokens, whether or not it is theirs.
  ESP_INLINE int64_t slot(const Context& context, int n) const {
    return (n - 1) * slots + bucket_of(context.last(n), n, slots);
  }

  ESP_INLINE bool has(const Context& context, int n) const {
    return context.count >= n && same_tokens(keys + slot(context, n) * kOrders, context.last(n), n);
  }

  ESP_INLINE void keep(const Context& context, const int32_t* ids, const float* logprobs, int64_t count) {
    for (int n = 1; n <= context.count; ++n) {
      const int64_t s = slot(context, n);
      for (int i = 0; i < n; ++i) keys[s * kOrders + i] = context.last(n)[i];
      for (int64_t i = 0; i < width; ++i) {
        list_ids[s * width + i] = i < count ? ids[i] : -1;
        if (i < count) list_logprobs[s * width + i] = logprobs[i];
      }
    }
  }

  ESP_INLINE void append(int32_t token) {
    const int32_t place = *length;
    if (place >= capacity) return;
    history[place] = token;
    *length = place + 1;
    for (int n = 1; n <= kOrders && n <= place + 1; ++n) {
      int32_t& head = heads[(n - 1) * buckets + bucket_of(history + place - n + 1, n, buckets)];
      links[(n - 1) * capacity + place] = head;
      head = place;
    }
  }

  // Calls found(token) for the tokens behind the latest places of the last n tokens, the latest first, until
  // it returns false. Links lead to earlier places, so that a broken memory ends the walk too.
  template <typename F>
  ESP_INLINE void each_place(const Context& context, int n, const F& found) const {
    int32_t place = heads[(n - 1) * buckets + bucket_of(context.last(n), n, buckets)];
    while (place >= n - 1 && place < *length) {
      const bool same = place + 1 < *length && same_tokens(history + place - n + 1, context.last(n), n);
      if (same && !found(history[place + 1])) return;
      const int32_t earlier = links[(n - 1) * capacity + place];
      place = earlier < place ? earlier : -1;
    }
  }
};

}  // namespace esp
