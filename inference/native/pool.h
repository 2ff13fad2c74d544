// Keys and values of all layers, and attention of a step over them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "attention.h"
#include "interface.h"
#include "memory.h"
#include "numbers.h"

namespace {

template <class T> constexpr bool IN_TILES = HAS_TILES && UNIT<T> == 2;
template <class T> constexpr int ATTENTION_ROWS = IN_TILES<T> ? TILE_SIDE : TILE_ROWS; // of one pass over the keys

// Rows of one span and one KV head: `row_count` rows from `row` of the span; all its query heads.
struct AttentionTask {
    int32_t span, kv_head, row, row_count;
};

// Attention of a step in one layer: rows of queries, and of results, lie `stride` numbers apart.
template <class T> struct Attention {
    const std::vector<AttentionTask> &tasks;
    const Span *spans;
    const int32_t *tables;
    int64_t layer;
    const Left<T> *queries;
    Left<T> *out;
    int64_t stride;
    int team_size;
};

// Interface independent of the stored type, so that only what reads keys and values is compiled for each.
template <class T> class AnyPool {
  public:
    virtual ~AnyPool() = default;
    // Stores the heads of one position, and may change them.
    virtual void keep(int64_t layer, int64_t block, int64_t slot, float *key_heads, float *value_heads) = 0;
    // Computes one task.
    virtual void attend_task(int64_t index, const Attention<T> &step, Scratch<T> &scratch) const = 0;
};

// KV: type of stored keys and values.
template <class T, class KV> class Pool final : public AnyPool<T> {
  public:
    explicit Pool(const Shape &shape)
        : shape_(shape), windows_(shape.windows, shape.windows + shape.layer_count),
          keys_(head_count() * BLOCK_TOKENS * shape.head_dim), values_(head_count() * BLOCK_TOKENS * shape.head_dim) {
        if constexpr (!std::is_same_v<KV, int8_t>) return;
        key_scales_ = Buffer<Bfloat16>(head_count() * BLOCK_TOKENS);
        value_scales_ = Buffer<Bfloat16>(head_count() * BLOCK_TOKENS);
    }

    void keep(int64_t layer, int64_t block, int64_t slot, float *key_heads, float *value_heads) override {
        const int64_t head_dim = shape_.head_dim, unit = UNIT<T>;
        for (int64_t head = 0; head < shape_.kv_head_count; ++head) {
            const int64_t first = (layer * shape_.block_count + block) * shape_.kv_head_count + head;
            KV *key = keys_.data() + first * BLOCK_TOKENS * head_dim + slot * unit;
            KV *value = values_.data() + first * BLOCK_TOKENS * head_dim + slot / unit * head_dim * unit;
            float *key_head = key_heads + head * head_dim, *value_head = value_heads + head * head_dim;
            if constexpr (std::is_same_v<KV, int8_t>) {
                key_scales_.data()[first * BLOCK_TOKENS + slot] = quantize_head(key_head);
                value_scales_.data()[first * BLOCK_TOKENS + slot] = quantize_head(value_head);
            }
            keep_key(key_head, key);
            keep_value(value_head, value, int(slot % unit));
        }
    }

    void attend_task(int64_t index, const Attention<T> &step, Scratch<T> &scratch) const override {
        const AttentionTask &task = step.tasks[index];
        const Span &span = step.spans[task.span];
        const int64_t head_dim = shape_.head_dim, group = shape_.head_count / shape_.kv_head_count, stride = step.stride;
        const PagedHead<KV> head = paged_head(task, step);
        const int64_t first = (span.row + task.row) * stride + task.kv_head * group * head_dim;
        const int64_t position = span.position + task.row, window = windows_[step.layer];
        // the group's heads are rows of a tile, so its keys are read once
        if (task.row_count == 1) {
            const KeyRun<KV> then = after(index, step);
            return attend_tiles(step, first, head_dim, group, 0, position, window, head, scratch, then);
        }
        for (int64_t member = 0; member < group; ++member)
            attend_tiles(step, first + member * head_dim, stride, task.row_count, 1, position, window, head, scratch, {});
    }

  private:
    int64_t head_count() const { return shape_.layer_count * shape_.block_count * shape_.kv_head_count; } // of all blocks

    // Replaces a head's numbers by whole ones from -127 to 127; returns the scale that makes them the head's again.
    // Not a number, if one of them is infinite or none.
    INLINE Bfloat16 quantize_head(float *head) const {
        constexpr float SHIFT = 3 << 22; // a sum with it is rounded to a whole number
        Vector most = {}, faults = {};
        for (int64_t d = 0; d < shape_.head_dim; d += LANES) {
            const Vector value = load(head + d);
            most = larger(most, larger(value, splat(0) - value));
            faults += value * 0.0f;
        }
        Bfloat16 scales[LANES];
        store(scales, splat(largest_of(most) / 127 + sum_of(faults)));
        const float factor = to_float(scales[0]) > 0 ? 1 / to_float(scales[0]) : 0;
        for (int64_t d = 0; d < shape_.head_dim; d += LANES) store(head + d, (load(head + d) * factor + SHIFT) - SHIFT);
        return scales[0];
    }

    // One position's column of a key block: a unit in each row of 16.
    INLINE void keep_key(const float *from, KV *to) const {
        constexpr int64_t U = UNIT<T>;
        KV narrowed[LANES];
        for (int64_t d = 0; d < shape_.head_dim; d += LANES) {
            store(narrowed, load(from + d));
#pragma GCC unroll 16
            for (int64_t unit = 0; unit < LANES / U; ++unit)
                std::memcpy(to + (d / U + unit) * BLOCK_TOKENS * U, narrowed + unit * U, sizeof(KV) * U);
        }
    }

    // One position's row of a value block; of two in bfloat16, which lie value by value side by side, so the other is read too.
    INLINE void keep_value(const float *from, KV *to, int half) const {
        if constexpr (UNIT<T> == 1) {
            for (int64_t d = 0; d < shape_.head_dim; d += LANES) store(to + d, load(from + d));
            return;
        } else if constexpr (std::is_same_v<KV, int8_t>) {
            for (int64_t d = 0; d < shape_.head_dim; ++d) to[2 * d + half] = int8_t(from[d]);
            return;
        }
        for (int64_t d = 0; d < shape_.head_dim; d += LANES) {
            Bfloat16 narrowed[LANES];
            store(narrowed, load(from + d));
            const IntVector value = load_halves<uint16_t>(narrowed);
            IntVector pairs = load_bits<int32_t>(to + 2 * d);
            pairs = half ? (pairs & 0xffff) | value << 16 : (pairs & int32_t(0xffff0000)) | value;
            store_bits(to + 2 * d, pairs);
        }
    }

    // Blocks of a layer's pool that a task reads.
    PagedHead<KV> paged_head(const AttentionTask &task, const Attention<T> &step) const {
        const int64_t block_size = BLOCK_TOKENS * shape_.head_dim, heads = shape_.kv_head_count;
        const int64_t first = step.layer * shape_.block_count * heads + task.kv_head;
        return {
            keys_.data() + first * block_size, values_.data() + first * block_size, key_scales_.data() + first * BLOCK_TOKENS,
            value_scales_.data() + first * BLOCK_TOKENS, heads * block_size, heads * BLOCK_TOKENS,
            step.tables + step.spans[task.span].table
        };
    }

    static int64_t first_visible(int64_t end, int64_t window) { return window ? std::max<int64_t>(0, end - window) : 0; }

    // First keys of the task that this thread probably takes after `index`; none if it does not
    // stream.
    KeyRun<KV> after(int64_t index, const Attention<T> &step) const {
        const int64_t next = index + step.team_size;
        if (next >= int64_t(step.tasks.size()) || step.tasks[next].row_count != 1) return {};
        const AttentionTask &task = step.tasks[next];
        const int64_t end = step.spans[task.span].position + task.row + 1;
        return {
            paged_head(task, step), first_visible(end, windows_[step.layer]) / BLOCK_TOKENS,
            (end + BLOCK_TOKENS - 1) / BLOCK_TOKENS
        };
    }

    // row_count rows, `stride` values apart in queries and output, of which each is `advance` positions after the one before.
    void attend_tiles(
        const Attention<T> &step, int64_t first, int64_t stride, int64_t row_count, int64_t advance, int64_t position, int64_t window,
        const PagedHead<KV> &head, Scratch<T> &scratch, const KeyRun<KV> &then
    ) const {
        const float scale = 1.0f / std::sqrt(float(shape_.head_dim));
        for (int64_t row = 0; row < row_count; row += ATTENTION_ROWS<T>) {
            int64_t begins[ATTENTION_ROWS<T>], ends[ATTENTION_ROWS<T>];
            for (int64_t r = 0; r < ATTENTION_ROWS<T>; ++r) {
                ends[r] = position + (row + r) * advance + 1;
                begins[r] = first_visible(ends[r], window);
            }
            const int rows = int(std::min<int64_t>(ATTENTION_ROWS<T>, row_count - row));
            const Left<T> *queries = step.queries + first + row * stride;
            Left<T> *out = step.out + first + row * stride;
            if constexpr (IN_TILES<T>) {
                attend_in_tiles(
                    queries, stride, rows, begins, ends, head, shape_.head_dim, scale, out, stride, scratch, then
                );
            } else {
                with_count<ATTENTION_ROWS<T>>(rows, [&]<int R>() {
                    attend<T, KV, R>(
                        queries, stride, begins, ends, head, shape_.head_dim, scale, out, stride, scratch, then
                    );
                });
            }
        }
    }

    Shape shape_;
    std::vector<int64_t> windows_;
    // Zeroed, since blocks are read to their ends with weight 0, so they must be finite; the system provides zeroed
    // pages on first use.
    Buffer<KV> keys_, values_;
    Buffer<Bfloat16> key_scales_, value_scales_; // of each position and head; empty unless KV is int8_t
};

template <class T> std::unique_ptr<AnyPool<T>> open_pool(const Shape &shape) {
    if (shape.kv_bits == 8) return std::make_unique<Pool<T, int8_t>>(shape);
    if constexpr (std::is_same_v<T, float>)
        if (shape.kv_bits == 32) return std::make_unique<Pool<T, float>>(shape);
    return std::make_unique<Pool<T, Bfloat16>>(shape);
}

} // namespace
