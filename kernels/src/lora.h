// y += scale * (x a^T) b^T, for each row with the low-rank a and b of its adapter (arXiv:2106.09685).
//
// The rows of an adapter are computed together, in blocks that read a and b once. x a^T stays in
// float32: each number is summed over the depth in lanes, then over the lanes. Each number of its
// product with b is one chain of additions over the ranks, in order. A row's result never depends on
// the other rows, nor on ranks that are filled up with zeros.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "experts.h"
#include "parallel.h"
#include "vector.h"

namespace lora {

constexpr long BLOCK = 32;             // rows of an adapter that are computed together, at most
constexpr long GRAIN = 64 << 10;       // multiplications that are worth a thread
constexpr long READ = 4;               // multiplications that take as long as to read a number
constexpr long PANELS = 8;             // of columns that are computed together
constexpr int RANKS = 4;               // whose sums are in registers at once
constexpr int SHRINK_ROWS = LANES == 16 ? 4 : 2;
constexpr int EXPAND_ROWS = 8 / PANEL_VECTORS;
constexpr int WORDS = LANES < 8 ? LANES : 8;  // of a row of b that are transposed at once

// Numbers that one step of a sum over the depth takes.
template <class T>
constexpr long STEP = LANES * 4 / sizeof(T);

template <class T>
struct Adapters {
  const T* a;  // [count][rank][depth]
  long a_stride, a_row_stride;
  const T* b;  // [count][columns][rank]
  long b_stride, b_row_stride;
  const float* scales;
  long count, rank, depth, columns;
};

// Rows of one adapter: places `from` to `to` of the order by adapter.
struct Block {
  long adapter, from, to;
};

// Call run(integral_constant<R>, i) for tiles of R items, then for smaller ones.
template <int R, class Run>
INLINE void in_tiles(long from, long to, Run run) {
  for (; from + R <= to; from += R) run(std::integral_constant<int, R>{}, from);
  if constexpr (R > 1) in_tiles<R / 2>(from, to, run);
}

// sums[r][q] += x[r] * a[q], lane by lane, for STEP numbers from k on.
template <int R, int Q>
INLINE void add_step(const float* const (&x)[R], const float* const (&a)[Q], long k,
                     Floats (&sums)[R][Q]) {
  Floats values[Q];
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++) values[q] = load(a[q] + k);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    Floats value = load(x[r] + k);
#pragma GCC unroll 16
    for (int q = 0; q < Q; q++) sums[r][q] += value * values[q];
  }
}

template <int R, int Q>
INLINE void add_step(const bf16* const (&x)[R], const bf16* const (&a)[Q], long k,
                     Floats (&sums)[R][Q]) {
#if defined(__AVX512BF16__)
  Pairs values[Q];
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++) values[q] = load_pairs(a[q] + k);
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    Pairs value = load_pairs(x[r] + k);
#pragma GCC unroll 16
    for (int q = 0; q < Q; q++) sums[r][q] = add_products(sums[r][q], value, values[q]);
  }
#else
  // The first number of each pair, then the second.
  auto add = [&](auto take) __attribute__((always_inline)) {
    Floats values[Q];
#pragma GCC unroll 16
    for (int q = 0; q < Q; q++) values[q] = (Floats)take(load_words(a[q] + k));
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      Floats value = (Floats)take(load_words(x[r] + k));
#pragma GCC unroll 16
      for (int q = 0; q < Q; q++) sums[r][q] += value * values[q];
    }
  };
  add([](Words words) __attribute__((always_inline)) { return words << 16; });
  add([](Words words) __attribute__((always_inline)) { return words & 0xffff0000u; });
#endif
}

