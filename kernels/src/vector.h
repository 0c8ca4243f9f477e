// Vectors of the instruction set that the file is compiled for, by GCC's and Clang's vector
// extensions: the same source serves AVX-512, AVX2 and any other processor.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// Weights and keys are packed in panels of 16 columns on every processor.
constexpr int PANEL = 16;
constexpr int PANEL_VECTORS = PANEL / LANES;

typedef uint16_t bf16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

INLINE Floats splat(float value) { return value - Floats{}; }
INLINE Words splat(uint32_t value) { return value + Words{}; }

INLINE Floats load(const float* from) {
  Floats value;
  memcpy(&value, from, sizeof value);
  return value;
}
INLINE void store(float* to, Floats value) { memcpy(to, &value, sizeof value); }

INLINE Words load_words(const void* from) {
  Words value;
  memcpy(&value, from, sizeof value);
  return value;
}

INLINE Floats load(const bf16* from) {
  Halves value;
  memcpy(&value, from, sizeof value);
  return (Floats)(__builtin_convertvector(value, Words) << 16);
}

INLINE float to_float(bf16 value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}
INLINE float to_float(float value) { return value; }

INLINE Words bits_of(Floats value) { return (Words)value; }

// Choose by a comparison's result.
INLINE Floats choose(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }

// Round to the nearest bf16, ties to even; NaN stays NaN.
INLINE Halves to_bf16(Floats value) {
#if defined(__AVX512BF16__)
  __m256bh narrow = _mm512_cvtneps_pbh((__m512)value);
  Halves result;
  memcpy(&result, &narrow, sizeof result);
  return result;
#else
  Words bits = bits_of(value);
  Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
  Ints nan = value != value;
  rounded = ((Words)nan & 0x7fc00000u) | (~(Words)nan & rounded);
  return __builtin_convertvector(rounded >> 16, Halves);
#endif
}
INLINE void store(bf16* to, Floats value) {
  Halves narrow = to_bf16(value);
  memcpy(to, &narrow, sizeof narrow);
}

INLINE bf16 to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7fc0;
  return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE void store_one(bf16* to, float value) { *to = to_bf16(value); }
INLINE void store_one(float* to, float value) { *to = value; }

// The first `count` elements, 0 in the other lanes.
template <class T>
INLINE Floats load_part(const T* from, int count) {
  T part[LANES] = {};
  memcpy(part, from, count * sizeof(T));
  return load(part);
}
template <class T>
INLINE void store_part(T* to, Floats value, int count) {
  T part[LANES];
  store(part, value);
  memcpy(to, part, count * sizeof(T));
}

// Sums and maxima over the lanes, in a fixed order.
INLINE Floats maximum(Floats a, Floats b) { return choose(a > b, a, b); }
#if defined(__AVX512F__)
INLINE float sum_lanes(Floats value) { return _mm512_reduce_add_ps((__m512)value); }
INLINE float max_lanes(Floats value) { return _mm512_reduce_max_ps((__m512)value); }
#else
INLINE float sum_lanes(Floats value) {
  float lanes[LANES];
  store(lanes, value);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}
INLINE float max_lanes(Floats value) {
  float lanes[LANES];
  store(lanes, value);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}
#endif

// e^x for x <= 0, to about 2 units in the last place; exp_negative(0) is exactly 1, and what is
// below -87 is as -87 (1.6e-38); NaN stays NaN.
INLINE Floats exp_negative(Floats x) {
  x = choose(x < -87.0f, splat(-87.0f), x);
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  Floats whole = (x * 1.44269504f + magic) - magic;
  // x - whole * ln 2, in two parts.
  Floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats power = splat(1.9875691500e-4f);
  power = power * rest + 1.3981999507e-3f;
  power = power * rest + 8.3334519073e-3f;
  power = power * rest + 4.1665795894e-2f;
  power = power * rest + 1.6666665459e-1f;
  power = power * rest + 5.0000001201e-1f;
  power = (power * rest) * rest + rest + 1.0f;
  Ints exponent = __builtin_convertvector(whole, Ints) + 127;
  return power * (Floats)(exponent << 23);
}
INLINE float exp_negative(float x) {
  float lanes[LANES];
  store(lanes, exp_negative(splat(x)));
  return lanes[0];
}

// e^x for x <= 0, to 3e-6: for what is rounded to bf16. NaN stays NaN.
INLINE Floats exp_short(Floats x) {
#if defined(__AVX512F__)
  __m512 power_of_2 = (__m512)(x * 1.44269504f);
  __m512 whole = _mm512_roundscale_ps(power_of_2, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Floats rest = (Floats)power_of_2 - (Floats)whole;
  Floats power = rest * 9.58285531e-3f + 5.59064304e-2f;
  power = power * rest + 2.40240986e-1f;
  power = power * rest + 6.93124193e-1f;
  return (Floats)_mm512_scalef_ps((__m512)(power * rest + 1.0f), whole);
#else
  return exp_negative(x);
#endif
}

// tanh x, to about 2 units in the last place; NaN stays NaN.
INLINE Floats tanh(Floats x) {
  Ints negative = x < 0.0f;
  Floats size = choose(negative, -x, x);
  Floats power = exp_negative(-2.0f * size);
  Floats large = (1.0f - power) / (1.0f + power);
  // Where that would lose digits: an odd polynomial (Cephes).
  Floats square = size * size;
  Floats small = splat(-5.70498872745e-3f);
  small = small * square + 2.06390887954e-2f;
  small = small * square - 5.37397155531e-2f;
  small = small * square + 1.33314422036e-1f;
  small = small * square - 3.33332819422e-1f;
  small = small * square * size + size;
  Floats result = choose(size < 0.625f, small, large);
  return choose(negative, -result, result);
}

#if defined(__AVX512BF16__)
typedef __m512bh Pairs;
INLINE Pairs load_pairs(const bf16* from) {
  Pairs value;
  memcpy(&value, from, sizeof value);
  return value;
}
INLINE Pairs splat_pair(const bf16* from) {
  int32_t pair;
  memcpy(&pair, from, sizeof pair);
  return (Pairs)_mm512_set1_epi32(pair);
}
INLINE Floats add_products(Floats sum, Pairs a, Pairs b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, a, b);
}
#endif
