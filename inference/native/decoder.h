// Weights and steps of one model.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "interface.h"
#include "memory.h"
#include "numbers.h"
#include "pool.h"
#include "products.h"
#include "team.h"

namespace {

constexpr int64_t COPIED_ROWS = 1024;    // embedding rows per task

// Parts of a layer that can be stored in a file and mapped: four buffers per linear layer, the
// norms, the embedding.
enum LinearPart { PACKED, QUANTIZED, SCALES, BIAS, LINEAR_PART_COUNT };

enum LinearKind { QKV, ATTENTION_OUT, GATE_UP, DOWN, LM_HEAD, LINEAR_KIND_COUNT };
enum NormKind { ATTENTION_NORM, MLP_NORM, QUERY_NORM, KEY_NORM, FINAL_NORM, NORM_KIND_COUNT };

template <class T> class Decoder final : public AnyDecoder {
  public:
    explicit Decoder(const Shape &shape)
        : shape_(shape), team_(std::max(1, shape.thread_count)), layers_(shape.layer_count + 1),
          hidden_stride_(round_up(shape.hidden_size, PANEL)),
          mixed_stride_(round_up((shape.head_count + 2 * shape.kv_head_count) * shape.head_dim, PANEL)),
          heads_stride_(padded_inner<T>(shape.head_count * shape.head_dim)),
          gated_stride_(round_up(2 * round_up(shape.intermediate_size, LANES), PANEL) / 2),
          byte_stride_(round_up(std::max({shape.hidden_size, shape.intermediate_size, shape.head_count * shape.head_dim}), GROUP)),
          pool_(open_pool<T>(shape)) {
        const int64_t most_inner = std::max({shape.hidden_size, shape.intermediate_size, shape.head_count * shape.head_dim});
        scratches_ = std::vector<Scratch<T>>(team_.size());
        for (auto &scratch : scratches_) {
            scratch.panel = Buffer<T>(padded_inner<T>(most_inner) * PANEL);
            scratch.products = Buffer<float>(BLOCK_ROWS * PANEL);
            scratch.scores = Buffer<float>(TILE_SIDE * CHUNK_KEYS);
            scratch.probabilities = Buffer<Left<T>>(TILE_SIDE * CHUNK_KEYS);
            scratch.attended = Buffer<float>(TILE_SIDE * shape.head_dim);
        }
    }

    // kind: LinearKind, then NormKind (weight in fp32), then the embedding.
    void set(int64_t layer, int kind, const void *weight, const float *scales, const float *bias) override {
        if (kind < LINEAR_KIND_COUNT) return set_linear(layer, kind, weight, scales, bias);
        if (kind == int(LINEAR_KIND_COUNT) + NORM_KIND_COUNT) return set_embedding(weight);
        set_norm(layer, kind - LINEAR_KIND_COUNT, static_cast<const float *>(weight));
    }

    void forward(const Step &step) override {
        reserve(step.row_count);
        span_of_row_.resize(step.row_count);
        for (int64_t span = 0; span < step.span_count; ++span)
            for (int32_t row = 0; row < step.spans[span].count; ++row) span_of_row_[step.spans[span].row + row] = int32_t(span);
        wanted_spans_.clear();
        for (int64_t index = 0; index < step.wanted_count; ++index) {
            const int32_t row = step.wanted_rows[index];
            const Span &span = step.spans[span_of_row_[row]];
            wanted_spans_.push_back({int32_t(index), 1, span.position + row - span.row, span.table, span.rotary_row + row - span.row});
        }
        plan_attention(all_tasks_, step.spans, step.span_count);
        plan_attention(wanted_tasks_, wanted_spans_.data(), int64_t(wanted_spans_.size()));
        team_.run([&](int index) {
            run(step, index);
            scratches_[index].tiles.release();
        });
    }

    // Returns a packed part and its size in bytes; null if there is none.
    const void *part(int64_t layer, int kind, int64_t *bytes) override {
        const void *found = nullptr;
        with_part(layer, kind, [&](auto &buffer, int64_t) {
            found = buffer.data();
            *bytes = buffer.count() * int64_t(sizeof(*buffer.data()));
        });
        return found;
    }

    // Uses a previously packed part in place; its memory must outlive the decoder. False if the
    // size does not match.
    bool adopt(int64_t layer, int kind, const void *memory, int64_t bytes) override {
        bool fits = false;
        with_part(layer, kind, [&]<class W>(Buffer<W> &buffer, int64_t count) {
            fits = bytes == count * int64_t(sizeof(W));
            if (fits) buffer = Buffer<W>::view(memory, count);
        });
        return fits;
    }

  private:
    struct Layer {
        Linear<T> linears[LINEAR_KIND_COUNT];
        Buffer<float> norms[NORM_KIND_COUNT];
    };

    // weight: (columns, inner) rows of T, or of int8 with one scale per column. bias: (columns,) or null.
    void set_linear(int64_t layer, int kind, const void *weight, const float *scales, const float *bias) {
        Linear<T> &linear = layers_[layer].linears[kind];
        const int64_t sources = set_shape(linear, kind);
        const int64_t columns = linear.panel_count() * PANEL;
        if (bias) linear.bias = Buffer<float>(columns);
        if (scales) {
            linear.scales = Buffer<float>(columns);
            linear.quantized = Buffer<int8_t>(linear.panel_count() * linear.template panel_size<int8_t>());
        } else {
            linear.packed = Buffer<T>(linear.panel_count() * linear.template panel_size<T>());
        }
        team_.run([&](int index) {
            Worker(team_, index).each(linear.panel_count(), [&](int64_t panel) {
                for (int64_t column = panel * PANEL; column < (panel + 1) * PANEL; ++column) {
                    const int64_t source = source_row(kind, column, sources);
                    if (source < 0) continue;
                    if (bias) linear.bias.data()[column] = bias[source];
                    if (scales) linear.scales.data()[column] = scales[source];
                    const auto pack_into = [&]<class W>(const Buffer<W> &buffer) {
                        const W *weights = static_cast<const W *>(weight) + source * linear.inner;
                        W *packed = buffer.data() + panel * linear.template panel_size<W>();
                        for (int64_t index = 0; index < linear.inner; ++index) pack<T>(packed, column, index, weights[index]);
                    };
                    scales ? pack_into(linear.quantized) : pack_into(linear.packed);
                }
            });
        });
        linear.packed.join_pages();
        linear.quantized.join_pages();
    }

    void set_norm(int64_t layer, int kind, const float *weight) {
        const bool of_heads = kind == QUERY_NORM || kind == KEY_NORM;
        const int64_t count = of_heads ? shape_.head_dim : shape_.hidden_size;
        Buffer<float> &norm = layers_[layer].norms[kind];
        norm = Buffer<float>(hidden_stride_ + shape_.head_dim);
        std::memcpy(norm.data(), weight, count * sizeof(float));
    }

    // weight: (V, E) rows of T. Copied, since a mapped file costs a page fault per new token.
    void set_embedding(const void *weight) {
        const int64_t row_size = shape_.hidden_size;
        embedding_ = Buffer<T>(shape_.vocabulary_size * row_size);
        team_.run([&](int index) {
            Worker(team_, index).each((shape_.vocabulary_size + COPIED_ROWS - 1) / COPIED_ROWS, [&](int64_t task) {
                const int64_t first = task * COPIED_ROWS, count = std::min(COPIED_ROWS, shape_.vocabulary_size - first);
                std::memcpy(
                    embedding_.data() + first * row_size, static_cast<const T *>(weight) + first * row_size,
                    count * row_size * sizeof(T)
                );
            });
        });
    }

    // Sets the sizes that follow from the shape.
    int64_t set_shape(Linear<T> &linear, int kind) const {
        const int64_t heads = shape_.head_count * shape_.head_dim, kv_heads = shape_.kv_head_count * shape_.head_dim;
        linear.inner = shape_.hidden_size;
        switch (kind) {
            case QKV: return linear.columns = heads + 2 * kv_heads;
            case ATTENTION_OUT: linear.inner = heads; return linear.columns = shape_.hidden_size;
            case GATE_UP:
                linear.columns = 2 * round_up(shape_.intermediate_size, LANES);
                return 2 * shape_.intermediate_size;
            case DOWN: linear.inner = shape_.intermediate_size; return linear.columns = shape_.hidden_size;
            default: return linear.columns = shape_.vocabulary_size;
        }
    }

    // Calls function(buffer, count) with a part and its number of values, if present. kind:
    // LinearKind * LINEAR_PART_COUNT + LinearPart, then the norms, then the embedding, which
    // belongs to no layer.
    template <class F> void with_part(int64_t layer, int kind, const F &function) {
        constexpr int NORMS = int(LINEAR_KIND_COUNT) * LINEAR_PART_COUNT, EMBEDDING = NORMS + NORM_KIND_COUNT;
        if (kind == EMBEDDING) return function(embedding_, shape_.vocabulary_size * shape_.hidden_size);
        if (kind >= NORMS) return function(layers_[layer].norms[kind - NORMS], hidden_stride_ + shape_.head_dim);
        Linear<T> &linear = layers_[layer].linears[kind / LINEAR_PART_COUNT];
        set_shape(linear, kind / LINEAR_PART_COUNT);
        const int64_t panels = linear.panel_count(), columns = panels * PANEL;
        switch (kind % LINEAR_PART_COUNT) {
            case PACKED: return function(linear.packed, panels * linear.template panel_size<T>());
            case QUANTIZED: return function(linear.quantized, panels * linear.template panel_size<int8_t>());
            case SCALES: return function(linear.scales, columns);
            default: return function(linear.bias, columns);
        }
    }

    // Returns the source row of a packed column; -1 for padding. Gate and up alternate, 16 columns
    // each, so that a tile holds both halves of its outputs.
    int64_t source_row(int kind, int64_t column, int64_t sources) const {
        if (kind != GATE_UP) return column < sources ? column : -1;
        const int64_t output = column / (2 * LANES) * LANES + column % LANES;
        if (output >= shape_.intermediate_size) return -1;
        return column / LANES % 2 == 0 ? output : output + shape_.intermediate_size;
    }

    void reserve(int64_t rows) {
        hidden_.reserve(rows * hidden_stride_);
        normed_.reserve(rows * hidden_stride_);
        mixed_.reserve(rows * mixed_stride_);
        queries_.reserve(rows * heads_stride_);
        attended_.reserve(rows * heads_stride_);
        gated_.reserve(rows * gated_stride_);
        if constexpr (HAS_QUADS) {
            bytes_.reserve(rows * byte_stride_);
            byte_scales_.reserve(rows * byte_stride_ / GROUP);
            byte_offsets_.reserve(rows * byte_stride_ / GROUP);
        }
    }

    int64_t heads_size() const { return shape_.head_count * shape_.head_dim; }

    // KV heads outermost: a prefix shared by several sequences then stays in the cache.
    void plan_attention(std::vector<AttentionTask> &tasks, const Span *spans, int64_t span_count) {
        constexpr int32_t ROWS = 4 * ATTENTION_ROWS<T>; // of one task: enough work to be worth handing out
        tasks.clear();
        for (int32_t head = 0; head < shape_.kv_head_count; ++head)
            for (int32_t span = 0; span < span_count; ++span)
                for (int32_t row = 0; row < spans[span].count; row += ROWS)
                    tasks.push_back({span, head, row, std::min(ROWS, spans[span].count - row)});
    }

    void run(const Step &step, int index) {
        Worker worker(team_, index);
        worker.each_row(step.row_count, [&](int64_t row) { embed(step.token_ids[row], hidden_.data() + row * hidden_stride_); });
        int64_t rows = step.row_count;
        for (int64_t number = 0; number < shape_.layer_count; ++number) {
            const Layer &layer = layers_[number];
            normalize(worker, layer.norms[ATTENTION_NORM], rows);
            product(
                worker, index, normed_.data(), hidden_stride_, rows, layer.linears[QKV],
                [&](int64_t row, int64_t column, auto &sums) INLINE_LAMBDA {
                    for (int c = 0; c < PANEL / LANES; ++c)
                        store(mixed_.data() + row * mixed_stride_ + column + c * LANES, sums[c]);
                }
            );
            worker.each_row(rows, [&](int64_t row) { rotate_and_keep_unit(step, number, row); });
            const bool is_last = number + 1 == shape_.layer_count;
            if (is_last) { // beyond keys and values, the last layer computes only the wanted rows
                worker.each(1, [&](int64_t) { gather_wanted(step); });
                rows = step.wanted_count;
                if (rows == 0) return;
            }
            const Span *spans = is_last ? wanted_spans_.data() : step.spans;
            const auto &tasks = is_last ? wanted_tasks_ : all_tasks_;
            const Attention<T> attention{tasks, spans, step.tables, number, queries_.data(), attended_.data(), heads_stride_, team_.size()};
            worker.each(int64_t(tasks.size()), [&](int64_t task) { pool_->attend_task(task, attention, scratches_[index]); });
            add_product(worker, index, attended_.data(), heads_stride_, rows, layer.linears[ATTENTION_OUT]);
            normalize(worker, layer.norms[MLP_NORM], rows);
            product(
                worker, index, normed_.data(), hidden_stride_, rows, layer.linears[GATE_UP],
                [&](int64_t row, int64_t column, auto &sums) INLINE_LAMBDA {
                    for (int c = 0; c < PANEL / LANES; c += 2) {
                        const Vector gate = sums[c], up = sums[c + 1];
                        store(
                            gated_.data() + row * gated_stride_ + column / 2 + c / 2 * LANES,
                            gate / (1.0f + exponential(splat(0) - gate)) * up
                        );
                    }
                }
            );
            add_product(worker, index, gated_.data(), gated_stride_, rows, layer.linears[DOWN]);
        }
        const Layer &top = layers_[shape_.layer_count];
        normalize(worker, top.norms[FINAL_NORM], rows);
        product(
            worker, index, normed_.data(), hidden_stride_, rows, top.linears[LM_HEAD],
            [&](int64_t row, int64_t column, auto &sums) INLINE_LAMBDA {
                for (int c = 0; c < PANEL / LANES; ++c)
                    store(step.logits + row * step.logits_stride + column + c * LANES, sums[c]);
            }
        );
        worker.each_row(rows, [&](int64_t row) {
            step.best[row] = best_of(step.logits + row * step.logits_stride, shape_.vocabulary_size);
        });
    }

    template <class Keep> INLINE void
    product(Worker &worker, int index, const Left<T> *left, int64_t stride, int64_t rows, const Linear<T> &linear, const Keep &keep) {
        const LeftRows<T> left_rows{left, stride};
        if constexpr (HAS_QUADS) {
            if (linear.quantized.data()) {
                const QuantizedRows quantized{bytes_.data(), byte_scales_.data(), byte_offsets_.data(), byte_stride_};
                worker.each_row(rows, [&](int64_t row) {
                    quantize(left_rows.from(row).values, padded_inner<T>(linear.inner), quantized.from(row));
                });
                return linear_product(worker, quantized, rows, linear, scratches_[index], keep);
            }
        }
        linear_product(worker, left_rows, rows, linear, scratches_[index], keep);
    }

    // hidden += left x weights.
    void add_product(Worker &worker, int index, const Left<T> *left, int64_t stride, int64_t rows, const Linear<T> &linear) {
        product(worker, index, left, stride, rows, linear, [&](int64_t row, int64_t column, auto &sums) INLINE_LAMBDA {
            float *hidden = hidden_.data() + row * hidden_stride_ + column;
            for (int c = 0; c < PANEL / LANES; ++c) store(hidden + c * LANES, load(hidden + c * LANES) + sums[c]);
        });
    }

    void embed(int32_t token_id, float *hidden) const {
        const T *row = embedding_.data() + token_id * shape_.hidden_size;
        for (int64_t e = 0; e < shape_.hidden_size; ++e) hidden[e] = to_float(row[e]);
        for (int64_t e = shape_.hidden_size; e < hidden_stride_; ++e) hidden[e] = 0;
    }

    void normalize(Worker &worker, const Buffer<float> &weight, int64_t rows) {
        worker.each_row(rows, [&](int64_t row) {
            const float *hidden = hidden_.data() + row * hidden_stride_;
            Left<T> *normed = normed_.data() + row * hidden_stride_;
            Vector squares = {};
            for (int64_t e = 0; e < hidden_stride_; e += LANES) squares += load(hidden + e) * load(hidden + e);
            const float scale = 1.0f / std::sqrt(sum_of(squares) / float(shape_.hidden_size) + shape_.rms_norm_eps);
            for (int64_t e = 0; e < hidden_stride_; e += LANES)
                store(normed + e, load(hidden + e) * scale * load(weight.data() + e));
        });
    }

    // All rows of one unit of values: threads must not write to it at the same time.
    void rotate_and_keep_unit(const Step &step, int64_t layer, int64_t row) const {
        const Span &span = step.spans[span_of_row_[row]];
        const int64_t begin = (span.position + row - span.row) % UNIT<T>;
        if (begin != 0 && row > span.row) return; // done with the row before
        const int64_t end = std::min<int64_t>(row + UNIT<T> - begin, span.row + span.count);
        for (; row < end; ++row) rotate_and_keep(step, layer, row);
    }

    // One row's query heads to `queries_`, its key and value heads to their slot of the pool; queries and keys rotated.
    void rotate_and_keep(const Step &step, int64_t number, int64_t row) const {
        const Layer &layer = layers_[number];
        const int64_t head_dim = shape_.head_dim;
        const Span &span = step.spans[span_of_row_[row]];
        const int64_t position = span.position + row - span.row;
        const int64_t block = step.tables[span.table + position / BLOCK_TOKENS], slot = position % BLOCK_TOKENS;
        const int64_t rotary_row = span.rotary_row + row - span.row;
        const float *cosines = shape_.cosines + rotary_row * head_dim, *sines = shape_.sines + rotary_row * head_dim;
        float *mixed = mixed_.data() + row * mixed_stride_;
        float *key_heads = mixed + heads_size(), *value_heads = key_heads + shape_.kv_head_count * head_dim;
        for (int64_t head = 0; head < shape_.head_count; ++head) {
            float *query = mixed + head * head_dim;
            rotate(query, layer.norms[QUERY_NORM], cosines, sines);
            Left<T> *to = queries_.data() + row * heads_stride_ + head * head_dim;
            for (int64_t d = 0; d < head_dim; d += LANES) store(to + d, load(query + d));
        }
        for (int64_t head = 0; head < shape_.kv_head_count; ++head) {
            rotate(key_heads + head * head_dim, layer.norms[KEY_NORM], cosines, sines);
        }
        pool_->keep(number, block, slot, key_heads, value_heads);
    }

    // In place: norm of the head if the model has one, then dimension i turns with i + D/2.
    INLINE void rotate(float *head, const Buffer<float> &norm, const float *cosines, const float *sines) const {
        const int64_t head_dim = shape_.head_dim, half = head_dim / 2;
        if (norm.data()) {
            float squares = 0;
            for (int64_t d = 0; d < head_dim; ++d) squares += head[d] * head[d];
            const float scale = 1.0f / std::sqrt(squares / float(head_dim) + shape_.rms_norm_eps);
            for (int64_t d = 0; d < head_dim; ++d) head[d] *= scale * norm.data()[d];
        }
        int64_t d = 0;
        for (; d + LANES <= half; d += LANES) {
            const Vector low = load(head + d), high = load(head + d + half);
            store(head + d, low * load(cosines + d) - high * load(sines + d));
            store(head + d + half, high * load(cosines + d + half) + low * load(sines + d + half));
        }
        for (; d < half; ++d) {
            const float low = head[d], high = head[d + half];
            head[d] = low * cosines[d] - high * sines[d];
            head[d + half] = high * cosines[d + half] + low * sines[d + half];
        }
    }

    // Moves the wanted rows, which are ascending, to the front in place.
    void gather_wanted(const Step &step) {
        for (int64_t index = 0; index < step.wanted_count; ++index) {
            const int64_t row = step.wanted_rows[index];
            if (row == index) continue;
            std::memcpy(
                hidden_.data() + index * hidden_stride_, hidden_.data() + row * hidden_stride_, hidden_stride_ * sizeof(float)
            );
            std::memcpy(queries_.data() + index * heads_stride_, queries_.data() + row * heads_stride_, heads_stride_ * sizeof(Left<T>));
        }
    }

    Shape shape_;
    Team team_;
    std::vector<Layer> layers_; // the last entry holds the parts above all layers
    std::vector<Scratch<T>> scratches_;
    Buffer<T> embedding_;
    int64_t hidden_stride_, mixed_stride_, heads_stride_, gated_stride_, byte_stride_;
    std::unique_ptr<AnyPool<T>> pool_;
    Buffer<float> hidden_, mixed_;
    Buffer<Left<T>> normed_, queries_, attended_, gated_;
    Buffer<int8_t> bytes_; // left rows of a product with quantized weights
    Buffer<float> byte_scales_;
    Buffer<int32_t> byte_offsets_;
    std::vector<int32_t> span_of_row_;
    std::vector<Span> wanted_spans_;
    std::vector<AttentionTask> all_tasks_, wanted_tasks_;
};

} // namespace
