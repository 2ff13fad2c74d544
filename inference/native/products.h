// Products of activations with packed weights. "Unit" and the packed layouts: see decoder.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "memory.h"
#include "numbers.h"
#include "team.h"

namespace {

constexpr int PANEL = 64;       // adjacent weight columns
constexpr int LINE_BYTES = 64;  // size of a cache line
// rows per matrix task: small enough to split a prefill evenly between two cores
constexpr int ROW_CHUNK = 192;
constexpr int CHUNK_KEYS = 512; // keys whose scores are held at once: 6 rows of them fit the first-level cache

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4; // 24 sums, 4 weights and a broadcast fill the 32 registers
#else
constexpr int TILE_ROWS = 2, TILE_VECTORS = 2;
#endif

INLINE void multiply_add(Vector &sum, const float *left, Vector right) { sum += *left * right; }

// Two neighbours of a row times two neighbours of each of 16 columns.
INLINE void multiply_add(Vector &sum, const Bfloat16 *left, Vector right) {
    uint32_t pair;
    std::memcpy(&pair, left, sizeof pair);
#if defined(__AVX512BF16__)
    sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(pair)), (__m512bh)right);
#else
    IntVector bits = (IntVector)right;
    sum += to_float(Bfloat16{uint16_t(pair)}) * (Vector)(bits << 16);
    sum += to_float(Bfloat16{uint16_t(pair >> 16)}) * (Vector)(bits & int32_t(0xffff0000));
#endif
}

// A unit of each of 16 columns, as it stands or, from 8 bits, as T.
template <class T> INLINE Vector load_units(const T *from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T> INLINE Vector load_units(const int8_t *from) {
    if constexpr (UNIT<T> == 1) {
        return load(from);
    } else {
#if defined(__AVX512BF16__)
        return (Vector)_mm512_cvtne2ps_pbh((__m512)load(from + LANES), (__m512)load(from));
#else
        T units[2 * LANES];
        store(units, load(from));
        store(units + LANES, load(from + LANES));
        return load_units<T>(units);
#endif
    }
}

// Cache lines prefetched during a product: per step, one at each of `begins`.
template <int COUNT> struct Ahead {
    const void *begins[COUNT];
    INLINE void touch(int64_t step) const {
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; ++i) __builtin_prefetch(static_cast<const char *>(begins[i]) + step * LINE_BYTES, 0, 2);
    }
};
template <> struct Ahead<0> {
    INLINE void touch(int64_t) const {}
};

// sums[r][c] += left row r x right columns c, over `steps` units. Rows lie `left_stride` apart; vector c begins at right[c] and
// goes on every `right_stride`. W: T, or int8_t.
template <class T, class W, int R, int C, int A = 0> INLINE void multiply(
    Vector (&sums)[R][C], const T *left, int64_t left_stride, const W *const (&right)[C], int64_t right_stride, int64_t steps,
    const Ahead<A> &ahead = {}
) {
    for (int64_t step = 0; step < steps; ++step) {
        Vector columns[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) columns[c] = load_units<T>(right[c] + step * right_stride);
        ahead.touch(step);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) multiply_add(sums[r][c], left + r * left_stride + step * UNIT<T>, columns[c]);
        }
    }
}

// Calls function.template operator()<count>() for a count from 1 to MOST that is known only now.
template <int MOST, class F> INLINE void with_count(int count, const F &function) {
    if constexpr (MOST > 1)
        if (count < MOST) return with_count<MOST - 1>(count, function);
    function.template operator()<MOST>();
}

// Packed weights of a linear layer: either `packed`, or `quantized` with one scale per column.
template <class T> struct Linear {
    Buffer<T> packed;
    Buffer<int8_t> quantized;
    Buffer<float> scales;
    Buffer<float> bias; // empty if there is none
    int64_t columns = 0, inner = 0;

    int64_t panel_count() const { return round_up(columns, PANEL) / PANEL; }
    int64_t panel_size() const { return inner * PANEL; }
};

// Position in its panel of the weight of a column and an inner index.
template <class T> int64_t packed_index(int64_t column, int64_t inner) {
    return (inner / UNIT<T> * PANEL + column % PANEL) * UNIT<T> + inner % UNIT<T>;
}

template <class T> struct Scratch {
    Buffer<T> panel;         // one panel of int8 weights, widened
    Buffer<float> scores;    // [TILE_ROWS][CHUNK_KEYS]
    Buffer<T> probabilities; // [TILE_ROWS][CHUNK_KEYS]
    Buffer<float> attended;  // [TILE_ROWS][D]
};

