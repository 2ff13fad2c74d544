// Products of activations with packed weights. "Unit" and the packed layouts: see decoder.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "memory.h"
#include "numbers.h"
#include "team.h"
#include "tiles.h"

namespace {

constexpr int PANEL = 64;       // adjacent weight columns
constexpr int LINE_BYTES = 64;  // size of a cache line
// rows per matrix task: small enough to split a prefill evenly between two cores
constexpr int ROW_CHUNK = 192;
// keys whose scores are held at once: short, since a sequence's first chunk is not prefetched
constexpr int CHUNK_KEYS = 128;

// Rows and vectors of a product whose sums are in registers, beside the weights and a row's value.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 1;
#else
constexpr int TILE_ROWS = 4, TILE_VECTORS = 1;
#endif
// Few rows: enough sums that none waits for the one before it.
template <int R> constexpr int VECTORS_OF_ROWS = std::max(TILE_VECTORS, R == 1 ? 4 : R == 2 ? 2 : 1);

// Rows of a product that share one pass over the weights.
template <class T> constexpr int ROWS_AT_ONCE = HAS_TILES && UNIT<T> == 2 ? BLOCK_ROWS : TILE_ROWS;

// A unit of each of 16 columns, at `from`: as floats, or as pairs for instructions that multiply pairs.
template <class T, class W> INLINE Vector load_units(const W *from) {
    if constexpr (UNIT<T> == 1) {
        return load(from);
    } else if constexpr (sizeof(W) == 2) {
        return load_bits<float>(from);
    } else {
#if defined(__AVX512BF16__)
        const auto high = (__m512)load(from + LANES).parts[0], low = (__m512)load(from).parts[0];
        return Vector{{(Vector::Part)_mm512_cvtne2ps_pbh(high, low)}};
#endif
    }
}

// The same address, but the compiler loads from it again instead of keeping a register for it.
template <class W> INLINE const W *loaded_again(const W *from) {
    asm("" : "+r"(from));
    return from;
}

// The first or second value of each of 16 pairs, as floats.
template <int WHICH> INLINE Vector load_half(const Bfloat16 *from) {
    const IntVector pairs = load_bits<int32_t>(from);
    return from_bits(WHICH == 0 ? pairs << 16 : pairs & int32_t(0xffff0000));
}

template <int WHICH> INLINE Vector load_half(const int8_t *from) {
    const IntVector pairs = load_halves<int16_t>(from);
    return to_floats(WHICH == 0 ? (pairs << 24) >> 24 : pairs >> 8);
}

INLINE void multiply_add(Vector &sum, const float *left, const Vector &right) { sum += *left * right; }

INLINE void multiply_add(Vector &sum, const Bfloat16 *left, const Vector &right) {
#if defined(__AVX512BF16__)
    uint32_t pair;
    std::memcpy(&pair, left, sizeof pair);
    const auto pairs = (__m512bh)_mm512_set1_epi32(int(pair));
    sum.parts[0] = (Vector::Part)_mm512_dpbf16_ps((__m512)sum.parts[0], pairs, (__m512bh)right.parts[0]);
#endif
}

// Bytes prefetched during a product: per step, STEP_BYTES at each of `begins`, at most a cache line.
template <int COUNT, int STEP_BYTES = LINE_BYTES> struct Ahead {
    const void *begins[COUNT];
    INLINE void touch(int64_t step) const {
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; ++i) __builtin_prefetch(static_cast<const char *>(begins[i]) + step * STEP_BYTES, 0, 2);
    }
};
struct NothingAhead {
    INLINE void touch(int64_t) const {}
};

