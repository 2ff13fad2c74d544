// Attention over paged keys and values.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "numbers.h"
#include "products.h"

namespace {

constexpr int BLOCK_TOKENS = 16; // positions of a KV block; as in kv_cache.py, checked at load
// keys per chunk when blocks come from memory: short, since a sequence's first chunk is not
// prefetched
constexpr int STREAM_KEYS = 128;
// finite, so that a row without visible keys so far yields no NaN
constexpr float HIDDEN_SCORE = -1e30f;

// One KV head of one layer's pool, seen from a sequence's block table.
template <class T> struct PagedHead {
    const T *keys, *values; // of block 0
    int64_t block_stride;   // values between the same head of two blocks
    const int32_t *table;
    const T *key_block(int64_t index) const { return keys + table[index] * block_stride; }
    const T *value_block(int64_t index) const { return values + table[index] * block_stride; }
};

// Blocks `begin` to `end` of a sequence, whose keys are read next.
template <class T> struct KeyRun {
    PagedHead<T> head;
    int64_t begin, end;
};

// Attention of R query rows over the positions begins[r] to ends[r] (exclusive) of one head, in
// chunks of keys with a running maximum and sum (Milakov and Gimelshein 2018). queries and out:
// rows of D values. STREAMS: the blocks come from memory. Each product then prefetches for a later
// one, so that memory is always busy: queries x keys for the chunk's values, probabilities x values
// for the next chunk's keys. then: blocks that this thread reads after these keys.
template <class T, int R, bool STREAMS> void attend(
    const T *queries, int64_t query_stride, const int64_t *begins, const int64_t *ends, const PagedHead<T> &head,
    int64_t head_dim, float scale, T *out, int64_t out_stride, Scratch<T> &scratch, const KeyRun<T> &then
) {
    constexpr int64_t U = UNIT<T>, CHUNK_BLOCKS = (STREAMS ? STREAM_KEYS : CHUNK_KEYS) / BLOCK_TOKENS;
    static_assert(CHUNK_BLOCKS % TILE_VECTORS == 0);
    const IntVector lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t first_block = *std::min_element(begins, begins + R) / BLOCK_TOKENS;
    const int64_t latest_begin = *std::max_element(begins, begins + R);
    const int64_t earliest_end = *std::min_element(ends, ends + R);
    const int64_t block_end = (*std::max_element(ends, ends + R) + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    float *scores = scratch.scores.data(), *attended = scratch.attended.data();
    T *probabilities = scratch.probabilities.data();
    float largest[R], total[R];
    std::fill_n(largest, R, HIDDEN_SCORE);
    std::fill_n(total, R, 0.0f);
    std::memset(attended, 0, R * head_dim * sizeof(float));

    for (int64_t chunk = first_block; chunk < block_end; chunk += CHUNK_BLOCKS) {
        const int64_t block_count = std::min(CHUNK_BLOCKS, block_end - chunk);
        const bool is_last_chunk = chunk + block_count == block_end;
        const KeyRun<T> upcoming = is_last_chunk ? then : KeyRun<T>{head, chunk + block_count, block_end};
        Vector chunk_largest[R];
        for (int r = 0; r < R; ++r) chunk_largest[r] = splat(HIDDEN_SCORE);
        for (int64_t block = 0; block < block_count; block += TILE_VECTORS) {
            const T *columns[TILE_VECTORS];
            // a short last tile repeats its last block and ignores the result
            for (int c = 0; c < TILE_VECTORS; ++c)
                columns[c] = head.key_block(chunk + std::min(block + c, block_count - 1));
            Vector sums[R][TILE_VECTORS] = {};
            if constexpr (STREAMS) { // a block has as many lines as this product has steps
                Ahead<TILE_VECTORS> values;
                for (int64_t c = 0; c < TILE_VECTORS; ++c)
                    values.begins[c] = head.value_block(chunk + std::min(block + c, block_count - 1));
                multiply(sums, queries, query_stride, columns, BLOCK_TOKENS * U, head_dim / U, values);
            } else {
                multiply(sums, queries, query_stride, columns, BLOCK_TOKENS * U, head_dim / U);
            }
            for (int c = 0; c < TILE_VECTORS && block + c < block_count; ++c) {
                const int64_t position = (chunk + block + c) * BLOCK_TOKENS;
                const bool partly_hidden = position < latest_begin || position + BLOCK_TOKENS > earliest_end;
                for (int r = 0; r < R; ++r) {
                    Vector score = sums[r][c] * scale;
                    if (partly_hidden) {
                        const int64_t begin = std::clamp<int64_t>(begins[r] - position, 0, LANES);
                        const int64_t end = std::clamp<int64_t>(ends[r] - position, 0, LANES);
                        score = ((lanes >= int32_t(begin)) & (lanes < int32_t(end))) ? score : splat(HIDDEN_SCORE);
                    }
                    chunk_largest[r] = larger(chunk_largest[r], score);
                    store(scores + r * CHUNK_KEYS + (block + c) * BLOCK_TOKENS, score);
                }
            }
        }
        float correction[R];
        for (int r = 0; r < R; ++r) {
            const float now_largest = std::max(largest[r], largest_of(chunk_largest[r]));
            correction[r] = std::exp(largest[r] - now_largest);
            largest[r] = now_largest;
            Vector sum = {};
            for (int64_t key = 0; key < block_count * BLOCK_TOKENS; key += LANES) {
                const Vector score = load(scores + r * CHUNK_KEYS + key);
                Vector weight = exponential(score - now_largest);
                // a row may have no visible key in this chunk
                weight = score > splat(HIDDEN_SCORE / 2) ? weight : Vector{};
                sum += weight;
                store(probabilities + r * CHUNK_KEYS + key, weight);
            }
            total[r] = total[r] * correction[r] + sum_of(sum);
        }
        for (int64_t vector = 0; vector < head_dim / LANES; vector += TILE_VECTORS) {
            with_count<TILE_VECTORS>(int(std::min<int64_t>(TILE_VECTORS, head_dim / LANES - vector)), [&]<int C>() INLINE_LAMBDA {
                Vector sums[R][C];
                for (int r = 0; r < R; ++r)
                    for (int c = 0; c < C; ++c) sums[r][c] = load(attended + r * head_dim + (vector + c) * LANES) * correction[r];
                for (int64_t block = 0; block < block_count; ++block) {
                    const T *columns[C];
                    for (int c = 0; c < C; ++c) columns[c] = head.value_block(chunk + block) + (vector + c) * LANES * U;
                    const T *weights = probabilities + block * BLOCK_TOKENS;
                    const int64_t upcoming_block = upcoming.begin + block;
                    if (STREAMS && upcoming_block < upcoming.end) { // as many lines per vector as the product has steps
                        Ahead<C> keys;
                        const T *key_block = upcoming.head.key_block(upcoming_block);
                        for (int c = 0; c < C; ++c) keys.begins[c] = key_block + (vector + c) * LANES * BLOCK_TOKENS;
                        multiply(sums, weights, CHUNK_KEYS, columns, head_dim * U, BLOCK_TOKENS / U, keys);
                    } else {
                        multiply(sums, weights, CHUNK_KEYS, columns, head_dim * U, BLOCK_TOKENS / U);
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

} // namespace
