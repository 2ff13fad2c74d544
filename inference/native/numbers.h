// Vectors of 16 floats in the processor's registers; bfloat16; e^x.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

constexpr int LANES = 16; // numbers in a vector, whatever the size of a register

#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX2__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif
constexpr int PARTS = LANES / REGISTER_LANES; // registers of a vector

// The compiler keeps a vector type that is wider than a register in memory, even between two
// operations. Vectors are therefore structures of registers.
template <class Number> struct Wide {
    using Part __attribute__((vector_size(REGISTER_LANES * sizeof(Number)))) = Number;
    Part parts[PARTS];
    Number operator[](int lane) const { return parts[lane / REGISTER_LANES][lane % REGISTER_LANES]; }
};
using Vector = Wide<float>;
using IntVector = Wide<int32_t>;

// A vector of part(0), part(1) ...
template <class Number, class F> INLINE Wide<Number> by_parts(const F &part) {
    return [&]<int... I>(std::integer_sequence<int, I...>) INLINE_LAMBDA {
        return Wide<Number>{{part(I)...}};
    }(std::make_integer_sequence<int, PARTS>());
}

#define VECTOR_OPERATOR(SIGN)                                                                                  \
    template <class Number> INLINE Wide<Number> operator SIGN(const Wide<Number> &a, const Wide<Number> &b) {  \
        return by_parts<Number>([&](int i) INLINE_LAMBDA { return a.parts[i] SIGN b.parts[i]; });              \
    }                                                                                                          \
    template <class Number>                                                                                    \
    INLINE Wide<Number> operator SIGN(const Wide<Number> &a, const std::type_identity_t<Number> &b) {          \
        return by_parts<Number>([&](int i) INLINE_LAMBDA { return a.parts[i] SIGN b; });                       \
    }                                                                                                          \
    template <class Number>                                                                                    \
    INLINE Wide<Number> operator SIGN(const std::type_identity_t<Number> &a, const Wide<Number> &b) {          \
        return by_parts<Number>([&](int i) INLINE_LAMBDA { return a SIGN b.parts[i]; });                       \
    }
VECTOR_OPERATOR(+)
VECTOR_OPERATOR(-)
VECTOR_OPERATOR(*)
VECTOR_OPERATOR(/)
VECTOR_OPERATOR(&)
VECTOR_OPERATOR(|)
VECTOR_OPERATOR(<<)
VECTOR_OPERATOR(>>)
#undef VECTOR_OPERATOR

// Comparisons set all bits of a lane, or none.
#define VECTOR_COMPARISON(SIGN)                                                                            \
    template <class Number> INLINE IntVector operator SIGN(const Wide<Number> &a, const Wide<Number> &b) { \
        return by_parts<int32_t>([&](int i) INLINE_LAMBDA { return a.parts[i] SIGN b.parts[i]; });         \
    }
VECTOR_COMPARISON(>)
VECTOR_COMPARISON(<)
VECTOR_COMPARISON(>=)
VECTOR_COMPARISON(==)
#undef VECTOR_COMPARISON

template <class Number> INLINE Wide<Number> &operator+=(Wide<Number> &a, const Wide<Number> &b) { return a = a + b; }
template <class Number> INLINE Wide<Number> &operator*=(Wide<Number> &a, const Wide<Number> &b) { return a = a * b; }

template <class Number> INLINE Wide<Number> choose(const IntVector &mask, const Wide<Number> &a, const Wide<Number> &b) {
    return by_parts<Number>([&](int i) INLINE_LAMBDA { return mask.parts[i] ? a.parts[i] : b.parts[i]; });
}

INLINE Vector splat(float value) {
    return by_parts<float>([&](int) INLINE_LAMBDA { return value - Vector::Part{}; });
}

INLINE IntVector lane_numbers() {
    IntVector numbers;
    for (int lane = 0; lane < LANES; ++lane) numbers.parts[lane / REGISTER_LANES][lane % REGISTER_LANES] = lane;
    return numbers;
}

INLINE IntVector bits_of(const Vector &value) {
    return by_parts<int32_t>([&](int i) INLINE_LAMBDA { return (IntVector::Part)value.parts[i]; });
}
INLINE Vector from_bits(const IntVector &bits) {
    return by_parts<float>([&](int i) INLINE_LAMBDA { return (Vector::Part)bits.parts[i]; });
}
INLINE IntVector truncated(const Vector &value) {
    return by_parts<int32_t>([&](int i) INLINE_LAMBDA { return __builtin_convertvector(value.parts[i], IntVector::Part); });
}
INLINE Vector to_floats(const IntVector &value) {
    return by_parts<float>([&](int i) INLINE_LAMBDA { return __builtin_convertvector(value.parts[i], Vector::Part); });
}

struct Bfloat16 {
    uint16_t bits;
};

// A bfloat16 value, stored as the float that it stands for.
struct Rounded {
    float value;
};

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIR_PRODUCTS = true; // instructions that multiply pairs of bfloat16
#else
constexpr bool HAS_PAIR_PRODUCTS = false;
#endif

template <class T> constexpr int UNIT = 1;
template <> constexpr int UNIT<Bfloat16> = 2;

// Stored type of activations, queries and probabilities: the left rows of products with weights,
// keys or values of type T.
template <class T> using Left = std::conditional_t<UNIT<T> == 2 && !HAS_PAIR_PRODUCTS, Rounded, T>;

constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

