// Products of integers with low-bit codes by tiles (Intel AMX), for many rows: the same sums of whole
// numbers as those of vectors (`codes_integers.h`), which are scaled in the same order.
//
// Words are multiplied as their two bytes: rows of x have the lower ones, then the upper ones.
#pragma once

#include "codes_integers.h"
#include "codes_tiles.h"

namespace codes {
namespace integers {

#if defined(__AMX_INT8__)
constexpr bool HAS_INTEGER_TILES = true;
constexpr int LEAST_TILE_ROWS = 5;  // fewer are multiplied by vectors
#else
constexpr bool HAS_INTEGER_TILES = false;
constexpr int LEAST_TILE_ROWS = INT32_MAX;
#endif

#if defined(__AMX_INT8__)
constexpr long UNPACKED_UNITS = 32;             // of a chunk
constexpr long QUAD_BYTES = 4 * PANEL;
constexpr long TILE_BYTES = QUADS * QUAD_BYTES;  // of a block of a panel

// Where the bytes of 4 depths and 16 columns go to lie in quads.
struct alignas(64) QuadOrder {
  uint8_t order[64]{};

  constexpr QuadOrder() {
    for (int i = 0; i < 64; i++) order[i] = (uint8_t)(i % 4 * PANEL + i / 4);
  }
};
constexpr QuadOrder QUAD_ORDER;

// Unpack a block of codes of a panel to bytes in quads.
template <int BITS>
INLINE void unpack_quads(const uint8_t* block, uint8_t* to) {
#pragma GCC unroll 8
  for (int q = 0; q < QUADS; q++) {
    if constexpr (BITS == 8) {
      __m512i quads = _mm512_loadu_si512(block + q * QUAD_BYTES);
      quads = _mm512_permutexvar_epi8(_mm512_load_si512(QUAD_ORDER.order), quads);
      _mm512_storeu_si512(to + q * QUAD_BYTES, quads);
    } else {
      for (int half = 0; half < 2; half++) {
        Bytes quads = read_quad<BITS>(block, half, q);
        memcpy(to + q * QUAD_BYTES + half * sizeof quads, &quads, sizeof quads);
      }
    }
  }
}

// Steps of a chunk, by tile.
struct TileSteps {
  uint8_t of[UNPACKED_UNITS];
  int tiles = 0;