// sums[r][c] += left row r x right columns c, over `steps` units. Rows lie `left_stride` apart; vector c begins at right[c] and
// goes on every `right_stride`. W: T, or int8_t.
template <class T, class W, int R, int C, class A = NothingAhead> INLINE void multiply(
    Vector (&sums)[R][C], const Left<T> *left, int64_t left_stride, const W *const (&right)[C], int64_t right_stride,
    int64_t steps, const A &ahead = {}
) {
    for (int64_t step = 0; step < steps; ++step) {
        const auto add = [&](const auto *values, const auto &load_column) INLINE_LAMBDA {
            Vector columns[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) columns[c] = load_column(right[c] + step * right_stride);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
                for (int c = 0; c < C; ++c) multiply_add(sums[r][c], values + r * left_stride, columns[c]);
            }
        };
        ahead.touch(step);
        if constexpr (std::is_same_v<Left<T>, Rounded>) {
            // one half after the other: the columns of both would not fit into the registers
            const float *values = &left->value + step * 2;
            add(values, [](const W *from) INLINE_LAMBDA { return load_half<0>(from); });
            add(values + 1, [](const W *from) INLINE_LAMBDA { return load_half<1>(loaded_again(from)); });
        } else {
            add(left + step * UNIT<T>, [](const W *from) INLINE_LAMBDA { return load_units<T>(from); });
        }
    }
}

// Calls function.template operator()<count>() for a count from 1 to MOST that is known only now.
template <int MOST, class F> INLINE void with_count(int count, const F &function) {
    if constexpr (MOST > 1)
        if (count < MOST) return with_count<MOST - 1>(count, function);
    function.template operator()<MOST>();
}

// Inner dimension of a product with zeros up to a whole tile.
template <class T> constexpr int64_t padded_inner(int64_t inner) { return UNIT<T> == 1 ? inner : round_up(inner, TILE_INNER); }

#if (defined(__AVX512VNNI__) && !defined(__AMX_BF16__)) || defined(__AVXVNNI__)
constexpr bool HAS_QUADS = true; // instructions that multiply four bytes by four bytes
#else
constexpr bool HAS_QUADS = false;
#endif
// values of a row of activations that share a scale, where these instructions need them in 8 bits
constexpr int GROUP = 64;

// Packed weights of a linear layer: either `packed`, or `quantized` with one scale per column.
template <class T> struct Linear {
    Buffer<T> packed;
    Buffer<int8_t> quantized;
    Buffer<float> scales;
    Buffer<float> bias; // empty if there is none
    int64_t columns = 0, inner = 0;

    int64_t panel_count() const { return round_up(columns, PANEL) / PANEL; }
    template <class W> int64_t panel_size() const {
        return (HAS_QUADS && sizeof(W) == 1 ? round_up(inner, GROUP) : padded_inner<T>(inner)) * PANEL;
    }
};

// Puts the weight of a column and an inner index into its panel. W: T, or int8_t.
template <class T, class W> INLINE void pack(W *panel, int64_t column, int64_t inner, W weight) {
    constexpr bool IS_QUAD = HAS_QUADS && sizeof(W) == 1;
    constexpr int64_t U = IS_QUAD ? 4 : UNIT<T>;
    W &packed = panel[(inner / U * PANEL + column % PANEL) * U + inner % U];
    if constexpr (IS_QUAD)
        packed = W(weight ^ 0x80); // the instruction's first bytes have no sign: 128 is added
    else
        packed = weight;
}

// Left rows of a product, `stride` values apart.
template <class T> struct LeftRows {
    const Left<T> *values;
    int64_t stride;
    LeftRows from(int64_t row) const { return {values + row * stride, stride}; }
};

// The same in 8 bits, in groups: value = byte * scale. offset: -128 times the sum of the bytes.
struct QuantizedRows {
    int8_t *values;
    float *scales;
    int32_t *offsets;
    int64_t stride; // a multiple of GROUP
    QuantizedRows from(int64_t row) const {
        const int64_t groups = row * stride / GROUP;
        return {values + row * stride, scales + groups, offsets + groups, stride};
    }
};

