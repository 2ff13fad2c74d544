// Attention over paged keys and values.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "interface.h"
#include "numbers.h"
#include "products.h"

namespace {

constexpr int64_t CHUNK_BLOCKS = CHUNK_KEYS / BLOCK_TOKENS;
// finite, so that a row without visible keys so far yields no NaN
constexpr float HIDDEN_SCORE = -1e30f;

// One KV head of one layer's pool, seen from a sequence's block table. W: type of stored keys and values. Those of
// int8 have a scale for each position and head, which multiplies a key's score, or the weight of a value.
template <class W> struct PagedHead {
    const W *keys, *values; // of block 0
    const Bfloat16 *key_scales, *value_scales;
    int64_t block_stride, scale_stride; // numbers between the same head of two blocks
    const int32_t *table;
    const W *key_block(int64_t index) const { return keys + table[index] * block_stride; }
    const W *value_block(int64_t index) const { return values + table[index] * block_stride; }
    INLINE Vector scaled_scores(const Vector &scores, int64_t index) const { return scaled(scores, key_scales, index); }
    INLINE Vector scaled_weights(const Vector &weights, int64_t index) const { return scaled(weights, value_scales, index); }

  private:
    INLINE Vector scaled(const Vector &numbers, const Bfloat16 *scales, int64_t index) const {
        if constexpr (std::is_same_v<W, int8_t>) return numbers * load(scales + table[index] * scale_stride);
        else return numbers;
    }
};

// Blocks `begin` to `end` of a sequence, whose keys are read next.
template <class W> struct KeyRun {
    PagedHead<W> head;
    int64_t begin, end;
};

// Scores of 16 positions, of which the row sees those from `begin` to `end`.
INLINE Vector hidden_outside(Vector score, int64_t begin, int64_t end) {
    const IntVector lanes = lane_numbers(), none = {};
    const int32_t first = int32_t(std::clamp<int64_t>(begin, 0, LANES)), last = int32_t(std::clamp<int64_t>(end, 0, LANES));
    return choose((lanes >= none + first) & (lanes < none + last), score, splat(HIDDEN_SCORE));
}

// Weights of a row's chunk of keys, which begins with block `chunk`, by their scores. Returns the factor that corrects
// earlier chunks.
template <class T, class W> INLINE float weigh(
    const float *scores, int64_t count, Vector chunk_largest, float &largest, float &total, Left<T> *probabilities,
    const PagedHead<W> &head, int64_t chunk
) {
    const float now_largest = std::max(largest, largest_of(chunk_largest));
    const float correction = std::exp(largest - now_largest);
    largest = now_largest;
    Vector sum = {};
    for (int64_t key = 0; key < count; key += LANES) {
        const Vector score = load(scores + key);
        Vector weight = exponential(score - now_largest);
        // a row may have no visible key in this chunk
        weight = choose(score > splat(HIDDEN_SCORE / 2), weight, Vector{});
        sum += weight;
        store(probabilities + key, head.scaled_weights(weight, chunk + key / LANES));
    }
    total = total * correction + sum_of(sum);
    return correction;
}

// Attention of R query rows over the positions begins[r] to ends[r] (exclusive) of one head, in
// chunks of keys with a running maximum and sum (Milakov and Gimelshein 2018). Chunks begin at
// multiples of their size, so a row's result does not depend on the rows beside it. queries and
// out: rows of D values. Each product prefetches for a later one, so that memory is always busy:
// queries x keys for the chunk's values, probabilities x values for the next chunk's keys. then:
// blocks that this thread reads after these keys.
template <class T, class W, int R> void attend(
    const Left<T> *queries, int64_t query_stride, const int64_t *begins, const int64_t *ends, const PagedHead<W> &head,
    int64_t head_dim, float scale, Left<T> *out, int64_t out_stride, Scratch<T> &scratch, const KeyRun<W> &then
) {
    constexpr int64_t U = UNIT<T>;
    constexpr int STEP_BYTES = LINE_BYTES * int(sizeof(W)) / int(sizeof(T)); // of a block, in each step of a product
    constexpr int VECTORS = VECTORS_OF_ROWS<R>;
    const int64_t first_block = *std::min_element(begins, begins + R) / BLOCK_TOKENS;
    const int64_t latest_begin = *std::max_element(begins, begins + R);
    const int64_t earliest_end = *std::min_element(ends, ends + R);
    const int64_t block_end = (*std::max_element(ends, ends + R) + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    float *scores = scratch.scores.data(), *attended = scratch.attended.data();
    Left<T> *probabilities = scratch.probabilities.data();
    float largest[R], total[R];
    std::fill_n(largest, R, HIDDEN_SCORE);
    std::fill_n(total, R, 0.0f);
    std::memset(attended, 0, R * head_dim * sizeof(float));

    for (int64_t chunk = first_block, block_count; chunk < block_end; chunk += block_count) {
        block_count = std::min(block_end, (chunk / CHUNK_BLOCKS + 1) * CHUNK_BLOCKS) - chunk;
        const bool is_last_chunk = chunk + block_count == block_end;
        const KeyRun<W> upcoming = is_last_chunk ? then : KeyRun<W>{head, chunk + block_count, block_end};
        Vector chunk_largest[R];
        for (int r = 0; r < R; ++r) chunk_largest[r] = splat(HIDDEN_SCORE);
        for (int64_t block = 0; block < block_count; block += VECTORS) {
            const W *columns[VECTORS];
            // a short last tile repeats its last block and ignores the result
            for (int c = 0; c < VECTORS; ++c)
                columns[c] = head.key_block(chunk + std::min(block + c, block_count - 1));
            Vector sums[R][VECTORS] = {};
            Ahead<VECTORS, STEP_BYTES> values; // a block of T has as many lines as this product has steps
            for (int64_t c = 0; c < VECTORS; ++c)
                values.begins[c] = head.value_block(chunk + std::min(block + c, block_count - 1));
            multiply<T>(sums, queries, query_stride, columns, BLOCK_TOKENS * U, head_dim / U, values);
            for (int c = 0; c < VECTORS && block + c < block_count; ++c) {
                const int64_t position = (chunk + block + c) * BLOCK_TOKENS;
                const bool partly_hidden = position < latest_begin || position + BLOCK_TOKENS > earliest_end;
                for (int r = 0; r < R; ++r) {
                    Vector score = head.scaled_scores(sums[r][c] * scale, chunk + block + c);
                    if (partly_hidden) score = hidden_outside(score, begins[r] - position, ends[r] - position);
                    chunk_largest[r] = larger(chunk_largest[r], score);
                    store(scores + r * CHUNK_KEYS + (block + c) * BLOCK_TOKENS, score);
                }
            }
        }
        float correction[R];
        for (int r = 0; r < R; ++r)
            correction[r] = weigh<T>(
                scores + r * CHUNK_KEYS, block_count * BLOCK_TOKENS, chunk_largest[r], largest[r], total[r],
                probabilities + r * CHUNK_KEYS, head, chunk
            );
        for (int64_t vector = 0; vector < head_dim / LANES; vector += VECTORS) {
            with_count<VECTORS>(int(std::min<int64_t>(VECTORS, head_dim / LANES - vector)), [&]<int C>() INLINE_LAMBDA {
                Vector sums[R][C];
                for (int r = 0; r < R; ++r)
                    for (int c = 0; c < C; ++c) sums[r][c] = load(attended + r * head_dim + (vector + c) * LANES) * correction[r];
                for (int64_t block = 0; block < block_count; ++block) {
                    const W *columns[C];
                    for (int c = 0; c < C; ++c) columns[c] = head.value_block(chunk + block) + (vector + c) * LANES * U;
                    const Left<T> *weights = probabilities + block * BLOCK_TOKENS;
                    const int64_t upcoming_block = upcoming.begin + block;
                    if (upcoming_block < upcoming.end) { // as many lines per vector as the product has steps
                        Ahead<C, STEP_BYTES> keys;
                        const W *key_block = upcoming.head.key_block(upcoming_block);
                        for (int c = 0; c < C; ++c) keys.begins[c] = key_block + (vector + c) * LANES * BLOCK_TOKENS;
                        multiply<T>(sums, weights, CHUNK_KEYS, columns, head_dim * U, BLOCK_TOKENS / U, keys);
                    } else {
                        multiply<T>(sums, weights, CHUNK_KEYS, columns, head_dim * U, BLOCK_TOKENS / U);
                    }
                }
                for (int r = 0; r < R; ++r)
                    for (int c = 0; c < C; ++c) store(attended + r * head_dim + (vector + c) * LANES, sums[r][c]);
            });
        }
    }
    for (int r = 0; r < R; ++r)
        for (int64_t d = 0; d < head_dim; d += LANES)
            store(out + r * out_stride + d, load(attended + r * head_dim + d) * (1.0f / total[r]));
}

#if defined(__AMX_BF16__)

// `rows` rows of a block as bfloat16, from which tiles are loaded: in place, or widened to `wide`.
INLINE const Bfloat16 *tile_rows(const Bfloat16 *from, int64_t, int64_t, int64_t, Bfloat16 *) { return from; }
INLINE const Bfloat16 *tile_rows(const int8_t *from, int64_t rows, int64_t row_size, int64_t stride, Bfloat16 *wide) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t index = 0; index < row_size; index += LANES) store(wide + row * row_size + index, load(from + row * stride + index));
    finish_stores();
    return wide;
}