// inner[r * stride + q] = x[r] a[q] over the depth.
template <int R, int Q, class T>
__attribute__((noinline)) void shrink_tile(const T* const (&x)[R], const T* a, long a_stride,
                                           long depth, float* inner, long stride) {
  constexpr long PART = STEP<T>;
  const T* rows[Q];
  for (int q = 0; q < Q; q++) rows[q] = a + q * a_stride;
  Floats sums[R][Q] = {};
  long k = 0;
  for (; k + PART <= depth; k += PART) add_step<R, Q>(x, rows, k, sums);
  if (k < depth) {
    T last[R + Q][PART] = {};
    const T *last_x[R], *last_a[Q];
    for (int r = 0; r < R; r++) last_x[r] = (T*)memcpy(last[r], x[r] + k, (depth - k) * sizeof(T));
    for (int q = 0; q < Q; q++)
      last_a[q] = (T*)memcpy(last[R + q], rows[q] + k, (depth - k) * sizeof(T));
    add_step<R, Q>(last_x, last_a, 0, sums);
  }
  for (int r = 0; r < R; r++)
    for (int q = 0; q < Q; q++) inner[r * stride + q] = sum_lanes(sums[r][q]);
}

// Lane j of the first or second of two rows whose blocks of S lanes are exchanged.
constexpr uint32_t exchanged(int j, int s, bool second) {
  return second ? (j & s ? LANES + j : j + s) : (j & s ? LANES + j - s : j);
}
template <int S, bool SECOND, size_t... J>
INLINE Words exchange(Words a, Words b, std::index_sequence<J...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (int)exchanged(J, S, SECOND)...);
#else
  return __builtin_shuffle(a, b, Words{exchanged(J, S, SECOND)...});
#endif
}

// Transpose blocks of WORDS x WORDS, of which each row has LANES / WORDS side by side.
template <int S = 1>
INLINE void transpose(Words (&rows)[WORDS]) {
  if constexpr (S < WORDS) {
    constexpr auto lanes = std::make_index_sequence<LANES>{};
#pragma GCC unroll 16
    for (int i = 0; i < WORDS; i++)
      if (!(i & S)) {
        Words a = rows[i], b = rows[i + S];
        rows[i] = exchange<S, false>(a, b, lanes);
        rows[i + S] = exchange<S, true>(a, b, lanes);
      }
    transpose<2 * S>(rows);
  }
}

// Write a panel [rank][PANEL] of the columns from `column` on. What is next to the ranks is written
// too, up to the next WORDS: it may be anything.
template <class T>
void pack_panel(const Adapters<T>& adapters, const T* b, long column, float* panel) {
  constexpr long TAKEN = WORDS * 4 / sizeof(T);  // ranks at once
  long stride = adapters.b_row_stride, rank = adapters.rank, last = adapters.columns - 1;
  const T* safe = b + last * stride + rank - TAKEN;  // from here on, a row's end is memory's end
  for (int first = 0; first < PANEL; first += LANES)
    for (long k = 0; k < rank; k += TAKEN) {
      Words rows[WORDS];
#pragma GCC unroll 16
      for (int i = 0; i < WORDS; i++)
#pragma GCC unroll 16
        for (int part = 0; part < LANES; part += WORDS) {
          const T* from = b + std::min(column + first + part + i, last) * stride + k;
          T copy[TAKEN] = {};
          if (from > safe) from = (T*)memcpy(copy, from, std::min(rank - k, TAKEN) * sizeof(T));
          memcpy((char*)&rows[i] + part * 4, from, sizeof copy);
        }
      transpose(rows);
      float* to = panel + k * PANEL + first;
#pragma GCC unroll 16
      for (int i = 0; i < WORDS; i++) {
        if constexpr (sizeof(T) == 4) {
          store(to + i * PANEL, (Floats)rows[i]);
        } else {
          store(to + 2 * i * PANEL, (Floats)(rows[i] << 16));
          store(to + (2 * i + 1) * PANEL, (Floats)(rows[i] & 0xffff0000u));
        }
      }
    }
}