template <class T> struct Scratch {
    Buffer<T> panel;               // one panel of int8 weights, widened
    Buffer<float> scores;          // [TILE_SIDE][CHUNK_KEYS]
    Buffer<Left<T>> probabilities; // [TILE_SIDE][CHUNK_KEYS]
    Buffer<float> attended;        // [TILE_SIDE][D]
    Buffer<float> products;        // [ROWS_AT_ONCE][PANEL]
    TileState tiles;
};

// One panel of int8 weights as T, for as many rows as make it worth while to widen each weight once.
template <class T> INLINE const T *widened(const Linear<T> &linear, int64_t panel, Scratch<T> &scratch) {
    const int8_t *from = linear.quantized.data() + panel * linear.template panel_size<int8_t>();
    T *to = scratch.panel.data();
    for (int64_t index = 0; index < linear.template panel_size<T>(); index += LANES) store(to + index, load(from + index));
    return to;
}

// The panel that a thread probably multiplies next, and the share of it to be prefetched now: part
// `index` of `count`.
template <class W> struct Share {
    const W *panel; // null if there is none
    int64_t index, count;
};

// scratch.products = left x weights for up to TILE_ROWS rows and one panel.
template <class T, class W> __attribute__((noinline)) void multiply_panel(
    const LeftRows<T> &left, int rows, const W *weights, int64_t inner, const Share<W> &next, Scratch<T> &scratch
) {
    constexpr int LINES = PANEL * UNIT<T> * int(sizeof(W)) / LINE_BYTES; // per step
    const int64_t steps = inner / UNIT<T>;
    const char *line = reinterpret_cast<const char *>(next.panel);
    with_count<TILE_ROWS>(rows, [&]<int R>() INLINE_LAMBDA {
        constexpr int C = VECTORS_OF_ROWS<R>, PASSES = PANEL / LANES / C;
        for (int64_t pass = 0; pass < PASSES; ++pass) {
            const int vector = int(pass) * C;
            const int64_t first = next.index * PASSES + pass;
            const W *columns[C];
            Vector sums[R][C] = {};
            for (int c = 0; c < C; ++c) columns[c] = weights + (vector + c) * LANES * UNIT<T>;
            if (line && next.count * PASSES == 1) {
                Ahead<LINES> all;
                for (int l = 0; l < LINES; ++l) all.begins[l] = line + l * steps * LINE_BYTES;
                multiply<T>(sums, left.values, left.stride, columns, PANEL * UNIT<T>, steps, all);
            } else if (line && first < LINES) {
                multiply<T>(sums, left.values, left.stride, columns, PANEL * UNIT<T>, steps, Ahead<1>{{line + first * steps * LINE_BYTES}});
            } else {
                multiply<T>(sums, left.values, left.stride, columns, PANEL * UNIT<T>, steps);
            }
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < C; ++c)
                    store(scratch.products.data() + r * PANEL + (vector + c) * LANES, sums[r][c]);
        }
    });
}

#if defined(__AMX_BF16__)

// Calls function with a pair of tiles' weights of one step: 32 columns from column `first` of a
// panel, and the bytes between their rows.
template <class F> INLINE void with_weights(const Bfloat16 *weights, int64_t step, int first, Bfloat16 *, const F &function) {
    function(weights + step * TILE_INNER * PANEL + first * UNIT<Bfloat16>, PANEL * UNIT<Bfloat16> * sizeof(Bfloat16));
}
template <class F> INLINE void with_weights(const int8_t *weights, int64_t step, int first, Bfloat16 *wide, const F &function) {
    constexpr int ROW = 2 * TILE_SIDE * UNIT<Bfloat16>;
    const int8_t *from = weights + step * TILE_INNER * PANEL + first * UNIT<Bfloat16>;
    for (int row = 0; row < TILE_SIDE; ++row)
        for (int index = 0; index < ROW; index += LANES)
            store(wide + row * ROW + index, load(from + row * PANEL * UNIT<Bfloat16> + index));
    finish_stores();
    function(wide, ROW * sizeof(Bfloat16));
}

