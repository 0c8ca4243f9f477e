// Products of tiles (Intel AMX) for attention with queries, keys and values of bf16.
//
// A group of keys is a sequence of tiles of 32 depths by 16 tokens, the last one as deep as what is
// left of the head. A panel of values is a tile of 16 tokens by 16 elements: two groups joined would
// fill a tile, but copying them takes longer than that saves. So a score is one chain of sums over
// 32 depths each, and an element of a result one of sums over 16 tokens each, in order, whatever the
// number of rows.
#pragma once

#include <algorithm>
#include <type_traits>

#include "tiles.h"
#include "vector.h"

namespace attention_tiles {

using tiles::DEPTH;
using tiles::ROWS;

template <class T, class S>
constexpr bool AVAILABLE = tiles::AVAILABLE<T> && std::is_same_v<T, S>;
constexpr int MAX_ROWS = 2 * ROWS;  // of a product

#if !defined(__AMX_BF16__)
class Registers {
 public:
  Registers(long, long) {}
};
#else
// The registers. Sums are in 0 to 3, rows in 4 and keys in 5. 6 and 7 are for rows and the other
// operand with fewer depths: the last ones of a head, or the tokens of a group of values.
class Registers {
 public:
  Registers(long rows, long depth) : rows_((int)std::min<long>(rows, ROWS)), rest_(depth % DEPTH) {
    use(PANEL);
  }
  Registers(const Registers&) = delete;
  ~Registers() { _tile_release(); }

  void use_for_keys() {
    if (rest_) use(rest_);
  }
  void use_for_values() { use(PANEL); }

 private:
  void use(int fewer) {
    if (fewer == fewer_) return;
    fewer_ = fewer;
    tiles::Layout layout;
    for (int i = 0; i < 5; i++) layout.set(i, rows_, 64);
    layout.set(5, DEPTH / 2, 64);
    layout.set(6, rows_, fewer * 2);
    layout.set(7, fewer / 2, 64);
    layout.use();
  }

  int rows_, rest_, fewer_ = 0;
};

// Add the products of R tiles of rows and N tiles of columns over 32 depths, or over fewer. Numbers
// of registers have to be constants.
#define HP_ADD(NAME, X, W)                                           \
  template <int R, int N, class Columns>                             \
  INLINE void NAME(const bf16* x, long stride, Columns columns) {    \
    _tile_loadd(X, x, stride * 2);                                   \
    HP_ADD_COLUMN(0, X, W)                                           \
    HP_ADD_COLUMN(1, X, W)                                           \
    HP_ADD_COLUMN(2, X, W)                                           \
    HP_ADD_COLUMN(3, X, W)                                           \
    if constexpr (R == 2) {                                          \
      _tile_loadd(X, x + ROWS * stride, stride * 2);                 \
      if constexpr (N == 2) {                                        \
        _tile_dpbf16ps(3, X, W);                                     \
        _tile_loadd(W, columns(0), 64);                              \
      }                                                              \
      _tile_dpbf16ps(2, X, W);                                       \
    }                                                                \
  }
#define HP_ADD_COLUMN(C, X, W)      \
  if constexpr (N > C) {            \
    _tile_loadd(W, columns(C), 64); \
    _tile_dpbf16ps(C, X, W);        \
  }
HP_ADD(add, 4, 5)
HP_ADD(add_fewer, 6, 7)
#undef HP_ADD
#undef HP_ADD_COLUMN

// Write R tiles of rows and N of columns of y, which `add_all` adds up.
template <int R, int N, class AddAll>
INLINE void sum(float* y, long stride, AddAll add_all) {
  _tile_zero(0);
  if constexpr (N > 1) _tile_zero(1);
  if constexpr (N > 2 || R == 2) _tile_zero(2);
  if constexpr (N > 3 || R == 2) _tile_zero(3);
  add_all();
  _tile_stored(0, y, stride * 4);
  if constexpr (N > 1) _tile_stored(1, y + PANEL, stride * 4);
  if constexpr (R == 2) {
    _tile_stored(2, y + ROWS * stride, stride * 4);
    if constexpr (N == 2) _tile_stored(3, y + ROWS * stride + PANEL, stride * 4);
  } else {
    if constexpr (N > 2) _tile_stored(2, y + 2 * PANEL, stride * 4);
    if constexpr (N > 3) _tile_stored(3, y + 3 * PANEL, stride * 4);
  }
}

// Call multiply(R, N, column) for tiles of `rows` rows (at most MAX_ROWS) and all columns.
template <class Multiply>
INLINE void in_tiles(int rows, int columns, Multiply multiply) {
  using std::integral_constant;
  asm volatile("" : : : "memory");  // GCC does not know what loads of tiles read
  integral_constant<int, 1> one;
  integral_constant<int, 2> two;
  int c = 0;
  if (rows > ROWS) {
    for (; c + 2 <= columns; c += 2) multiply(two, two, c);
    if (c < columns) multiply(two, one, c);
    return;
  }
  for (; c + 4 <= columns; c += 4) multiply(one, integral_constant<int, 4>{}, c);
  if (c + 2 <= columns) {
    multiply(one, two, c);
    c += 2;
  }
  if (c < columns) multiply(one, one, c);
}

// Ask for a tile of so many depths, in the first cache: a load of a tile waits for each line.
INLINE void prefetch(const bf16* tile, int depth) {
  for (int k = 0; k < depth; k += 2) __builtin_prefetch(tile + k * PANEL, 0, 3);
}

// Write the scores of rows of queries with groups of keys. Queries are [slices][rows][slice].
// `ahead`: groups that will be read soon; null: none.
__attribute__((noinline)) inline void score(const bf16* queries, long slice, long slice_stride,
                                            int rows, const bf16* const* keys, int groups,
                                            long depth, const bf16* const* ahead, float* scores,
                                            long stride) {
  in_tiles(rows, groups, [&](auto r, auto n, int g) {
    auto x = [&](long k) { return queries + k / slice * slice_stride + k % slice; };
    sum<r, n>(scores + g * PANEL, stride, [&] {
      long k = 0;
      auto columns = [&](int c) {
        if (ahead) prefetch(ahead[g + c] + k * PANEL, DEPTH);
        return keys[g + c] + k * PANEL;
      };
      for (; k + DEPTH <= depth; k += DEPTH) add<r, n>(x(k), slice, columns);
      if (k < depth) add_fewer<r, n>(x(k), slice, columns);
    });
  });
}

// Write the sums of values of groups by the weights of rows.
__attribute__((noinline)) inline void sum_values(const bf16* weights, long weights_stride, int rows,
                                                 const bf16* const* values, int groups, int panels,
                                                 const bf16* const* ahead, float* sums,
                                                 long stride) {
  in_tiles(rows, panels, [&](auto r, auto n, int panel) {
    sum<r, n>(sums + panel * PANEL, stride, [&] {
      for (int g = 0; g < groups; g++)
        add_fewer<r, n>(weights + g * PANEL, weights_stride, [&](int c) {
          if (ahead) prefetch(ahead[g] + (panel + c) * PANEL * PANEL, PANEL);
          return values[g] + (panel + c) * PANEL * PANEL;
        });
    });
  });
}
#endif

}  // namespace attention_tiles
