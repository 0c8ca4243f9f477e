// y = x W^T + b for packed W.
//
// W [columns, depth] is packed in panels of 16 columns. A panel of bf16 has, for each pair of
// depths, the two values of every column side by side; one of float32 has, for each depth, the value
// of every column. A pass over a panel reads memory in order, and the layout of bf16 serves
// processors that multiply pairs as well as those that do not.
//
// Every element of y is one chain of additions over the depth, in order, whatever the number of
// rows, threads and blocks: a row's result never depends on the other rows. Processors that have
// tiles add up those (`tiles.h`); a panel of weights is padded to whole ones.
#pragma once

#include <algorithm>
#include <atomic>

#include "parallel.h"
#include "tiles.h"
#include "vector.h"

namespace gemm {

// Rows and panels whose sums are in registers at once: where x has many rows, and where it has one
// or two and reading W is what takes time.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 8, TILE_PANELS = 3, STREAM_PANELS = 6;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 6, TILE_PANELS = 1, STREAM_PANELS = 2;
#else
constexpr int TILE_ROWS = 2, TILE_PANELS = 1, STREAM_PANELS = 1;
#endif
constexpr int STREAM_ROWS = 2;
constexpr int MAX_PANELS = std::max(TILE_PANELS, STREAM_PANELS);
constexpr int MAX_ROWS = 64;        // of a block of x, which stays in a core's cache
constexpr long CACHED = 128 << 10;  // elements of such a block, about
constexpr int DEPTH = 1024;         // of a block of panels, which stays in a core's cache; even
constexpr int AHEAD = 12;           // of a panel, in lines of memory

// Elements of a packed panel.
template <class W>
constexpr size_t panel_size(long depth) {
  return (size_t)(sizeof(W) == 2 ? (depth + 1) / 2 * 2 : depth) * PANEL;
}

// Depths of packed weights, with those that are padded.
template <class W>
constexpr long padded_depth(long depth) {
  constexpr long UNIT = tiles::AVAILABLE<W> ? tiles::DEPTH : sizeof(W) == 2 ? 2 : 1;
  return (depth + UNIT - 1) / UNIT * UNIT;
}

// What is multiplied with packed weights.
#if defined(__AVX512BF16__)
template <class W>
using Operand = W;
#else
template <class W>
using Operand = float;
#endif

// Memory that will be multiplied after this: so many bytes of it per depth are asked for.
struct Later {
  const char* at = nullptr;
  long per_depth = 0;

  // Ask for the part of `depths` from depth k on.
  __attribute__((always_inline)) void prefetch(int k, int depths) const {
    const char* from = at + k * per_depth;
    for (long i = 0; i < depths * per_depth; i += 64) __builtin_prefetch(from + i, 0, 2);
  }
};

// Ask memory for what will be multiplied soon: at the same depth of the panels `ahead` if there are
// such, else further on in the same ones where reading them is what takes time. It comes to the
// second cache: of lines for the first one, a core waits for few at a time.
template <bool STREAM, int V, class W>
INLINE void prefetch(const W* const (&weights)[V], const W* const* ahead, int k, int depth_of_line) {
  if (ahead) {
#pragma GCC unroll 16
    for (int v = 0; v < V; v += PANEL_VECTORS)
      __builtin_prefetch(ahead[v / PANEL_VECTORS] + (size_t)k * PANEL, 0, 2);
  } else if (STREAM) {
#pragma GCC unroll 16
    for (int v = 0; v < V; v++)
      __builtin_prefetch(weights[v] + (size_t)(k + AHEAD * depth_of_line) * PANEL, 0, 2);
  }
}

#if !defined(__AVX512BF16__)
template <int R, int V, bool STREAM = (R <= STREAM_ROWS)>
INLINE void multiply(const float* x, long stride, const bf16* const (&weights)[V], int depth,
                     Floats (&sums)[R][V], const bf16* const* ahead = nullptr,
                     Later later = {}) {
  for (int k = 0; k < depth; k += 2) {
    prefetch<STREAM, V>(weights, ahead, k, 2);
    if (!STREAM) later.prefetch(k, 2);
    // Row by row: a value of x is in a register only while a row is multiplied with it.
    Floats values[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++)
      values[v] = (Floats)(load_words(weights[v] + (size_t)k * PANEL) << 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) sums[r][v] += x[r * stride + k] * values[v];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++)
      values[v] = (Floats)(load_words(weights[v] + (size_t)k * PANEL) & 0xffff0000u);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) sums[r][v] += x[r * stride + k + 1] * values[v];
  }
}
#else
// The depths k and k + 1 alone. W is what `load_pairs` reads.
template <int R, int V, class W>
INLINE void multiply_pair(const bf16* x, long stride, const W* const (&weights)[V], int k,
                          Floats (&sums)[R][V]) {
  Pairs pairs[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; v++) pairs[v] = load_pairs(weights[v] + (size_t)k * PANEL);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    Pairs value = splat_pair(x + r * stride + k);
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[r][v] = add_products(sums[r][v], value, pairs[v]);
  }
}

