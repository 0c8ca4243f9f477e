// Keys and values in codes of 8 bits, with a scale for each token and head; toolkit/kv_codes.py is
// the same in torch.
//
// A group of 16 tokens of a head is codes, then the 16 scales of its tokens. Codes are in the order
// of panels of float32: keys [head size][16 tokens], values [16 elements of the head][16 tokens][16].
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "gemm.h"

namespace kv_codes {

struct Int8 {
  static constexpr float LIMIT = 127.0f;
  uint8_t bits;
};
struct Float8 {  // e4m3fn, without numbers below 2^-6
  static constexpr float LIMIT = 448.0f;
  uint8_t bits;
};

constexpr size_t SCALES = PANEL * sizeof(float);  // bytes of the scales of a group

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int8_t SignedBytes __attribute__((vector_size(LANES)));

// GCC converts between bytes and words element by element.
INLINE Ints load_signed(const void* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  SignedBytes codes;
  memcpy(&codes, from, sizeof codes);
  return __builtin_convertvector(codes, Ints);
#endif
}
INLINE void store_bytes(void* to, Words words) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)words));
#else
  Bytes bytes = __builtin_convertvector(words, Bytes);
  memcpy(to, &bytes, sizeof bytes);
#endif
}
INLINE Floats decode(const Int8* from) { return __builtin_convertvector(load_signed(from), Floats); }
INLINE Floats decode(const Float8* from) {
  // The bits are those of a float32 whose exponent is too low by 120.
  return (Floats)(((Words)load_signed(from) << 20) & 0x87f00000u) * 0x1p120f;
}

// Codes of quotients, in the lowest byte.
INLINE Words encode(Floats x, Int8) { return bits_of(x + 12582912.0f); }  // 1.5 * 2^23
INLINE Words encode(Floats x, Float8) {
  Words size = bits_of(x) & 0x7fffffff;
  Words rounded = (size + 0x7ffff + ((size >> 20) & 1)) >> 20;
  Words code = (rounded - (120 << 3)) | ((bits_of(x) >> 24) & 0x80);
  return size < 0x3c800000u ? Words{} : code;
}

// Rotate a head: each run of n elements, the largest power of 2 that divides its size, is multiplied
// by the symmetric orthogonal matrix of Hadamard. Additions are in the order of toolkit/kv_codes.py.
inline void rotate_head(float* x, long size) {
  long n = size & -size;
  for (long half = 1; half < n; half *= 2)
    for (long from = 0; from < size; from += 2 * half)
      for (long i = from; i < from + half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
  float factor = (float)(1.0 / std::sqrt((double)n));
  for (long i = 0; i < size; i++) x[i] *= factor;
}

template <class T>
INLINE Floats load_up_to(const T* from, long count) {
  return count >= LANES ? load(from) : load_part(from, (int)count);
}

// The scale of a head.
template <class S, class T>
float find_scale(const T* x, long size) {
  Words largest = {};
  for (long i = 0; i < size; i += LANES) {
    Words bits = bits_of(load_up_to(x + i, size - i)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  uint32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits = std::max<uint32_t>(bits, largest[i]);
  if (bits >= 0x7f800000u) return std::numeric_limits<float>::quiet_NaN();
  float value;
  memcpy(&value, &bits, sizeof value);
  return value < 0x1p-100f ? 0.0f : value / S::LIMIT;
}

// Write the codes of elements; `to` has room for whole vectors.
template <class S, class T>
void encode(const T* x, long size, float scale, S* to) {
  for (long i = 0; i < size; i += LANES) {
    Words codes = {};
    if (scale > 0) codes = encode(load_up_to(x + i, size - i) / scale, S{});
    store_bytes(to + i, codes);
  }
}

template <class S>
INLINE const float* scales(const S* group, size_t codes) {
  return (const float*)(group + codes);
}

// Ask memory for what will be multiplied soon: at depth k of the groups `ahead`.
template <int V, class S>
INLINE void prefetch(const S* const* ahead, int k) {
#pragma GCC unroll 16
  for (int v = 0; v < V; v += PANEL_VECTORS)
    __builtin_prefetch(ahead[v / PANEL_VECTORS] + (size_t)k * PANEL, 0, 2);
}

// As those of gemm.h, for codes. What follows the codes of an odd depth is multiplied with 0: any
// byte is a number.
#if defined(__AVX512BF16__)
INLINE Pairs load_pairs(const Int8* from) {
  return (Pairs)(bits_of(decode(from)) >> 16 | bits_of(decode(from + PANEL)));
}
INLINE Pairs load_pairs(const Float8* from) {
  __m512i even = _mm512_slli_epi32((__m512i)load_signed(from), 4);
  __m512i odd = _mm512_slli_epi32((__m512i)load_signed(from + PANEL), 20);
  __m512i bits = _mm512_mask_blend_epi16(0xaaaaaaaa, even, odd) & (__m512i)splat(0x87f087f0u);
  // A number but 0 is one of bfloat16 whose exponent is too low by 120.
  __mmask32 numbers = _mm512_test_epi16_mask(bits, _mm512_set1_epi16(0x7f0));
  return (Pairs)_mm512_mask_add_epi16(bits, numbers, bits, _mm512_set1_epi16(120 << 7));
}
template <int R, int V, class S>
INLINE void multiply(const bf16* x, long stride, const S* const (&weights)[V], int depth,
                     Floats (&sums)[R][V], const S* const* ahead) {
  for (int k = 0; k < depth; k += 2) {
    if (k % 4 == 0) prefetch<V>(ahead, k);
    gemm::multiply_pair<R, V>(x, stride, weights, k, sums);
  }
}
#endif

template <int R, int V, class S>
INLINE void multiply(const float* x, long stride, const S* const (&weights)[V], int depth,
                     Floats (&sums)[R][V], const S* const* ahead) {
  for (int k = 0; k < depth; k++) {
    if (k % 4 == 0) prefetch<V>(ahead, k);
    Floats values[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) values[v] = decode(weights[v] + (size_t)k * PANEL);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
      for (int v = 0; v < V; v++) sums[r][v] += x[r * stride + k] * values[v];
  }
}

}  // namespace kv_codes
