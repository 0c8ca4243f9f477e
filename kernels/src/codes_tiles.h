// Products with low-bit codes by tiles (Intel AMX): 16 rows of x by the depths of a step.
//
// The codes of a chunk are unpacked into tiles of bf16 that stay in the first cache. The products of
// a step are summed in a tile register, from 0, 32 depths after the other. The sums are stored, and
// scaled while the next ones are computed. A step of 16 depths is a smaller tile.
//
// A product of tiles adds to each element the sum of two chains of fused multiplications and
// additions from 0: one over the even depths, one over the odd ones. One or two rows are multiplied
// by vectors in that order, which takes less time than unpacking into memory.
#pragma once

#include "codes_chunks.h"

namespace codes {

template <class X>
constexpr bool HAS_TILES = tiles::AVAILABLE<X>;

// Rows of a block of x.
template <class X>
constexpr int ROWS_AT_ONCE = HAS_TILES<X> ? 128 : MAX_ROWS;

#if defined(__AMX_BF16__)
constexpr int TILES_AT_ONCE = 4;  // of x, along the depth
constexpr int VECTOR_ROWS = 2;    // that are multiplied by vectors
constexpr long TILE_UNITS = 16;   // of a chunk
constexpr int TILE_SUMS = tiles::ROWS * PANEL;

// Steps of one length whose products are computed at once.
struct Batch {
  long tile, step;  // the first ones in the chunk
  int steps, each;  // tiles of a step
};

// The steps of a chunk as batches.
struct Batches {
  Batch list[TILE_UNITS];
  int count = 0;