template <int R, int V, bool STREAM = (R <= STREAM_ROWS)>
INLINE void multiply(const bf16* x, long stride, const bf16* const (&weights)[V], int depth,
                     Floats (&sums)[R][V], const bf16* const* ahead = nullptr,
                     Later later = {}) {
  for (int k = 0; k < depth; k += 2) {
    prefetch<STREAM, V>(weights, ahead, k, 2);
    if (!STREAM) later.prefetch(k, 2);
    multiply_pair<R, V>(x, stride, weights, k, sums);
  }
}
#endif

template <int R, int V, bool STREAM = (R <= STREAM_ROWS)>
INLINE void multiply(const float* x, long stride, const float* const (&weights)[V], int depth,
                     Floats (&sums)[R][V], const float* const* ahead = nullptr,
                     Later later = {}) {
  for (int k = 0; k < depth; k++) {
    prefetch<STREAM, V>(weights, ahead, k, 1);
    if (!STREAM) later.prefetch(k, 1);
    Floats values[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) values[v] = load(weights[v] + (size_t)k * PANEL);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) sums[r][v] += x[r * stride + k] * values[v];
  }
}

template <class W, class Y>
struct Product {
  const W* weights;
  const W* bias;  // or null
  Y* y;
  long y_stride, columns, depth;
};

// Multiply R rows with P panels over the depths from `from` to `to`; the sums of a row's first
// depths wait in `partial` [rows][MAX_PANELS * PANEL]. STREAM: reading the panels is what takes time.
template <int R, int P, bool STREAM, class W, class Y>
__attribute__((noinline)) void tile(const Product<W, Y>& product, const Operand<W>* x, long stride,
                                    long row, long panel, long from, long to, float* partial,
                                    Later later) {
  constexpr int V = P * PANEL_VECTORS;
  const W* weights[V];
  size_t size = panel_size<W>(padded_depth<W>(product.depth));
  for (int v = 0; v < V; v++)
    weights[v] = product.weights + (panel + v / PANEL_VECTORS) * size + from * PANEL +
                 (v % PANEL_VECTORS) * LANES * (4 / sizeof(W));
  // The lines of y that are written at the end: a core waits for few stores at a time.
  if (to == product.depth) {
    for (int r = 0; r < R; r++) {
      const Y* y = product.y + (row + r) * product.y_stride + panel * PANEL;
      __builtin_prefetch(y, 1);
      __builtin_prefetch(y + P * PANEL - 1, 1);
    }
  }
  Floats sums[R][V];
  if (from) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) sums[r][v] = load(partial + r * MAX_PANELS * PANEL + v * LANES);
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) sums[r][v] = Floats{};
  }
  multiply<R, V, STREAM>(x + from, stride, weights, (int)(to - from), sums, nullptr, later);
  if (to < product.depth) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) store(partial + r * MAX_PANELS * PANEL + v * LANES, sums[r][v]);
    return;
  }
  Y* y = product.y + row * product.y_stride + panel * PANEL;
  long left = product.columns - panel * PANEL;
  if (!product.bias && left >= V * LANES) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) store(y + r * product.y_stride + v * LANES, sums[r][v]);
    return;
  }
  for (int v = 0; v < V && v * LANES < left; v++) {
    int count = (int)std::min<long>(LANES, left - v * LANES);
    Floats bias = product.bias ? load_part(product.bias + panel * PANEL + v * LANES, count) : Floats{};
    for (int r = 0; r < R; r++) {
      Floats sum = product.bias ? sums[r][v] + bias : sums[r][v];
      Y* to_y = y + r * product.y_stride + v * LANES;
      count == LANES ? store(to_y, sum) : store_part(to_y, sum, count);
    }
  }
}