// The same for up to BLOCK_ROWS rows in tiles.
template <class W> __attribute__((noinline)) void multiply_panel(
    const LeftRows<Bfloat16> &left_rows, int rows, const W *weights, int64_t inner, const Share<W> &next,
    Scratch<Bfloat16> &scratch
) {
    const Bfloat16 *left = left_rows.values;
    constexpr int64_t STEP_SIZE = TILE_INNER * PANEL, STEP_LINES = STEP_SIZE * sizeof(W) / LINE_BYTES, HALF = PANEL / 2;
    const int64_t steps = padded_inner<Bfloat16>(inner) / TILE_INNER, left_bytes = left_rows.stride * sizeof(Bfloat16);
    const int64_t lines = next.panel ? (STEP_LINES + 4 * next.count - 1) / (4 * next.count) : 0; // per step and quarter
    const Bfloat16 *lower = left + TILE_SIDE * left_rows.stride;
    float *products = scratch.products.data();
    Bfloat16 *wide = scratch.panel.data();
    // after each load of a tile, since the loads of a burst would keep the next tile waiting
    const auto fetch = [&](int64_t step, int64_t quarter) INLINE_LAMBDA {
        const char *from = reinterpret_cast<const char *>(next.panel + step * STEP_SIZE) + (4 * next.index + quarter) * lines * LINE_BYTES;
        for (int64_t index = 0; index < lines; ++index) __builtin_prefetch(from + index * LINE_BYTES, 0, 2);
    };
    finish_stores();
    scratch.tiles.use_for_product(rows);
    if (rows <= TILE_SIDE) {
        clear_sums();
        for (int64_t step = 0; step < steps; ++step) {
            _tile_loadd(4, left + step * TILE_INNER, left_bytes);
            with_weights(weights, step, 0, wide, [&](const Bfloat16 *from, int64_t stride) INLINE_LAMBDA {
                _tile_loadd(6, from, stride);
                fetch(step, 0);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, from + TILE_SIDE * UNIT<Bfloat16>, stride);
                fetch(step, 1);
                _tile_dpbf16ps(1, 4, 7);
            });
            with_weights(weights, step, HALF, wide + HALF * TILE_INNER, [&](const Bfloat16 *from, int64_t stride) INLINE_LAMBDA {
                _tile_loadd(5, from, stride);
                fetch(step, 2);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(6, from + TILE_SIDE * UNIT<Bfloat16>, stride);
                fetch(step, 3);
                _tile_dpbf16ps(3, 4, 6);
            });
        }
        _tile_stored(0, products, PANEL * sizeof(float));
        _tile_stored(1, products + TILE_SIDE, PANEL * sizeof(float));
        _tile_stored(2, products + HALF, PANEL * sizeof(float));
        _tile_stored(3, products + HALF + TILE_SIDE, PANEL * sizeof(float));
        return;
    }
    for (int half = 0; half < 2; ++half) {
        clear_sums();
        for (int64_t step = 0; step < steps; ++step) {
            _tile_loadd(4, left + step * TILE_INNER, left_bytes);
            with_weights(weights, step, half * HALF, wide, [&](const Bfloat16 *from, int64_t stride) INLINE_LAMBDA {
                _tile_loadd(6, from, stride);
                fetch(step, 2 * half);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, from + TILE_SIDE * UNIT<Bfloat16>, stride);
                fetch(step, 2 * half + 1);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, lower + step * TILE_INNER, left_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            });
        }
        float *to = products + half * HALF;
        _tile_stored(0, to, PANEL * sizeof(float));
        _tile_stored(1, to + TILE_SIDE, PANEL * sizeof(float));
        _tile_stored(2, to + TILE_SIDE * PANEL, PANEL * sizeof(float));
        _tile_stored(3, to + TILE_SIDE * PANEL + TILE_SIDE, PANEL * sizeof(float));
    }
}

#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