// The same for `rows` rows, up to 16, in tiles.
template <class W> void attend_in_tiles(
    const Bfloat16 *queries, int64_t query_stride, int rows, const int64_t *begins, const int64_t *ends,
    const PagedHead<W> &head, int64_t head_dim, float scale, Bfloat16 *out, int64_t out_stride,
    Scratch<Bfloat16> &scratch, const KeyRun<W> &then
) {
    constexpr int64_t U = UNIT<Bfloat16>;
    constexpr bool IS_WIDENED = !std::is_same_v<W, Bfloat16>;
    const int64_t first_block = *std::min_element(begins, begins + rows) / BLOCK_TOKENS;
    const int64_t latest_begin = *std::max_element(begins, begins + rows);
    const int64_t earliest_end = *std::min_element(ends, ends + rows);
    const int64_t block_end = (*std::max_element(ends, ends + rows) + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    const int64_t block_size = BLOCK_TOKENS * head_dim, block_lines = block_size * sizeof(W) / LINE_BYTES;
    float *scores = scratch.scores.data(), *attended = scratch.attended.data();
    Bfloat16 *probabilities = scratch.probabilities.data(), *wide = scratch.panel.data();
    float largest[TILE_SIDE], total[TILE_SIDE];
    std::fill_n(largest, rows, HIDDEN_SCORE);
    std::fill_n(total, rows, 0.0f);
    const auto fetch = [&](const W *block) INLINE_LAMBDA {
        for (int64_t line = 0; line < block_lines; ++line)
            __builtin_prefetch(reinterpret_cast<const char *>(block) + line * LINE_BYTES, 0, 2);
    };
    scratch.tiles.use_for_attention(rows);

    for (int64_t chunk = first_block, block_count; chunk < block_end; chunk += block_count) {
        block_count = std::min(block_end, (chunk / CHUNK_BLOCKS + 1) * CHUNK_BLOCKS) - chunk;
        const bool is_last_chunk = chunk + block_count == block_end;
        const KeyRun<W> upcoming = is_last_chunk ? then : KeyRun<W>{head, chunk + block_count, block_end};
        finish_stores();
        for (int64_t block = 0; block < block_count; block += 4) {
            const Bfloat16 *keys[4]; // a short last group repeats its last block
            for (int c = 0; c < 4; ++c) {
                const W *from = head.key_block(chunk + std::min(block + c, block_count - 1));
                keys[c] = tile_rows(from, 1, block_size, 0, wide + c * block_size);
            }
            for (int64_t c = 0; c < 4 && block + c < block_count; ++c) fetch(head.value_block(chunk + block + c));
            clear_sums();
            int64_t d = 0;
            for (; d + TILE_INNER <= head_dim; d += TILE_INNER) {
                _tile_loadd(4, queries + d, query_stride * sizeof(Bfloat16));
                _tile_loadd(6, keys[0] + d * BLOCK_TOKENS, TILE_BYTES);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(6, keys[1] + d * BLOCK_TOKENS, TILE_BYTES);
                _tile_dpbf16ps(1, 4, 6);
                _tile_loadd(6, keys[2] + d * BLOCK_TOKENS, TILE_BYTES);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(6, keys[3] + d * BLOCK_TOKENS, TILE_BYTES);
                _tile_dpbf16ps(3, 4, 6);
            }
            if (d < head_dim) {
                _tile_loadd(5, queries + d, query_stride * sizeof(Bfloat16));
                _tile_loadd(7, keys[0] + d * BLOCK_TOKENS, TILE_BYTES);
                _tile_dpbf16ps(0, 5, 7);
                _tile_loadd(7, keys[1] + d * BLOCK_TOKENS, TILE_BYTES);
                _tile_dpbf16ps(1, 5, 7);
                _tile_loadd(7, keys[2] + d * BLOCK_TOKENS, TILE_BYTES);
                _tile_dpbf16ps(2, 5, 7);
                _tile_loadd(7, keys[3] + d * BLOCK_TOKENS, TILE_BYTES);
                _tile_dpbf16ps(3, 5, 7);
            }
            float *to = scores + block * BLOCK_TOKENS;
            _tile_stored(0, to, CHUNK_KEYS * sizeof(float));
            _tile_stored(1, to + BLOCK_TOKENS, CHUNK_KEYS * sizeof(float));
            _tile_stored(2, to + 2 * BLOCK_TOKENS, CHUNK_KEYS * sizeof(float));
            _tile_stored(3, to + 3 * BLOCK_TOKENS, CHUNK_KEYS * sizeof(float));
        }
        for (int r = 0; r < rows; ++r) {
            float *row = scores + r * CHUNK_KEYS;
            Vector chunk_largest = splat(HIDDEN_SCORE);
            for (int64_t block = 0; block < block_count; ++block) {
                const int64_t position = (chunk + block) * BLOCK_TOKENS;
                Vector score = head.scaled_scores(load(row + block * BLOCK_TOKENS) * scale, chunk + block);
                if (position < latest_begin || position + BLOCK_TOKENS > earliest_end)
                    score = hidden_outside(score, begins[r] - position, ends[r] - position);
                chunk_largest = larger(chunk_largest, score);
                store(row + block * BLOCK_TOKENS, score);
            }
            const float correction = weigh<Bfloat16>(
                row, block_count * BLOCK_TOKENS, chunk_largest, largest[r], total[r], probabilities + r * CHUNK_KEYS,
                head, chunk
            );
            for (int64_t d = 0; d < head_dim && chunk > first_block; d += LANES)
                store(attended + r * head_dim + d, load(attended + r * head_dim + d) * correction);
        }
        finish_stores();
        for (int64_t d = 0; d < head_dim; d += 4 * LANES) {
            const int64_t tiles = std::min<int64_t>(4, (head_dim - d) / LANES), stride = head_dim * sizeof(float);
            float *sums = attended + d;
            if (chunk == first_block) {
                clear_sums();
            } else {
                _tile_loadd(0, sums, stride);
                if (tiles > 1) _tile_loadd(1, sums + LANES, stride);
                if (tiles > 2) _tile_loadd(2, sums + 2 * LANES, stride);
                if (tiles > 3) _tile_loadd(3, sums + 3 * LANES, stride);
            }
            for (int64_t block = 0; block < block_count; ++block) {
                const int64_t row_size = tiles * LANES * U, row_stride = head_dim * U;
                const Bfloat16 *values =
                    tile_rows(head.value_block(chunk + block) + d * U, BLOCK_TOKENS / U, row_size, row_stride, wide);
                const int64_t value_stride = (IS_WIDENED ? row_size : row_stride) * sizeof(Bfloat16);
                if (d == 0 && upcoming.begin + block < upcoming.end) fetch(upcoming.head.key_block(upcoming.begin + block));
                _tile_loadd(5, probabilities + block * BLOCK_TOKENS, CHUNK_KEYS * sizeof(Bfloat16));
                _tile_loadd(7, values, value_stride);
                _tile_dpbf16ps(0, 5, 7);
                if (tiles > 1) {
                    _tile_loadd(7, values + LANES * U, value_stride);
                    _tile_dpbf16ps(1, 5, 7);
                }
                if (tiles > 2) {
                    _tile_loadd(7, values + 2 * LANES * U, value_stride);
                    _tile_dpbf16ps(2, 5, 7);
                }
                if (tiles > 3) {
                    _tile_loadd(7, values + 3 * LANES * U, value_stride);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, sums, stride);
            if (tiles > 1) _tile_stored(1, sums + LANES, stride);
            if (tiles > 2) _tile_stored(2, sums + 2 * LANES, stride);
            if (tiles > 3) _tile_stored(3, sums + 3 * LANES, stride);
        }
    }
    for (int r = 0; r < rows; ++r)
        for (int64_t d = 0; d < head_dim; d += LANES)
            store(out + r * out_stride + d, load(attended + r * head_dim + d) * (1.0f / total[r]));
}

#endif

} // namespace
