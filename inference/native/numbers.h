// Portable vectors of floats; bfloat16; e^x.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

using Vector = float __attribute__((vector_size(64)));
using IntVector = int32_t __attribute__((vector_size(64)));
using ShortVector = uint16_t __attribute__((vector_size(32)));
using ByteVector = int8_t __attribute__((vector_size(16)));

constexpr int LANES = 16;        // floats in a vector: one AVX-512 register, or as many smaller ones as it takes

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

struct Bfloat16 {
    uint16_t bits;
};

template <class T> constexpr int UNIT = 1;
template <> constexpr int UNIT<Bfloat16> = 2;

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

INLINE Vector load(const float *from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

INLINE Vector load(const Bfloat16 *from) {
    ShortVector bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Vector)(__builtin_convertvector(bits, IntVector) << 16);
}

INLINE void store(float *to, Vector value) { std::memcpy(to, &value, sizeof value); }

INLINE void store(Bfloat16 *to, Vector value) {
#if defined(__AVX512BF16__)
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(to, &rounded, sizeof rounded);
#else
    IntVector bits = (IntVector)value;
    // to nearest, ties to even; callers check for values that are not finite
    bits += 0x7fff + ((bits >> 16) & 1);
    ShortVector high = __builtin_convertvector((bits >> 16) & 0xffff, ShortVector);
    std::memcpy(to, &high, sizeof high);
#endif
}

// 16 bytes as floats.
INLINE Vector load(const int8_t *from) {
#if defined(__AVX512F__) // the compiler's own conversion is scalar
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))));
#else
    ByteVector bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Vector);
#endif
}

INLINE float to_float(float value) { return value; }

INLINE float to_float(Bfloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE Vector splat(float value) { return value - Vector{}; }

INLINE Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// Lane i of the result is lane i + shift of the value: a step of folding a vector in halves.
template <int SHIFT> INLINE Vector lanes_from(Vector value) {
    constexpr int S = SHIFT;
    const IntVector from = {S, S + 1, S + 2, S + 3, S + 4, S + 5, S + 6, S + 7,
                            S, S + 1, S + 2, S + 3, S + 4, S + 5, S + 6, S + 7};
    return __builtin_shuffle(value, from & 15);
}

INLINE float sum_of(Vector value) {
    value += lanes_from<8>(value);
    value += lanes_from<4>(value);
    value += lanes_from<2>(value);
    return value[0] + value[1];
}

INLINE float largest_of(Vector value) {
    value = larger(value, lanes_from<8>(value));
    value = larger(value, lanes_from<4>(value));
    value = larger(value, lanes_from<2>(value));
    return std::max(value[0], value[1]);
}

// Index of the first largest of `count` values; -1 if a value is not finite.
inline int32_t best_of(const float *values, int64_t count) {
    constexpr int32_t EXPONENT = 0x7f800000; // all of it set: infinite, or not a number
    const IntVector lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Vector largest = splat(-std::numeric_limits<float>::infinity());
    IntVector where = {}, broken = {};
    int64_t index = 0;
    for (; index + LANES <= count; index += LANES) {
        const Vector value = load(values + index);
        const IntVector is_larger = value > largest;
        broken |= ((IntVector)value & EXPONENT) == EXPONENT;
        largest = is_larger ? value : largest;
        where = is_larger ? lanes + int32_t(index) : where;
    }
    bool finite = true;
    int32_t best = 0;
    float best_value = -std::numeric_limits<float>::infinity();
    for (int lane = 0; lane < LANES && index > 0; ++lane) {
        finite &= broken[lane] == 0;
        if (largest[lane] > best_value || (largest[lane] == best_value && where[lane] < best)) {
            best = where[lane];
            best_value = largest[lane];
        }
    }
    for (; index < count; ++index) {
        finite &= std::isfinite(values[index]);
        if (values[index] > best_value) best = int32_t(index), best_value = values[index];
    }
    return finite ? best : -1;
}

// e^x for x <= 88: 2^n times a polynomial of degree 6 on half an octave to each side; relative error below 2e-7.
INLINE Vector exponential(Vector x) {
    x = larger(x, splat(-87.0f));
    Vector scaled = x * 1.44269504f;
    IntVector n = __builtin_convertvector(scaled + (scaled > splat(0) ? splat(0.5f) : splat(-0.5f)), IntVector);
    Vector whole = __builtin_convertvector(n, Vector);
    Vector rest = x - whole * 0.693359375f + whole * 2.12194440e-4f; // ln 2 in two parts keeps the low bits
    Vector series = splat(1.0f / 720);
    series = series * rest + 1.0f / 120;
    series = series * rest + 1.0f / 24;
    series = series * rest + 1.0f / 6;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    return series * (Vector)((n + 127) << 23);
}

} // namespace
