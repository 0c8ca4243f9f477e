// Attention by products of tiles (Intel AMX): queries, keys and values of bf16.
//
// A group of keys is a sequence of tiles of 32 depths by 16 tokens. The last one is as deep as what
// is left of the head: what follows is another group. Values of two groups are joined in memory of
// the thread, because a tile of 16 tokens takes as long as one of 32; tokens that no query sees
// become 0 there.
//
// A score is one chain of sums over 32 depths each, and a result one over 32 tokens of a part each,
// in order, whatever the number of rows.
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
constexpr int AT_ONCE = 2 * ROWS, PANELS = 8;  // rows, and panels of values
constexpr long SLICE = 128;               // depths of x, one behind the other
constexpr size_t HALF = PANEL * PANEL;    // a panel of a group of values
constexpr size_t JOINED = DEPTH * PANEL;  // that of two groups

#if defined(__AMX_BF16__)
// The registers. Sums are in 0 to 3, rows in 4, the other operand in 6. If there is a last tile of
// fewer depths, 5 and 7 have its shape; if not, 5 is for a second tile of rows.
class Registers {
 public:
  Registers(int rows, long depth) {
    tiles::Layout layout;
    int rest = (int)(depth % DEPTH);
    for (int i = 0; i < 5; i++) layout.set(i, std::min(rows, ROWS), 64);
    layout.set(5, std::min(rows, ROWS), rest ? rest * 2 : 64);
    layout.set(6, ROWS, 64);
    layout.set(7, rest ? rest / 2 : ROWS, 64);
    layout.use();
  }
  Registers(const Registers&) = delete;
  ~Registers() { _tile_release(); }
};

// Rows of x in slices, as panels of weights of `step` elements for each 32 depths are multiplied with.
struct Product {
  const bf16* x;
  long slice;  // elements from one slice of SLICE depths to the next
  const bf16* const* columns;
  size_t step;
  long depth;
  float* y;
  long stride;

  const bf16* rows(long i) const {
    constexpr long PER_SLICE = SLICE / DEPTH;
    return x + i / PER_SLICE * slice + i % PER_SLICE * DEPTH;
  }
};

// Multiply a tile of rows with N panels.
template <int N>
inline void one(const Product& product, int row, int column) {
  // The numbers of registers have to be constants.
#define HP_EACH(DO) DO(0) DO(1) DO(2) DO(3)
#define HP_ZERO(C) \
  if constexpr (N > C) _tile_zero(C);
#define HP_MULTIPLY(C, X, W)                                            \
  if constexpr (N > C) {                                                \
    _tile_loadd(W, product.columns[column + C] + i * product.step, 64); \
    _tile_dpbf16ps(C, X, W);                                            \
  }
#define HP_WHOLE(C) HP_MULTIPLY(C, 4, 6)
#define HP_LAST(C) HP_MULTIPLY(C, 5, 7)
#define HP_STORE(C) \
  if constexpr (N > C) _tile_stored(C, y + C * PANEL, product.stride * 4);
  HP_EACH(HP_ZERO)
  long i = 0;
  for (; i < product.depth / DEPTH; i++) {
    _tile_loadd(4, product.rows(i) + row * SLICE, SLICE * 2);
    HP_EACH(HP_WHOLE)
  }
  if (product.depth % DEPTH) {
    _tile_loadd(5, product.rows(i) + row * SLICE, SLICE * 2);
    HP_EACH(HP_LAST)
  }
  float* y = product.y + row * product.stride + column * PANEL;
  HP_EACH(HP_STORE)
#undef HP_EACH
#undef HP_ZERO
#undef HP_MULTIPLY
#undef HP_WHOLE
#undef HP_LAST
#undef HP_STORE
}

// Multiply two tiles of rows with two panels; all tiles are whole.
inline void two(const Product& product, int column) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long i = 0; i < product.depth / DEPTH; i++) {
    _tile_loadd(4, product.rows(i), SLICE * 2);
    _tile_loadd(6, product.columns[column] + i * product.step, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, product.columns[column + 1] + i * product.step, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, product.rows(i) + ROWS * SLICE, SLICE * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  float* y = product.y + column * PANEL;
  _tile_stored(0, y, product.stride * 4);
  _tile_stored(1, y + PANEL, product.stride * 4);
  _tile_stored(2, y + ROWS * product.stride, product.stride * 4);
  _tile_stored(3, y + ROWS * product.stride + PANEL, product.stride * 4);
}

// Multiply up to 2 tiles of rows with any number of panels. `whole`: so are all tiles of registers.
inline void multiply(const Product& product, int rows, int columns, bool whole) {
  constexpr decltype(&one<1>) FEW[] = {one<1>, one<2>, one<3>, one<4>};
  asm volatile("" : : : "memory");  // GCC does not know what loads of tiles read
  int column = 0;
  if (rows > ROWS && whole)
    for (; column + 2 <= columns; column += 2) two(product, column);
  for (; column < columns; column += 4) {
    int count = std::min(columns - column, 4);
    for (int row = 0; row < rows; row += ROWS) FEW[count - 1](product, row, column);
  }
}
#endif

// Join a group of values with the other one of its pair; tokens outside of `first` to `end` are 0.
inline void join_values(const bf16* from, long panels, int first, int end, bf16* to) {
  if (first == end) {  // there may be no such group
    for (long panel = 0; panel < panels; panel++) std::fill_n(to + panel * JOINED, HALF, bf16{});
    return;
  }
  uint32_t seen[PANEL / 2];
  for (int i = 0; i < PANEL / 2; i++) {
    auto sees = [&](int token) { return token >= first && token < end; };
    seen[i] = (sees(2 * i) ? 0xffff : 0) | (sees(2 * i + 1) ? 0xffff0000 : 0);
  }
  constexpr int PER = 2 * LANES;
  for (long panel = 0; panel < panels; panel++)
    for (size_t i = 0; i < HALF; i += PER) {
      Words words = load_words(from + panel * HALF + i) & seen[i / (2 * PANEL)];
      memcpy(to + panel * JOINED + i, &words, sizeof words);
    }
}

}  // namespace attention_tiles