// Multiply `rows` rows (the first is row `row` of y) with P panels; those at `next`, if any, are next.
template <int R, int P, class W, class Y>
void block(const Product<W, Y>& product, const Operand<W>* x, long stride, long row, int rows,
           long panel, const W* next) {
  alignas(64) float partial[MAX_ROWS * MAX_PANELS * PANEL];
  // Each tile of rows asks for a part of the next panels.
  long tiles = (rows + R - 1) / R, share = P * PANEL * (long)sizeof(W) / tiles;
  for (long from = 0; from < product.depth; from += DEPTH) {
    long to = std::min(from + DEPTH, product.depth);
    for (int r = 0; r < rows;) {
      Later later;
      if (next && tiles > 1) later = {(const char*)next + (r / R * product.depth + from) * share, share};
      const Operand<W>* at = x + r * stride;
      float* kept = partial + (size_t)r * MAX_PANELS * PANEL;
      // Few sizes of tiles, which are compiled quickly; together they serve any number of rows.
      int count = std::min(R, rows - r);
      if (count == R) {
        auto run = tiles == 1 ? tile<R, P, true, W, Y> : tile<R, P, false, W, Y>;
        run(product, at, stride, row + r, panel, from, to, kept, later);
      } else if (R > 4 && count >= 4) {
        auto run = tiles == 1 ? tile<4, P, true, W, Y> : tile<4, P, false, W, Y>;
        run(product, at, stride, row + r, panel, from, to, kept, later);
        count = 4;
      } else if (R > 2 && count >= 2) {
        tile<2, P, true>(product, at, stride, row + r, panel, from, to, kept, later);
        count = 2;
      } else {
        tile<1, P, true>(product, at, stride, row + r, panel, from, to, kept, later);
        count = 1;
      }
      r += count;
    }
  }
}

// As `block`, for `panels` panels, which are P but for the last ones.
template <int R, int P, class W, class Y>
void blocks(const Product<W, Y>& product, const Operand<W>* x, long stride, long row, int rows,
            long panel, int panels, const W* next) {
  if (panels == P) return block<R, P>(product, x, stride, row, rows, panel, next);
  for (int p = 0; p < panels; p++) block<R, 1>(product, x, stride, row, rows, panel + p, (W*)nullptr);
}

// Rows of x as operands: converted into memory of the thread, or in place.
template <class W>
class Operands {
 public:
  const Operand<W>* at = nullptr;
  long stride = 0;

  // Get rows that the thread may have got already in this call of `linear`; 0 from depth to padded.
  template <class X>
  void get(const X* x, long x_stride, int rows, long depth, long padded, long call) {
    if (call == call_ && x == x_) return;
    call_ = call;
    x_ = x;
    if constexpr (std::is_same_v<X, Operand<W>>) {
      if (padded == depth) {
        at = x;
        stride = x_stride;
        return;
      }
    }
    Operand<W>* to = scratch_.get((size_t)rows * padded);
    for (int r = 0; r < rows; r++) {
      const X* from = x + r * x_stride;
      long k = 0;
      for (; k + LANES <= depth; k += LANES) store(to + r * padded + k, load(from + k));
      for (; k < depth; k++) store_one(to + r * padded + k, to_float(from[k]));
      for (; k < padded; k++) store_one(to + r * padded + k, 0.0f);
    }
    at = to;
    stride = padded;
  }

 private:
  Scratch<Operand<W>> scratch_;
  long call_ = 0;
  const void* x_ = nullptr;
};

