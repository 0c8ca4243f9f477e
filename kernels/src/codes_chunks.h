// What all products with low-bit codes share: the factors of some panels, and the rows of y.
#pragma once

#include "codes_vectors.h"
#include "gemm.h"

namespace codes {

using gemm::MAX_ROWS;
using gemm::Operand;

// Panels that are multiplied at once: with codes in registers, and with unpacked ones.
#if defined(__AVX2__)
constexpr int DIRECT_PANELS = 3;
#else
constexpr int DIRECT_PANELS = 1;
#endif
constexpr int TILE_PANELS = gemm::TILE_PANELS;
constexpr int MOST_PANELS = std::max(DIRECT_PANELS, TILE_PANELS);
constexpr long CHUNK_UNITS = 64;  // that are unpacked, or whose factors are read, at once
constexpr long LATER = 1024;      // bytes of factors that are asked for before they are read

// Steps whose factors have been read.
struct Chunk {
  Walk walk;
  long first_unit = 0, first_step = 0;
  long units = 0, steps = 0;
  bool has_offsets = false;
  uint8_t lengths[CHUNK_UNITS + 1];  // of the steps, in units; what follows the last is anything
  alignas(64) float scales[CHUNK_UNITS * MOST_PANELS * PANEL];
  alignas(64) float offsets[CHUNK_UNITS * MOST_PANELS * PANEL];
};

// Panels of one strip.
struct Panels {
  const Matrix& matrix;
  const Segment& segment;
  Strip strip;
  long first;  // a panel of the segment

  Panels(const Matrix& matrix, const Segment& segment, long first)
      : matrix(matrix), segment(segment), strip(first, segment.panels()), first(first) {}

  // Where an array starts that has `parts` of each panel.
  const uint8_t* at(int64_t array, long parts, long part_bytes) const {
    return matrix.at(array) + strip.position(first, parts, 0) * part_bytes;
  }
};

// Reads the factors of some panels.
class Reader {
 public:
  Reader(const Panels& panels, const Factors& factors) : storage_(factors.storage) {
    long padded = panels.matrix.padded(), bytes = PANEL * factors.item_size();
    inner_ = panels.at(factors.inner, panels.segment.groups(padded), bytes);
    inner_stride_ = panels.strip.width * bytes;
    outer_ = factors.is_nested() ? panels.at(factors.outer, outers(padded), PANEL * 2) : nullptr;
    outer_stride_ = panels.strip.width * PANEL * 2;
  }

  // Read those of P panels for the step that `walk` is at.
  template <int P>
  void read(const Walk& walk, float* to) const {
    const uint8_t* inner = inner_ + walk.group * inner_stride_;
    __builtin_prefetch(inner + LATER);
    switch (storage_) {
      case FLOAT32: return read<P>((const float*)inner, walk, to);
      case FLOAT16: return read<P>((const uint16_t*)inner, walk, to);
      case INT8: return read<P>((const int8_t*)inner, walk, to);
      default: return read<P>(inner, walk, to);
    }
  }

 private:
  template <int P, class T>
  void read(const T* inner, const Walk& walk, float* to) const {
    const uint16_t* outer = (const uint16_t*)(outer_ + walk.k / OUTER * outer_stride_);
#pragma GCC unroll 16
    for (int i = 0; i < P * PANEL; i += LANES) {
      if constexpr (sizeof(T) == 1)
        store(to + i, load_bytes(inner + i) * load_half(outer + i));
      else if constexpr (sizeof(T) == 2)
        store(to + i, load_half(inner + i));
      else
        store(to + i, load(inner + i));
    }
  }

  int64_t storage_;
  const uint8_t *inner_, *outer_;
  long inner_stride_, outer_stride_;
};

// Read the steps after those of the chunk, `most` units of them; return whether there are any.
template <int P>
bool read_next(const Segment& segment, long padded, const Reader& scales, const Reader& offsets,
               Chunk& chunk, long most = CHUNK_UNITS) {
  chunk.first_unit += chunk.units;
  chunk.first_step += chunk.steps;
  chunk.units = chunk.steps = 0;
  while (true) {
    Walk next = chunk.walk;
    long length = next.next(segment, padded) / UNIT, at = chunk.steps * P * PANEL;
    if (length == 0 || chunk.units + length > most) return chunk.steps > 0;
    scales.read<P>(chunk.walk, chunk.scales + at);
    if (chunk.has_offsets) offsets.read<P>(chunk.walk, chunk.offsets + at);
    chunk.lengths[chunk.steps++] = (uint8_t)length;
    chunk.units += length;
    chunk.walk = next;
  }
}

// Call `work` with the codes of some panels, from unit `unit` on.
template <class Work>
void with_packed(const Panels& panels, long unit, Work work) {
  const Segment& segment = panels.segment;
  long bytes = segment.bits * 64, stride = panels.strip.width * bytes;
  const uint8_t* at = panels.at(segment.codes, panels.matrix.padded() / BLOCK, bytes) +
                      unit * UNIT / BLOCK * stride;
  auto run = [&](auto bits) {
    constexpr int BITS = decltype(bits)::value;
    if constexpr (!PERMUTES && BITS < 8)
      if (!segment.is_affine) return work(Packed<BITS, true>{at, stride, segment.values});
    work(Packed<BITS, PERMUTES>{at, stride, segment.values});
  };
  switch (segment.bits) {
    case 4: return run(std::integral_constant<int, 4>{});
    case 5: return run(std::integral_constant<int, 5>{});
    case 6: return run(std::integral_constant<int, 6>{});
    default: return run(std::integral_constant<int, 8>{});
  }
}

// Rows of x, and their sums over the steps.
template <class X>
struct Rows {
  const X* x;
  const float* sums;
  long stride, sums_stride;

  Rows from(long row) const {
    return {x + row * stride, sums + row * sums_stride, stride, sums_stride};
  }
};

// y, and what is added to it. T: the type of x and bias.
template <class T, class Y>
struct Output {
  const T* bias;  // or null
  Y* y;
  long stride;

  // Write rows [rows][P * PANEL] of sums to columns `column` to column + count.
  template <int P>
  void write(const float* sums, long row, int rows, long column, long count) const {
    for (long c = 0; c < count; c += LANES) {
      int part = (int)std::min<long>(LANES, count - c);
      Floats add = bias ? load_part(bias + column + c, part) : Floats{};
      for (int r = 0; r < rows; r++) {
        Floats sum = load(sums + r * P * PANEL + c);
        if (bias) sum += add;
        Y* to = y + (row + r) * stride + column + c;
        part == LANES ? store(to, sum) : store_part(to, sum, part);
      }
    }
  }
};

}  // namespace codes