  // units: of a tile.
  Batches(const Chunk& chunk, long units) {
    long tile = 0;
    for (long step = 0; step < chunk.steps; step++) {
      int each = (int)(chunk.lengths[step] / units);
      Batch* last = count ? list + count - 1 : nullptr;
      if (last && last->each == each && (last->steps + 1) * each <= TILES_AT_ONCE)
        last->steps++;
      else
        list[count++] = {tile, step, 1, each};
      tile += each;
    }
  }
};

// Load tiles of rows to registers 0 to 3, `width` bytes each.
INLINE void load_rows(const uint8_t* x, long stride, int count, long width) {
  _tile_loadd(0, x, stride);
  if (count > 1) _tile_loadd(1, x + width, stride);
  if (count > 2) _tile_loadd(2, x + 2 * width, stride);
  if (count > 3) _tile_loadd(3, x + 3 * width, stride);
}

// sums [steps][ROWS][PANEL] = the products of `count` tiles of rows with tiles of `bytes` of a panel,
// EACH of a step. `beside(i)` is called before tile i.
template <int EACH, class Beside>
INLINE void multiply_tiles(const uint8_t* weights, long bytes, int count, float* sums,
                           const Beside& beside) {
  // The numbers of registers have to be constants.
#define HP_MULTIPLY(ROWS, SUMS)                       \
  if (ROWS < count) {                                 \
    beside(ROWS);                                     \
    if constexpr (ROWS % EACH == 0) _tile_zero(SUMS); \
    _tile_loadd(4, weights + ROWS * bytes, 64);       \
    _tile_dpbf16ps(SUMS, ROWS, 4);                    \
  }
#define HP_STORE(STEP, SUMS) \
  if (STEP * EACH < count) _tile_stored(SUMS, sums + STEP * TILE_SUMS, 64);
  // A tile is stored as late as its register allows: its products take a while.
  if constexpr (EACH == 1) {
    HP_MULTIPLY(0, 5) HP_MULTIPLY(1, 6) HP_MULTIPLY(2, 7)
    HP_STORE(0, 5) HP_MULTIPLY(3, 5) HP_STORE(1, 6) HP_STORE(2, 7) HP_STORE(3, 5)
  } else if constexpr (EACH == 2) {
    HP_MULTIPLY(0, 5) HP_MULTIPLY(1, 5) HP_MULTIPLY(2, 6) HP_MULTIPLY(3, 6)
    HP_STORE(0, 5) HP_STORE(1, 6)
  } else {
    HP_MULTIPLY(0, 5) HP_MULTIPLY(1, 5) HP_MULTIPLY(2, 5) HP_MULTIPLY(3, 5)
    HP_STORE(0, 5)
  }
#undef HP_STORE
#undef HP_MULTIPLY
}

// Add the scaled sums of a batch to R rows of a panel of y [rows][P * PANEL]. row_sums: the sums of x
// over the steps, `row_stride` apart.
template <int R, int P>
INLINE void add_scaled(const float* sums, const Chunk& chunk, const Batch& batch, long panel,
                       const float* row_sums, long row_stride, float* y) {
  Floats totals[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) totals[r] = load(y + r * P * PANEL);
  const float* scales = chunk.scales + (batch.step * P + panel) * PANEL;
  const float* offsets = chunk.offsets + (batch.step * P + panel) * PANEL;
  for (int i = 0; i < batch.steps; i++, sums += TILE_SUMS) {
    __m512 scale = (__m512)load(scales + i * P * PANEL);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
      totals[r] = (Floats)_mm512_fmadd_ps(scale, (__m512)load(sums + r * PANEL), (__m512)totals[r]);
    if (!chunk.has_offsets) continue;
    __m512 offset = (__m512)load(offsets + i * P * PANEL);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      __m512 sum = _mm512_set1_ps(row_sums[r * row_stride + i]);
      totals[r] = (Floats)_mm512_fmadd_ps(offset, sum, (__m512)totals[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) store(y + r * P * PANEL, totals[r]);
}

// Results and operands below the normal numbers are 0, as they are in products of tiles.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  FlushDenormals(const FlushDenormals&) = delete;
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

// The registers: rows in 0 to 3, weights in 4, sums in 5 to 7.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (rows_ >= 0) _tile_release();
  }

  // width: bytes of a row of x in a tile.
  void use(int rows, int width) {
    if (rows == rows_ && width == width_) return;
    rows_ = rows;
    width_ = width;
    ::tiles::Layout layout;
    for (int i = 0; i < 8; i++)
      layout.set(i, i == 4 ? width / 4 : rows, i < 4 ? width : 64);
    layout.use();
  }

 private:
  int rows_ = -1, width_ = -1;
};

// Unpacks tiles of weights of a chunk, as pairs of bf16.
template <int BITS>
struct CodeUnpacker {
  Packed<BITS, true> source;  // from the chunk's first unit on
  long units;                 // of a tile
  uint8_t* to;
  long stride;  // from panel to panel