// y [rows, columns] = x [rows, depth] W^T + bias.
template <class X, class W, class Y>
void linear(const X* x, long x_stride, const W* weights, const W* bias, Y* y, long y_stride,
            long rows, long columns, long depth) {
  static thread_local Operands<W> operands;
  static std::atomic<long> calls{0};
  long call = ++calls;
  Product<W, Y> product{weights, bias, y, y_stride, columns, depth};
  if (!rows) return;
  long panels = (columns + PANEL - 1) / PANEL;
  long padded = padded_depth<W>(depth);
  constexpr bool TILES = tiles::AVAILABLE<W>;
  constexpr int UNIT = TILES ? 2 * tiles::ROWS : TILE_ROWS;
  int group = rows <= STREAM_ROWS ? STREAM_PANELS : TILE_PANELS;
  if (TILES) group = rows <= tiles::ROWS ? tiles::FEW : tiles::PAIR;
  // Whole units, so that a block that is rounded up to units has no more than MAX_ROWS.
  constexpr int LARGEST = TILES ? 8 * UNIT : MAX_ROWS / UNIT * UNIT;
  long most = std::clamp<long>(CACHED / depth / UNIT * UNIT, UNIT, LARGEST);
  long groups = (panels + group - 1) / group, row_blocks = (rows + most - 1) / most;
  // Blocks of about the same size: each reads all of W.
  long at_once = (rows + row_blocks * UNIT - 1) / (row_blocks * UNIT) * UNIT;
  // An item is a few groups of panels for one block of rows, so that converting the rows costs
  // little beside multiplying them.
  long per_item = std::max<long>(1, std::min<long>(groups / (4 * omp_get_max_threads()), 8));
  long items = (groups + per_item - 1) / per_item;
  auto multiply_item = [&](long index) {
    long row = index / items * at_once, first = index % items * per_item;
    int count = (int)std::min<long>(at_once, rows - row);
    // A thread's items are mostly of the same rows.
    operands.get(x + row * x_stride, x_stride, count, depth, padded, call);
    const Operand<W>* operand = operands.at;
    long stride = operands.stride;
    long end = std::min(first + per_item, groups);
    size_t size = panel_size<W>(padded);
#if defined(__AMX_BF16__)
    if constexpr (TILES) {
      tiles::Registers registers;
      for (long g = first; g < end; g++) {
        int width = (int)std::min<long>(group, panels - g * group);
        tiles::multiply(product, operand, stride, row, count, g * group, width, size, padded,
                        registers);
      }
      return;
    }
#endif
    for (long g = first; g < end; g++) {
      int width = (int)std::min<long>(group, panels - g * group);
      const W* next = g + 1 < end ? weights + (g + 1) * group * size : nullptr;
      if (rows <= STREAM_ROWS)
        blocks<STREAM_ROWS, STREAM_PANELS>(product, operand, stride, row, count, g * group, width,
                                           next);
      else
        blocks<TILE_ROWS, TILE_PANELS>(product, operand, stride, row, count, g * group, width, next);
    }
  };
  // Blocks of rows that are multiplied at the same time share what they read of W.
  for_each_item(row_blocks * items, multiply_item, omp_get_max_threads(), row_blocks == 1);
}

// Pack W [columns, depth], rows contiguous; what is padded is 0.
template <class W>
void pack(const W* from, W* to, long columns, long depth) {
  long panels = (columns + PANEL - 1) / PANEL;
  size_t size = panel_size<W>(padded_depth<W>(depth));
  constexpr int PER = sizeof(W) == 2 ? 2 : 1;
  for_each_item(panels, [&](long panel) {
    W* out = to + panel * size;
    for (long k = 0; k < (long)(size / PANEL); k += PER)
      for (int c = 0; c < PANEL; c++)
        for (int i = 0; i < PER; i++) {
          long column = panel * PANEL + c;
          out[k * PANEL + c * PER + i] =
              column < columns && k + i < depth ? from[column * depth + k + i] : W{};
        }
  });
}

}  // namespace gemm