  TileSteps(const Chunk& chunk, int units) {
    for (long step = 0; step < chunk.steps; step++)
      for (int i = 0; i < chunk.lengths[step] / units; i++) of[tiles++] = (uint8_t)step;
  }
};

// What tiles of a chunk are multiplied with: `count` rows, at most 16.
struct TileRows {
  const int8_t* x;
  const float *scales, *sums;
  int count;
};

// sums [tiles][WORDS ? 2 : 1][ROWS][PANEL] = the products of up to 4 tiles of rows with `count` tiles
// of a panel, `bytes` each. Of words, those of lower bytes come first.
template <int BITS, bool WORDS>
INLINE void multiply_bytes(const uint8_t* weights, long bytes, int count, int32_t* sums) {
  // The numbers of registers have to be constants.
#define HP_LOAD(TILE) \
  if (TILE < count) _tile_loadd(4, weights + TILE * bytes, 64);
#define HP_MULTIPLY(PRODUCT, TILE, ROWS, SUMS) \
  if (TILE < count) {                          \
    _tile_zero(SUMS);                          \
    PRODUCT(SUMS, ROWS, 4);                    \
  }
#define HP_STORE(TILE, PLACE, SUMS) \
  if (TILE < count) _tile_stored(SUMS, sums + PLACE * TILE_SUMS, 64);
#define HP_WORDS(LOWER, UPPER)                                       \
  HP_LOAD(0) HP_MULTIPLY(LOWER, 0, 0, 5) HP_MULTIPLY(UPPER, 0, 1, 6) \
  HP_LOAD(1) HP_MULTIPLY(LOWER, 1, 2, 7) HP_STORE(0, 0, 5)           \
  HP_MULTIPLY(UPPER, 1, 3, 5) HP_STORE(0, 1, 6) HP_STORE(1, 2, 7) HP_STORE(1, 3, 5)
  if constexpr (!WORDS) {
    HP_LOAD(0) HP_MULTIPLY(_tile_dpbsud, 0, 0, 5) HP_LOAD(1) HP_MULTIPLY(_tile_dpbsud, 1, 1, 6)
    HP_LOAD(2) HP_MULTIPLY(_tile_dpbsud, 2, 2, 7) HP_STORE(0, 0, 5)
    HP_LOAD(3) HP_MULTIPLY(_tile_dpbsud, 3, 3, 5) HP_STORE(1, 1, 6) HP_STORE(2, 2, 7)
    HP_STORE(3, 3, 5)
  } else if constexpr (BITS == 8) {
    HP_WORDS(_tile_dpbusd, _tile_dpbssd)
  } else {
    HP_WORDS(_tile_dpbuud, _tile_dpbsud)
  }
#undef HP_LOAD
#undef HP_MULTIPLY
#undef HP_STORE
#undef HP_WORDS
}

// Add R scaled rows of sums of `count` tiles, from tile `tile` of a chunk on, to y.
template <int BITS, bool WORDS, bool HALVES, int R, int P>
INLINE void add_scaled(const int32_t* sums, const Chunk& chunk, const TileSteps& steps, int tile,
                       int count, int panel, const TileRows& rows, int row, float* y) {
  __m512 totals[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) totals[r] = (__m512)load(y + r * P * PANEL);
  for (int i = tile; i < tile + count; i++, sums += (WORDS ? 2 : 1) * TILE_SUMS) {
    long at = (steps.of[i] * P + panel) * PANEL, block = HALVES ? i / 2 : i;
    __m512 scale = (__m512)load(chunk.scales + at);
    const float* row_scales = rows.scales + block * rows.count + row;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      __m512i sum = _mm512_load_si512(sums + r * PANEL);
      if (WORDS) {
        __m512i upper = _mm512_load_si512(sums + TILE_SUMS + r * PANEL);
        sum = _mm512_add_epi32(sum, _mm512_slli_epi32(upper, 8));
      }
      if (BITS == 8) sum = _mm512_slli_epi32(sum, 8);  // UPPER times the sums
      __m512 factor = scale * _mm512_set1_ps(row_scales[r]);
      totals[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), factor, totals[r]);
    }
    if (!chunk.has_offsets) continue;
    __m512 offset = (__m512)load(chunk.offsets + at);
    const float* row_sums = rows.sums + block * 2 * rows.count + row;
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      float sum = HALVES ? row_sums[i % 2 * rows.count + r] : row_sums[r] + row_sums[rows.count + r];
      totals[r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sum), totals[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) store(y + r * P * PANEL, (Floats)totals[r]);
}

// Add the products of at most 16 rows with the tiles of a chunk to y [rows][P * PANEL].
template <int BITS, bool WORDS, bool HALVES, int P>
__attribute__((noinline)) void multiply_rows(const uint8_t* weights, long weights_stride,
                                             const Chunk& chunk, const TileSteps& steps,
                                             const TileRows& rows, float* y) {
  constexpr int PLANES = WORDS ? 2 : 1, AT_ONCE = TILES_AT_ONCE / PLANES;
  constexpr long BYTES = TILE_BYTES / (HALVES ? 2 : 1), ROW = BLOCK * PLANES;
  alignas(64) int32_t sums[2][TILES_AT_ONCE * TILE_SUMS];
  auto at = [&](int tile, int plane) {
    long block = HALVES ? tile / 2 : tile, half = HALVES ? tile % 2 * UNIT : 0;
    return rows.x + block * rows.count * ROW + plane * BLOCK + half;
  };
  auto count_of = [&](int tile) { return std::min(AT_ONCE, steps.tiles - tile); };
  auto scale = [&](int job) {
    int tile = job / P * AT_ONCE, panel = job % P, count = count_of(tile);
    const int32_t* from = sums[job % 2];
    float* to = y + panel * PANEL;
    if (rows.count == ::tiles::ROWS)
      return add_scaled<BITS, WORDS, HALVES, ::tiles::ROWS, P>(from, chunk, steps, tile, count,
                                                               panel, rows, 0, to);
    for (int r = 0; r < rows.count; r++)
      add_scaled<BITS, WORDS, HALVES, 1, P>(from + r * PANEL, chunk, steps, tile, count, panel,
                                            rows, r, to + r * P * PANEL);
  };
  int jobs = (steps.tiles + AT_ONCE - 1) / AT_ONCE * P;
  asm volatile("" : : : "memory");  // GCC does not know what loads of tiles read
  for (int job = 0; job < jobs; job++) {
    int tile = job / P * AT_ONCE, panel = job % P, count = count_of(tile);
    if (panel == 0) {
      int last = steps.tiles - 1;
      auto part = [&](int i) { return at(std::min(tile + i / PLANES, last), i % PLANES); };
      _tile_loadd(0, part(0), ROW);
      _tile_loadd(1, part(1), ROW);
      _tile_loadd(2, part(2), ROW);
      _tile_loadd(3, part(3), ROW);
    }
    multiply_bytes<BITS, WORDS>(weights + panel * weights_stride + tile * BYTES, BYTES, count,
                                sums[job % 2]);
    if (job) scale(job - 1);
  }
  scale(jobs - 1);
}

// As `tiles`, by tiles. `at`: the codes of the chunk's first block; stride: from block to block.
template <int BITS, bool WORDS, bool HALVES, int P>
void multiply_by_tiles(const uint8_t* at, long stride, const Chunk& chunk, Rows rows, int count,
                       TileRegisters& registers, float* y) {
  constexpr long STRIDE = UNPACKED_UNITS / 2 * TILE_BYTES;
  alignas(64) uint8_t weights[P * STRIDE];
  for (long block = 0; block < chunk.units / 2; block++)
    for (int panel = 0; panel < P; panel++) {
      const uint8_t* from = at + block * stride + panel * BITS * 64;
#pragma GCC unroll 8
      for (int i = 0; i < BITS; i++) __builtin_prefetch(from + AHEAD + i * 64, 0, 2);
      unpack_quads<BITS>(from, weights + panel * STRIDE + block * TILE_BYTES);
    }
  TileSteps steps(chunk, HALVES ? 1 : 2);
  long first = chunk.first_unit * UNIT / BLOCK;
  for (int row = 0; row < count; row += ::tiles::ROWS) {
    int part = std::min(count - row, ::tiles::ROWS);
    registers.use(part, HALVES ? UNIT : BLOCK);
    Rows from = rows.from(row, WORDS);
    TileRows of{from.x + first * part * x_bytes(WORDS), from.scales + first * part,
                from.sums + first * part * 2, part};
    multiply_rows<BITS, WORDS, HALVES, P>(weights, STRIDE, chunk, steps, of, y + row * P * PANEL);
  }
}
#endif

}  // namespace integers
}  // namespace codes
