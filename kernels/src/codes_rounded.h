// Products of rows that are rounded to integers with panels of low-bit codes.
#pragma once

#include "codes_integer_tiles.h"

namespace codes {
namespace integers {

// Return whether codes are integers, but for a constant.
inline bool serves(const Segment& segment) { return segment.is_affine; }

// Values are codes plus a constant, which becomes part of the offsets.
template <int P>
void add_constant(Chunk& chunk, float constant, bool had_offsets) {
  for (long i = 0; i < chunk.steps * P * PANEL; i++)
    chunk.offsets[i] = (had_offsets ? chunk.offsets[i] : 0.0f) + chunk.scales[i] * constant;
}

// Multiply `count` rows with P panels: y [count][P * PANEL].
template <int P>
void multiply_panels(const Panels& panels, Rows rows, int count, bool words, float* y) {
  const Segment& segment = panels.segment;
  long padded = panels.matrix.padded(), bytes = segment.bits * 64;
  long stride = panels.strip.width * bytes;
  const uint8_t* at = panels.at(segment.codes, padded / BLOCK, bytes);
  Reader scales(panels, segment.scales), offsets(panels, segment.offsets);
  Chunk chunk;
  bool has_offsets = chunk.has_offsets = segment.offsets.storage != NONE;
  float constant = segment.bits == 8 ? 0.0f : to_float(segment.values[0]);
  std::fill(y, y + count * P * PANEL, 0.0f);
  long units = CHUNK_UNITS;
#if defined(__AMX_INT8__)
  TileRegisters registers;
  if (count >= LEAST_TILE_ROWS) units = UNPACKED_UNITS;
#endif
  auto run = [&](auto bits, auto halves) {
    constexpr int BITS = decltype(bits)::value;
    constexpr bool HALVES = decltype(halves)::value;
    const uint8_t* from = at + chunk.first_unit * UNIT / BLOCK * stride;
#if defined(__AMX_INT8__)
    if (count >= LEAST_TILE_ROWS) {
      auto run = words ? multiply_by_tiles<BITS, true, HALVES, P>
                       : multiply_by_tiles<BITS, BITS == 8, HALVES, P>;
      return run(from, stride, chunk, rows, count, registers, y);
    }
#endif
    auto tiles_of = words ? tiles<BITS, true, HALVES, P> : tiles<BITS, BITS == 8, HALVES, P>;
    tiles_of(from, stride, chunk, rows, count, y);
  };
  auto run_bits = [&](auto bits) {
    if (segment.group == UNIT) return run(bits, std::true_type{});
    run(bits, std::false_type{});
  };
  while (true) {
    chunk.has_offsets = has_offsets;
    if (!read_next<P>(segment, padded, scales, offsets, chunk, units)) return;
    if (constant != 0.0f) {
      add_constant<P>(chunk, constant, has_offsets);
      chunk.has_offsets = true;
    }
    switch (segment.bits) {
      case 4: run_bits(std::integral_constant<int, 4>{}); break;
      case 5: run_bits(std::integral_constant<int, 5>{}); break;
      case 6: run_bits(std::integral_constant<int, 6>{}); break;
      default: run_bits(std::integral_constant<int, 8>{}); break;
    }
  }
}

// Multiply some rows with all panels of a strip, and write the products.
template <class T, class Y>
void multiply_strip(const Matrix& matrix, const Segment& segment, long first, long width, Rows rows,
                    long row, int count, bool words, long column, const Output<T, Y>& output) {
  constexpr int PANELS = HAS_INTEGER_TILES ? STRIP : 1;
  alignas(64) float sums[ROWS_AT_ONCE<bf16> * PANELS * PANEL];
  for (long panel = first; panel < first + width;) {
    Panels panels(matrix, segment, panel);
    long from = panel * PANEL, left = segment.rows - from;
    bool is_whole = first + width - panel >= ROW_PANELS;
    if (is_whole && (count == 1 || count >= LEAST_TILE_ROWS)) {
      multiply_panels<ROW_PANELS>(panels, rows, count, words, sums);
      output.template write<ROW_PANELS>(sums, row, count, column + from,
                                        std::min<long>(left, ROW_PANELS * PANEL));
      panel += ROW_PANELS;
    } else {
      multiply_panels<1>(panels, rows, count, words, sums);
      output.template write<1>(sums, row, count, column + from, std::min<long>(left, PANEL));
      panel++;
    }
  }
}

}  // namespace integers
}  // namespace codes
