// Interface between the C functions of the library (library.cpp) and the decoders, one per
// instruction set (decoder.cpp). Declarations only: these files are compiled with different flags.

#pragma once

#include <cstdint>

constexpr int BLOCK_TOKENS = 16; // positions of a KV block; as in kv_blocks.py, checked at load

// Sizes; same fields and order as `_Shape` in decoder.py.
struct Shape {
    int64_t hidden_size, intermediate_size, layer_count, head_count, kv_head_count, head_dim, vocabulary_size;
    int64_t block_count; // KV blocks of the pool
    float rms_norm_eps;
    int32_t thread_count;
    int64_t kv_bits; // of a stored key or value: 32, 16 (bfloat16) or 8 (int8)
    const float *cosines, *sines; // rotation tables; must outlive the decoder
    // attention window of each layer in positions, including the row's own; 0: all
    const int64_t *windows;
};

// Consecutive rows of one sequence: rows `row` to row + count, at positions from `position`; its
// block table starts at `table`. rotary_row: row of the rotation tables for the first row.
struct Span {
    int32_t row, count, position, table, rotary_row;
};

// One step. token_ids (N,); spans cover all rows in order; tables: block ids; wanted_rows (R,)
// ascending: rows whose logits are needed. Outputs: logits (R, logits_stride) fp32; best (R,) first
// token with the largest logit, -1 if a logit of the row is not finite.
struct Step {
    int64_t row_count, span_count, wanted_count;
    const int32_t *token_ids;
    const Span *spans;
    const int32_t *tables;
    const int32_t *wanted_rows;
    float *logits;
    int64_t logits_stride;
    int32_t *best;
};

// Interface independent of the stored type.
class AnyDecoder {
  public:
    virtual ~AnyDecoder() = default;
    virtual void set(int64_t layer, int kind, const void *weight, const float *scales, const float *bias) = 0;
    virtual void forward(const Step &step) = 0;
    virtual const void *part(int64_t layer, int kind, int64_t *bytes) = 0;
    virtual bool adopt(int64_t layer, int kind, const void *memory, int64_t bytes) = 0;
};

// One compilation of decoder.cpp.
struct Kernels {
    AnyDecoder *(*open)(const Shape &shape, bool is_bfloat16);
    int32_t (*best_of)(const float *values, int64_t count);
    void (*shuffle_pieces)(uint32_t seed);
};