// y[r][:count] += scale * inner[r] panel, for at most PANEL columns.
template <int R, class Y>
__attribute__((noinline)) void expand_tile(const float* inner, long rank, const float* panel,
                                           float scale, Y* const (&y)[R], int count) {
  Floats sums[R][PANEL_VECTORS] = {};
  for (long k = 0; k < rank; k++) {
    Floats values[PANEL_VECTORS];
#pragma GCC unroll 16
    for (int v = 0; v < PANEL_VECTORS; v++) values[v] = load(panel + k * PANEL + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] += inner[r * rank + k] * values[v];
  }
  for (int v = 0; v < PANEL_VECTORS && v * LANES < count; v++)
    for (int r = 0; r < R; r++) {
      Y* to = y[r] + v * LANES;
      int left = count - v * LANES;
      if (left >= LANES)
        store(to, load(to) + scale * sums[r][v]);
      else
        store_part(to, load_part(to, left) + scale * sums[r][v], left);
    }
}

// Threads for the work on so many rows and blocks with matrices of `size` numbers.
inline int threads_for(long rows, long blocks, long size) {
  long worth = (rows + READ * blocks) * size / GRAIN;
  return (int)std::clamp<long>(worth, 1, omp_get_max_threads());
}

template <class T, class Y>
void add(Y* y, long y_stride, const T* x, long x_stride, const Adapters<T>& adapters,
         const int64_t* chosen, long rows) {
  static thread_local Scratch<Block> block_scratch;
  static thread_local Scratch<float> inner_scratch;
  static thread_local Scratch<float> panel_scratch;
  auto [rank, depth, columns] = std::tuple(adapters.rank, adapters.depth, adapters.columns);
  experts::Groups groups = experts::group(chosen, {rows, 1, adapters.count, 0, 0});
  const int64_t* order = groups.order;
  Block* blocks = block_scratch.get(rows / BLOCK + adapters.count + 1);
  long count = 0;
  for (long i = 0; i < adapters.count; i++)
    for (long from = groups.starts[i], to = groups.starts[i + 1]; from < to; from += BLOCK)
      blocks[count++] = {i, from, std::min(from + BLOCK, to)};
  if (!count || !rank) return;
  long used = blocks[count - 1].to;
  float* inner = inner_scratch.get(used * rank);

  int threads = threads_for(used, count, rank * depth);
  long per_item = count < 2 * threads ? RANKS : rank, parts = (rank + per_item - 1) / per_item;
  auto shrink = [=](long item) {
    Block block = blocks[item / parts];
    long first = item % parts * per_item, last = std::min(first + per_item, rank);
    const T* a = adapters.a + block.adapter * adapters.a_stride;
    in_tiles<SHRINK_ROWS>(block.from, block.to, [=](auto tile_rows, long row) {
      constexpr int R = decltype(tile_rows)::value;
      const T* x_rows[R];
      for (int r = 0; r < R; r++) x_rows[r] = x + order[row + r] * x_stride;
      in_tiles<RANKS>(first, last, [&](auto ranks, long at) {
        shrink_tile<R, decltype(ranks)::value>(x_rows, a + at * adapters.a_row_stride,
                                               adapters.a_row_stride, depth,
                                               inner + row * rank + at, rank);
      });
    });
  };
  for_each_item(count * parts, shrink, threads);

  long groups_of_panels = (columns + PANELS * PANEL - 1) / (PANELS * PANEL);
  auto expand = [=](long item) {
    Block block = blocks[item / groups_of_panels];
    long first = item % groups_of_panels * PANELS * PANEL;
    float* panel = panel_scratch.get((rank + STEP<T>) * PANEL);
    const T* b = adapters.b + block.adapter * adapters.b_stride;
    float scale = adapters.scales[block.adapter];
    for (long column = first; column < std::min(first + PANELS * PANEL, columns); column += PANEL) {
      pack_panel(adapters, b, column, panel);
      in_tiles<EXPAND_ROWS>(block.from, block.to, [=](auto tile_rows, long row) {
        constexpr int R = decltype(tile_rows)::value;
        Y* y_rows[R];
        for (int r = 0; r < R; r++) y_rows[r] = y + order[row + r] * y_stride + column;
        expand_tile<R>(inner + row * rank, rank, panel, scale, y_rows,
                       (int)std::min<long>(PANEL, columns - column));
      });
    }
  };
  for_each_item(count * groups_of_panels, expand, threads_for(used, count, rank * columns));
}

}  // namespace lora