// sums + the products of four bytes without a sign in each of 16 columns, and four of a row.
INLINE IntVector add_quads(const IntVector &sums, const IntVector &columns, int32_t quad) {
    return by_parts<int32_t>([&](int i) INLINE_LAMBDA {
#if defined(__AVX512VNNI__)
        return (IntVector::Part)_mm512_dpbusd_epi32((__m512i)sums.parts[i], (__m512i)columns.parts[i], _mm512_set1_epi32(quad));
#else
        return (IntVector::Part)_mm256_dpbusd_avx_epi32((__m256i)sums.parts[i], (__m256i)columns.parts[i], _mm256_set1_epi32(quad));
#endif
    });
}

// 16 numbers from -128 to 127 as bytes.
INLINE void store_bytes(int8_t *to, const IntVector &value) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8((__m512i)value.parts[0]));
#else
    const auto half = [&](int i) INLINE_LAMBDA {
        const auto part = (__m256i)value.parts[i];
        return _mm_packs_epi32(_mm256_castsi256_si128(part), _mm256_extracti128_si256(part, 1));
    };
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm_packs_epi16(half(0), half(1)));
#endif
}

// A row of `inner` values, in whole vectors, as bytes up to a whole group.
template <class From> void quantize(const From *from, int64_t inner, const QuantizedRows &to) {
    constexpr float SHIFT = 3 << 22; // a sum with it has the nearest whole number in its low bits
    const IntVector shift = bits_of(splat(SHIFT));
    for (int64_t group = 0; group * GROUP < inner; ++group) {
        const int64_t begin = group * GROUP, end = std::min(inner, begin + GROUP);
        Vector largest = {}, faults = {};
        for (int64_t index = begin; index < end; index += LANES) {
            const Vector value = load(from + index);
            largest = larger(largest, larger(value, splat(0) - value));
            faults += value * 0.0f; // not a number, if the value is none or infinite
        }
        const float most = largest_of(largest), factor = most > 0 ? 127 / most : 0;
        IntVector sum = {};
        for (int64_t index = begin; index < begin + GROUP; index += LANES) {
            IntVector whole = {};
            if (index < end) whole = bits_of(load(from + index) * factor + SHIFT) - shift;
            sum += whole;
            store_bytes(to.values + index, whole);
        }
        to.scales[group] = most / 127 + sum_of(faults);
        to.offsets[group] = -128 * sum_of(sum);
    }
}