  __attribute__((always_inline)) void unpack(int panel, long tile) const {
    uint8_t* out = to + panel * stride + tile * units * PAIRS * PAIR_BYTES;
    Packed<BITS, true> of_panel = source;
    of_panel.at += panel * Packed<BITS, true>::BYTES;
    for (long i = 0; i < units; i++, out += PAIRS * PAIR_BYTES) {
      auto unit = of_panel.template unit<1>(tile * units + i);
#pragma GCC unroll 8
      for (int p = 0; p < PAIRS; p += 2) {
        Words first, second;
        if constexpr (BITS == 8) {
          read_pairs(unit.low[0] + 2 * p * PANEL, first, second);
        } else {
          first = source.pair(unit, 0, p);
          second = source.pair(unit, 0, p + 1);
        }
        memcpy(out + p * PAIR_BYTES, &first, sizeof first);
        memcpy(out + (p + 1) * PAIR_BYTES, &second, sizeof second);
      }
    }
  }
};

// Tiles of weights that are unpacked already.
struct AlreadyUnpacked {
  void unpack(int, long) const {}
};

// Add the products of `count` rows, at most 16, with the steps of a chunk to y [count][P * PANEL].
// The first rows unpack tiles of weights [P][weights_stride] while the tiles before are multiplied.
template <int P, class Unpacker>
__attribute__((noinline)) void multiply_rows(const uint8_t* weights, long weights_stride,
                                             const Chunk& chunk, const Batches& batches, int depth,
                                             const Rows<bf16>& rows, int count, float* y,
                                             const Unpacker unpacker) {
  alignas(64) float sums[2][TILES_AT_ONCE * TILE_SUMS];
  long bytes = depth * PANEL * 2, width = depth * 2;
  const uint8_t* x = (const uint8_t*)(rows.x + chunk.first_unit * UNIT);
  const float* row_sums = rows.sums + chunk.first_step;
  auto scale = [&](int job) {
    const Batch& batch = batches.list[job / P];
    int panel = job % P;
    const float *from = sums[job % 2], *of_rows = row_sums + batch.step;
    float* to = y + panel * PANEL;
    if (count == ::tiles::ROWS)
      return add_scaled<::tiles::ROWS, P>(from, chunk, batch, panel, of_rows, rows.sums_stride, to);
    for (int r = 0; r < count; r++)
      add_scaled<1, P>(from + r * PANEL, chunk, batch, panel, of_rows + r * rows.sums_stride, 0,
                       to + r * P * PANEL);
  };
  int jobs = batches.count * P;
  for (int i = 0; i < batches.list[0].steps * batches.list[0].each; i++) unpacker.unpack(0, i);
  for (int job = 0; job < jobs; job++) {
    const Batch& batch = batches.list[job / P];
    int panel = job % P, parts = batch.steps * batch.each;
    if (panel == 0) load_rows(x + batch.tile * width, rows.stride * 2, parts, width);
    const uint8_t* from = weights + panel * weights_stride + batch.tile * bytes;
    float* to = sums[job % 2];
    int later = 0, later_panel = 0;
    long later_tile = 0;
    if (job + 1 < jobs) {
      const Batch& next = batches.list[(job + 1) / P];
      later = next.steps * next.each, later_panel = (job + 1) % P, later_tile = next.tile;
    }
    auto beside = [&](int i) __attribute__((always_inline)) {
      if (i < later) unpacker.unpack(later_panel, later_tile + i);
    };
    asm volatile("" : : : "memory");  // GCC does not know what loads of tiles read
    switch (batch.each) {
      case 1: multiply_tiles<1>(from, bytes, parts, to, beside); break;
      case 2: multiply_tiles<2>(from, bytes, parts, to, beside); break;
      case 3: multiply_tiles<3>(from, bytes, parts, to, beside); break;
      default: multiply_tiles<4>(from, bytes, parts, to, beside);
    }
    for (int i = parts; i < later; i++) beside(i);
    if (job) scale(job - 1);
  }
  scale(jobs - 1);
}

// As `multiply_rows`, for few rows: by vectors, with sums in the order of a tile's. An element has two
// chains of products, of the even and of the odd depths, and their sum is added to the step's.
template <int R, int P, int UNITS, class Source>
__attribute__((noinline)) void multiply_few(const Source source, const Chunk& chunk,
                                            const Rows<bf16>& rows, float* y) {
  alignas(64) float x[R][TILE_UNITS * UNIT];
  for (int r = 0; r < R; r++)
    for (long k = 0; k < chunk.units * UNIT; k += LANES)
      store(x[r] + k, load(rows.x + r * rows.stride + chunk.first_unit * UNIT + k));
  long unit = 0;
  for (long step = 0; step < chunk.steps; step++) {
    Floats sums[R][P] = {};
    for (long end = unit + chunk.lengths[step]; unit < end; unit += UNITS) {
      __m512 even[R][P], odd[R][P];
#pragma GCC unroll 16
      for (int i = 0; i < R * P; i++) even[i / P][i % P] = odd[i / P][i % P] = _mm512_setzero_ps();
#pragma GCC unroll 2
      for (int part = 0; part < UNITS; part++) {
        auto codes = source.template unit<P>(unit + part);
#pragma GCC unroll 8
        for (int p = 0; p < PAIRS; p++) {
          long k = (unit + part) * UNIT + 2 * p;
#pragma GCC unroll 4
          for (int v = 0; v < P; v++) {
            Floats first, second;
            source.floats(codes, v, p, first, second);
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) {
              even[r][v] = _mm512_fmadd_ps(_mm512_set1_ps(x[r][k]), (__m512)first, even[r][v]);
              odd[r][v] = _mm512_fmadd_ps(_mm512_set1_ps(x[r][k + 1]), (__m512)second, odd[r][v]);
            }
          }
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < R * P; i++)
        sums[i / P][i % P] += (Floats)(even[i / P][i % P] + odd[i / P][i % P]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R * P; i++) {
      int r = i / P, v = i % P;
      long at = (step * P + v) * PANEL;
      __m512 total = (__m512)load(y + i * PANEL);
      total = _mm512_fmadd_ps((__m512)load(chunk.scales + at), (__m512)sums[r][v], total);
      if (chunk.has_offsets) {
        float sum = rows.sums[r * rows.sums_stride + chunk.first_step + step];
        total = _mm512_fmadd_ps((__m512)load(chunk.offsets + at), _mm512_set1_ps(sum), total);
      }
      store(y + i * PANEL, (Floats)total);
    }
  }
}

// Multiply `count` rows with P panels: y [count][P * PANEL].
template <int P>
void multiply_panels(const Panels& panels, const Rows<bf16>& rows, int count, float* y) {
  TileRegisters registers;
  FlushDenormals flush;
  constexpr long STRIDE = TILE_UNITS * PAIRS * PAIR_BYTES;
  alignas(64) uint8_t weights[P * STRIDE];
  const Segment& segment = panels.segment;
  long padded = panels.matrix.padded();
  int depth = segment.group == UNIT ? UNIT : ::tiles::DEPTH;
  Reader scales(panels, segment.scales), offsets(panels, segment.offsets);
  Chunk chunk;
  chunk.has_offsets = segment.offsets.storage != NONE;
  std::fill(y, y + count * P * PANEL, 0.0f);
  while (read_next<P>(segment, padded, scales, offsets, chunk, TILE_UNITS)) {
    Batches batches(chunk, depth / UNIT);
    auto multiply = [&](int row, auto unpacker) {
      int part = std::min(count - row, ::tiles::ROWS);
      registers.use(part, 2 * depth);
      multiply_rows<P>(weights, STRIDE, chunk, batches, depth, rows.from(row), part,
                       y + row * P * PANEL, unpacker);
    };
    with_packed(panels, chunk.first_unit, [&](auto packed) {
      constexpr int BITS = decltype(packed)::BYTES / 64;
      if (count <= VECTOR_ROWS) {
        auto run = [&](auto source) {
          using Source = decltype(source);
          auto few = multiply_few<1, P, 2, Source>;
          if (depth == UNIT) few = multiply_few<1, P, 1, Source>;
          if (count == 2) few = multiply_few<2, P, 2, Source>;
          if (count == 2 && depth == UNIT) few = multiply_few<2, P, 1, Source>;
          few(source, chunk, rows, y);
        };
        if constexpr (BITS == 6) {
          float first = to_float(segment.values[0]);
          if (segment.is_affine && first == std::nearbyint(first))
            return run(Packed<BITS, false>{packed.at, packed.stride, packed.values});
        }
        return run(packed);
      }
      multiply(0, CodeUnpacker<BITS>{packed, depth / UNIT, weights, STRIDE});
    });
    for (int row = ::tiles::ROWS; row < count; row += ::tiles::ROWS)
      multiply(row, AlreadyUnpacked{});
  }
}
#endif

}  // namespace codes
