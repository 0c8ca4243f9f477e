// Products of tiles (Intel AMX): 16 rows of x by 32 depths with 32 depths of a panel of bf16, which
// has the layout of such a tile.
//
// An element of y is one chain of sums over 32 depths each, in order, whatever the number of rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace tiles {

#if defined(__AMX_BF16__)
template <class W>
constexpr bool AVAILABLE = sizeof(W) == 2;
#else
template <class W>
constexpr bool AVAILABLE = false;
#endif
constexpr int ROWS = 16, DEPTH = 32;  // of a tile
constexpr int PAIR = 2, FEW = 6;      // panels at once: with two tiles of rows, and with one

#if defined(__AMX_BF16__)
// The rows of each register, and the bytes of a row.
class alignas(64) Layout {
 public:
  void set(int i, int rows, int bytes) {
    rows_[i] = (uint8_t)rows;
    bytes_[i] = (uint16_t)bytes;
  }
  void use() const {
    asm volatile("" : : "r"(this) : "memory");  // GCC takes only 8 bytes of it to be read
    _tile_loadconfig(this);
  }

 private:
  uint8_t palette_ = 1, start_row_ = 0, reserved_[14] = {};
  uint16_t bytes_[16] = {};
  uint8_t rows_[16] = {};
};

// The registers. With one tile of rows, sums are in 0 to 5, the rows in 6 and weights in 7; with two
// of two panels, sums in 0 to 3, rows in 4 and 5, weights in 6 and 7.
class Registers {
 public:
  Registers() = default;
  Registers(const Registers&) = delete;
  ~Registers() { _tile_release(); }

  // Set the rows of the two tiles; 0: there is no second one.
  void use(int first, int second) {
    if (first == first_ && second == second_) return;
    first_ = first;
    second_ = second;
    Layout layout;
    for (int i = 0; i < 8; i++) {
      bool is_second = second && (i == 2 || i == 3 || i == 5);
      bool is_weights = i == 7 || (second && i == 6);
      layout.set(i, is_weights ? ROWS : is_second ? second : first, 64);
    }
    layout.use();
  }

 private:
  int first_ = -1, second_ = -1;
};

// Add up one tile of rows with P panels.
template <int P>
void one(const bf16* x, long stride, const bf16* w, size_t size, long depth,
         float (&sums)[FEW][ROWS * PANEL]) {
  // The numbers of registers have to be constants.
#define HP_EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define HP_ZERO(C) \
  if constexpr (P > C) _tile_zero(C);
#define HP_MULTIPLY(C)                                       \
  if constexpr (P > C) {                                     \
    _tile_loadd(7, w + C * size + k * PANEL, 64);            \
    _tile_dpbf16ps(C, 6, 7);                                 \
  }
#define HP_STORE(C) \
  if constexpr (P > C) _tile_stored(C, sums[C], 64);
  HP_EACH(HP_ZERO)
  for (long k = 0; k < depth; k += DEPTH) {
    _tile_loadd(6, x + k, stride * 2);
    HP_EACH(HP_MULTIPLY)
  }
  HP_EACH(HP_STORE)
#undef HP_EACH
#undef HP_ZERO
#undef HP_MULTIPLY
#undef HP_STORE
}

// Add up two tiles of rows with two panels.
inline void two(const bf16* x, long stride, const bf16* w, size_t size, long depth,
                float (&sums)[FEW][ROWS * PANEL]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long k = 0; k < depth; k += DEPTH) {
    _tile_loadd(6, w + k * PANEL, 64);
    _tile_loadd(4, x + k, stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + size + k * PANEL, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + ROWS * stride + k, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

// Write the sums of some rows and a panel, of which y has `left` columns.
template <class Product>
void write(const Product& product, const float* sums, long row, int rows, long panel) {
  int count = (int)std::min<long>(PANEL, product.columns - panel * PANEL);
  Floats bias = product.bias ? load_part(product.bias + panel * PANEL, count) : Floats{};
  auto* y = product.y + row * product.y_stride + panel * PANEL;
  for (int r = 0; r < rows; r++, y += product.y_stride) {
    Floats sum = load(sums + r * PANEL);
    if (product.bias) sum += bias;
    count == PANEL ? store(y, sum) : store_part(y, sum, count);
  }
}

// Multiply `rows` rows, the first of which is row `row` of y, with `panels` panels of `size`.
template <class Product>
void multiply(const Product& product, const bf16* x, long stride, long row, int rows, long panel,
              int panels, size_t size, long depth, Registers& registers) {
  alignas(64) float sums[FEW][ROWS * PANEL];
  const bf16* w = product.weights + panel * size;
  asm volatile("" : : : "memory");  // GCC does not know what loads of tiles read
  for (int r = 0; r < rows;) {
    const bf16* at = x + r * stride;
    int left = rows - r, count = std::min(left, ROWS);
    if (left > ROWS && panels == PAIR) {
      int second = std::min(left - ROWS, ROWS);
      registers.use(ROWS, second);
      two(at, stride, w, size, depth, sums);
      for (int p = 0; p < PAIR; p++) {
        write(product, sums[p], row + r, ROWS, panel + p);
        write(product, sums[PAIR + p], row + r + ROWS, second, panel + p);
      }
      r += ROWS + second;
      continue;
    }
    registers.use(count, 0);
    constexpr decltype(&one<1>) SUMS[] = {one<1>, one<2>, one<3>, one<4>, one<5>, one<6>};
    SUMS[panels - 1](at, stride, w, size, depth, sums);
    for (int p = 0; p < panels; p++) write(product, sums[p], row + r, count, panel + p);
    r += count;
  }
}
#endif

}  // namespace tiles