template <class Part> INLINE Part load_part(const void *from) {
    Part part;
    std::memcpy(&part, from, sizeof part);
    return part;
}

// Part by part: the compiler keeps a structure that is copied as a whole in memory.
template <class Number> INLINE Wide<Number> load_bits(const void *from) {
    return by_parts<Number>([&](int i) INLINE_LAMBDA {
        return load_part<typename Wide<Number>::Part>(static_cast<const Number *>(from) + i * REGISTER_LANES);
    });
}

INLINE Vector load(const float *from) { return load_bits<float>(from); }

// 16 numbers of 16 bits. Number: uint16_t or int16_t.
template <class Number> INLINE IntVector load_halves(const void *from) {
    using Halves __attribute__((vector_size(REGISTER_LANES * sizeof(Number)))) = Number;
    return by_parts<int32_t>([&](int i) INLINE_LAMBDA {
        const auto halves = load_part<Halves>(static_cast<const Number *>(from) + i * REGISTER_LANES);
        return __builtin_convertvector(halves, IntVector::Part);
    });
}

INLINE Vector load(const Bfloat16 *from) { return from_bits(load_halves<uint16_t>(from) << 16); }

// 16 bytes as floats.
INLINE Vector load(const int8_t *from) {
    return by_parts<float>([&](int i) INLINE_LAMBDA {
#if defined(__AVX512F__) // the compiler's own conversions are scalar
        return (Vector::Part)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))));
#elif defined(__AVX2__)
        return (Vector::Part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(from + i * REGISTER_LANES)));
#else
        Vector::Part floats;
        for (int lane = 0; lane < REGISTER_LANES; ++lane) floats[lane] = from[i * REGISTER_LANES + lane];
        return floats;
#endif
    });
}

template <class Number> INLINE void store_bits(void *to, const Wide<Number> &value) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; ++i)
        std::memcpy(static_cast<Number *>(to) + i * REGISTER_LANES, &value.parts[i], sizeof value.parts[i]);
}

INLINE void store(float *to, const Vector &value) { store_bits(to, value); }

// Bits of the nearest bfloat16 values, as floats; ties to even. Callers check for values that are
// not finite.
INLINE IntVector rounded_bits(const Vector &value) {
    const IntVector bits = bits_of(value);
    return bits + 0x7fff + ((bits >> 16) & 1);
}

INLINE Vector load(const Rounded *from) { return load(&from->value); }

INLINE void store(Rounded *to, const Vector &value) { store(&to->value, from_bits(rounded_bits(value) & int32_t(0xffff0000))); }

INLINE void store(Bfloat16 *to, const Vector &value) {
#if defined(__AVX512BF16__)
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)value.parts[0]);
    std::memcpy(to, &rounded, sizeof rounded);
#else
    using Halves __attribute__((vector_size(REGISTER_LANES * sizeof(uint16_t)))) = uint16_t;
    const IntVector high = (rounded_bits(value) >> 16) & 0xffff;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; ++i) {
        const Halves halves = __builtin_convertvector(high.parts[i], Halves);
        std::memcpy(to + i * REGISTER_LANES, &halves, sizeof halves);
    }
#endif
}

// 16 whole numbers from -128 to 127.
INLINE void store(int8_t *to, const Vector &value) {
    int32_t whole[LANES];
    store_bits(whole, truncated(value));
    for (int lane = 0; lane < LANES; ++lane) to[lane] = int8_t(whole[lane]);
}

INLINE float to_float(float value) { return value; }

INLINE float to_float(Bfloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE Vector larger(const Vector &a, const Vector &b) { return choose(a > b, a, b); }

// Lane i of the result is lane i + SHIFT of the value, for i < SHIFT: a step of folding a vector in
// halves.
template <int SHIFT, class Number> INLINE Wide<Number> lanes_from(const Wide<Number> &value) {
    return by_parts<Number>([&](int i) INLINE_LAMBDA {
        if constexpr (SHIFT >= REGISTER_LANES) {
            return value.parts[(i + SHIFT / REGISTER_LANES) % PARTS];
        } else {
            IntVector::Part from;
            for (int lane = 0; lane < REGISTER_LANES; ++lane) from[lane] = (lane + SHIFT) % REGISTER_LANES;
            return __builtin_shuffle(value.parts[i], from);
        }
    });
}

template <class Number> INLINE Number sum_of(Wide<Number> value) {
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
    const IntVector lanes = lane_numbers(), exponent = IntVector{} + EXPONENT;
    Vector largest = splat(-std::numeric_limits<float>::infinity());
    IntVector where = {}, broken = {};
    int64_t index = 0;
    for (; index + LANES <= count; index += LANES) {
        const Vector value = load(values + index);
        const IntVector is_larger = value > largest;
        broken = broken | ((bits_of(value) & EXPONENT) == exponent);
        largest = choose(is_larger, value, largest);
        where = choose(is_larger, lanes + int32_t(index), where);
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
    const Vector scaled = x * 1.44269504f;
    const IntVector n = truncated(scaled + choose(scaled > splat(0), splat(0.5f), splat(-0.5f)));
    const Vector whole = to_floats(n);
    const Vector rest = x - whole * 0.693359375f + whole * 2.12194440e-4f; // ln 2 in two parts keeps the low bits
    Vector series = splat(1.0f / 720);
    series = series * rest + 1.0f / 120;
    series = series * rest + 1.0f / 24;
    series = series * rest + 1.0f / 6;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    return series * from_bits((n + 127) << 23);
}

} // namespace