// scratch.products = left x weights for up to TILE_ROWS rows and one panel.
template <class T> __attribute__((noinline)) void multiply_panel(
    const QuantizedRows &left, int rows, const int8_t *weights, int64_t inner, const Share<int8_t> &next, Scratch<T> &scratch
) {
    constexpr int64_t STEP_SIZE = PANEL * 4, STEPS = GROUP / 4;
    const int64_t group_count = round_up(inner, GROUP) / GROUP;
    std::fill_n(scratch.products.data(), rows * PANEL, 0.0f);
    with_count<TILE_ROWS>(rows, [&]<int R>() INLINE_LAMBDA {
        constexpr int C = VECTORS_OF_ROWS<R>, PASSES = PANEL / LANES / C;
        const int64_t parts = next.panel ? next.count * PASSES : 0;
        const int64_t lines = parts ? (STEP_SIZE / LINE_BYTES + parts - 1) / parts : 0; // of a step, to fetch in a pass
        for (int64_t pass = 0; pass < PASSES; ++pass) {
            const int64_t first_line = (next.index * PASSES + pass) * lines;
            const int64_t end_line = std::min<int64_t>(first_line + lines, STEP_SIZE / LINE_BYTES);
            for (int64_t group = 0; group < group_count; ++group) {
                IntVector sums[R][C];
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                    for (int c = 0; c < C; ++c) sums[r][c] = IntVector{} + left.from(r).offsets[group];
                for (int64_t step = group * STEPS; step < (group + 1) * STEPS; ++step) {
                    const int8_t *from = weights + step * STEP_SIZE + pass * C * LANES * 4;
                    IntVector columns[C];
#pragma GCC unroll 4
                    for (int c = 0; c < C; ++c) columns[c] = load_bits<int32_t>(from + c * LANES * 4);
                    for (int64_t line = first_line; line < end_line; ++line)
                        __builtin_prefetch(next.panel + step * STEP_SIZE + line * LINE_BYTES, 0, 2);
#pragma GCC unroll 8
                    for (int r = 0; r < R; ++r) {
                        int32_t quad;
                        std::memcpy(&quad, left.values + r * left.stride + step * 4, sizeof quad);
#pragma GCC unroll 4
                        for (int c = 0; c < C; ++c) sums[r][c] = add_quads(sums[r][c], columns[c], quad);
                    }
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                    for (int c = 0; c < C; ++c) {
                        float *to = scratch.products.data() + r * PANEL + (pass * C + c) * LANES;
                        store(to, load(to) + to_floats(sums[r][c]) * left.from(r).scales[group]);
                    }
            }
        }
    });
}

#endif

// Calls keep(row, column, sums) for each row and panel of left (rows, K) x weights + bias; sums:
// the panel's vectors, from `column`. Rows: LeftRows, or QuantizedRows for quantized weights.
template <class T, class Rows, class Keep> void linear_product(
    Worker &worker, const Rows &left, int64_t rows, const Linear<T> &linear, Scratch<T> &scratch, const Keep &keep
) {
    constexpr bool IS_QUANTIZED = std::is_same_v<Rows, QuantizedRows>;
    constexpr int AT_ONCE = IS_QUANTIZED ? TILE_ROWS : ROWS_AT_ONCE<T>;
    const int64_t row_chunks = std::max<int64_t>(1, (rows + ROW_CHUNK / 2) / ROW_CHUNK);
    const int64_t row_chunk = round_up((rows + row_chunks - 1) / row_chunks, AT_ONCE);
    const float *scales = linear.scales.data(), *bias = linear.bias.data();
    worker.each(linear.panel_count() * row_chunks, [&](int64_t task) {
        const int64_t panel = task / row_chunks, first_row = task % row_chunks * row_chunk;
        const int64_t end_row = std::min(rows, first_row + row_chunk), column = panel * PANEL;
        const int64_t later = std::min(panel + worker.team_size(), linear.panel_count() - 1);
        const bool fetches = task % row_chunks == row_chunks - 1 && later > panel;
        const auto multiply_by = [&](const auto *weights, const auto *next) INLINE_LAMBDA {
            Share share{next, 0, (end_row - first_row + AT_ONCE - 1) / AT_ONCE};
            for (int64_t row = first_row; row < end_row; row += AT_ONCE, ++share.index) {
                const int count = int(std::min<int64_t>(AT_ONCE, end_row - row));
                multiply_panel(left.from(row), count, weights, linear.inner, share, scratch);
                for (int r = 0; r < count; ++r) {
                    Vector sums[PANEL / LANES];
                    for (int c = 0; c < PANEL / LANES; ++c) {
                        sums[c] = load(scratch.products.data() + r * PANEL + c * LANES);
                        if (scales) sums[c] *= load(scales + column + c * LANES);
                        if (bias) sums[c] += load(bias + column + c * LANES);
                    }
                    keep(row + r, column, sums);
                }
            }
        };
        const auto from_memory = [&]<class W>(const W *weights) INLINE_LAMBDA {
            const int64_t size = linear.template panel_size<W>();
            multiply_by(weights + panel * size, fetches ? weights + later * size : nullptr);
        };
        if constexpr (IS_QUANTIZED) {
            from_memory(linear.quantized.data());
        } else if (linear.packed.data()) {
            from_memory(linear.packed.data());
        } else if constexpr (!HAS_QUADS) {
            if (end_row - first_row <= AT_ONCE) // each weight is read once anyway
                from_memory(linear.quantized.data());
            else
                multiply_by(widened(linear, panel, scratch), static_cast<const T *>(nullptr));
        }
    });
}

} // namespace