// One panel of int8 weights as T, for as many rows as make it worth while to widen each weight once.
template <class T> INLINE const T *widened(const Linear<T> &linear, int64_t panel, Scratch<T> &scratch) {
    const int8_t *from = linear.quantized.data() + panel * linear.panel_size();
    T *to = scratch.panel.data();
    for (int64_t index = 0; index < linear.panel_size(); index += LANES) store(to + index, load(from + index));
    return to;
}

// Calls keep(row, first column, sums) for rows first_row to end_row and each TILE_VECTORS vectors
// of a panel's columns. next: the panel that this thread probably multiplies next, to be prefetched
// meanwhile: all of it in the single pass for few rows, else one line per step.
template <class T, class W, class Keep> INLINE void panel_product(
    const T *left, int64_t left_stride, int64_t first_row, int64_t end_row, const Linear<T> &linear, int64_t panel,
    const W *weights, const W *next, const Keep &keep
) {
    constexpr int LINES_PER_STEP = PANEL * UNIT<T> * int(sizeof(W)) / LINE_BYTES;
    const int64_t steps = linear.inner / UNIT<T>, pass_bytes = steps * LINE_BYTES;
    const bool is_one_pass = end_row - first_row <= TILE_ROWS && PANEL / LANES == TILE_VECTORS;
    const float *scales = linear.scales.data(), *bias = linear.bias.data();
    const char *line = reinterpret_cast<const char *>(next);
    int64_t pass = 0;
    for (int64_t row = first_row; row < end_row; row += TILE_ROWS) {
        for (int64_t vector = 0; vector < PANEL / LANES; vector += TILE_VECTORS, ++pass) {
            with_count<TILE_ROWS>(int(std::min<int64_t>(TILE_ROWS, end_row - row)), [&]<int R>() INLINE_LAMBDA {
                const W *columns[TILE_VECTORS];
                Vector sums[R][TILE_VECTORS] = {};
                for (int c = 0; c < TILE_VECTORS; ++c) columns[c] = weights + (vector + c) * LANES * UNIT<T>;
                const T *rows_left = left + row * left_stride;
                if (line && is_one_pass) {
                    Ahead<LINES_PER_STEP> all;
                    for (int l = 0; l < LINES_PER_STEP; ++l) all.begins[l] = line + l * pass_bytes;
                    multiply(sums, rows_left, left_stride, columns, PANEL * UNIT<T>, steps, all);
                } else if (line && pass < LINES_PER_STEP) {
                    multiply(sums, rows_left, left_stride, columns, PANEL * UNIT<T>, steps, Ahead<1>{{line + pass * pass_bytes}});
                } else {
                    multiply(sums, rows_left, left_stride, columns, PANEL * UNIT<T>, steps);
                }
                const int64_t column = panel * PANEL + vector * LANES;
                for (int r = 0; r < R; ++r) {
                    for (int c = 0; c < TILE_VECTORS; ++c) {
                        if (scales) sums[r][c] *= load(scales + column + c * LANES);
                        if (bias) sums[r][c] += load(bias + column + c * LANES);
                    }
                    keep(row + r, column, sums[r]);
                }
            });
        }
    }
}

// Calls keep(row, first column, sums) for each row and TILE_VECTORS vectors of columns of left
// (rows, K) x weights + bias.
template <class T, class Keep> void linear_product(
    Worker &worker, const T *left, int64_t left_stride, int64_t rows, const Linear<T> &linear, Scratch<T> *scratches, int index,
    const Keep &keep
) {
    const int64_t row_chunks = std::max<int64_t>(1, (rows + ROW_CHUNK / 2) / ROW_CHUNK);
    const int64_t row_chunk = round_up((rows + row_chunks - 1) / row_chunks, TILE_ROWS);
    worker.each(linear.panel_count() * row_chunks, [&](int64_t task) {
        const int64_t panel = task / row_chunks, first_row = task % row_chunks * row_chunk;
        const int64_t end_row = std::min(rows, first_row + row_chunk);
        const int64_t later = std::min(panel + worker.team_size(), linear.panel_count() - 1);
        const bool fetches = task % row_chunks == row_chunks - 1 && later > panel;
        const auto multiply_by = [&](const auto *weights, const auto *next) INLINE_LAMBDA {
            panel_product(left, left_stride, first_row, end_row, linear, panel, weights, next, keep);
        };
        const auto from_memory = [&](const auto *weights) INLINE_LAMBDA {
            multiply_by(weights + panel * linear.panel_size(), fetches ? weights + later * linear.panel_size() : nullptr);
        };
        if (linear.packed.data())
            from_memory(linear.packed.data());
        else if (end_row - first_row <= TILE_ROWS) // each weight is read once anyway
            from_memory(linear.quantized.data());
        else
            multiply_by(widened(linear, panel, scratches[index]), static_cast<const T *>(nullptr));
    });
}

} // namespace
