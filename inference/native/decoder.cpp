// The decoder's forward pass for one CPU: paged attention, fused small operators, and matrix products over packed weights.
//
// Compiled on the machine that runs it (`loader.py`), called through a plain C interface, and checked against the torch
// decoder in the tests. Everything is a template over the stored type: float, or bfloat16 with sums in fp32.
//
// Shapes in the comments: N rows (tokens of a step), E hidden size, H heads, H_kv key-value heads, D head size, V vocabulary.
// "Unit": values that one multiplication instruction takes from one row: 2 neighbours in bfloat16, 1 in fp32. Everything that
// stands on the right of a product is stored unit by unit, 16 columns side by side, so that it streams through registers:
//
//   weights  [panel of 64 columns][K / unit][64][unit]
//   keys     [block][H_kv][D / unit][16 positions][unit]      a score tile is query x block, as it lies
//   values   [block][H_kv][16 positions / unit][D][unit]      an output tile is probabilities x block, as it lies
//
// numbers.h, memory.h and team.h know nothing of models; products.h and attention.h compute; decoder.h puts a step together; what
// Python calls is here. One translation unit: everything but that is in an unnamed namespace.

#include <cstdint>

#include "decoder.h"

extern "C" {

// The interface below is what loader.py declares. What `weir_decoder_set` points at is copied.

int32_t weir_kv_block_tokens() { return BLOCK_TOKENS; }

int32_t weir_best_of(const float *values, int64_t count) { return best_of(values, count); } // for tests

void *weir_decoder_open(const Shape *shape, int32_t is_bfloat16) try {
    if (is_bfloat16) return static_cast<AnyDecoder *>(new Decoder<Bfloat16>(*shape));
    return static_cast<AnyDecoder *>(new Decoder<float>(*shape));
} catch (...) {
    return nullptr;
}

void weir_decoder_close(void *decoder) { delete static_cast<AnyDecoder *>(decoder); }

int32_t weir_decoder_set(
    void *decoder, int64_t layer, int32_t kind, const void *weight, const float *scales, const float *bias
) try {
    static_cast<AnyDecoder *>(decoder)->set(layer, kind, weight, scales, bias);
    return 0;
} catch (...) {
    return 1;
}

void weir_decoder_copy_blocks(void *decoder, const int64_t *pairs, int64_t count) {
    static_cast<AnyDecoder *>(decoder)->copy_blocks(pairs, count);
}

// Parts of what was packed: see `with_part` for their kinds. What is adopted is read where it is, and must outlive the decoder.

const void *weir_decoder_part(void *decoder, int64_t layer, int32_t kind, int64_t *bytes) {
    return static_cast<AnyDecoder *>(decoder)->part(layer, kind, bytes);
}

int32_t weir_decoder_adopt(void *decoder, int64_t layer, int32_t kind, const void *memory, int64_t bytes) {
    return static_cast<AnyDecoder *>(decoder)->adopt(layer, kind, memory, bytes) ? 0 : 1;
}

int32_t weir_decoder_forward(void *decoder, const Step *step) try {
    static_cast<AnyDecoder *>(decoder)->forward(*step);
    return 0;
} catch (...) {
    return 1; // out of memory is all that can be thrown
}
}
