// Matrix units of x86 processors (AMX): products of tiles in bfloat16 with sums in fp32.
//
// A tile has up to 16 rows of 64 bytes. One instruction adds to a tile of 16 x 16 sums the product
// of 16 rows of 32 values and of 32 x 16 weights, which lie as the packed layouts have them: pairs
// of rows side by side. A row's sums do not depend on the number of rows computed with it, and the
// unit is nearly as fast as vectors for a single row, so all bfloat16 products use it.

#pragma once

#include <algorithm>
#include <cstdint>

#include "numbers.h" // and the processor's intrinsics

namespace {

constexpr int TILE_SIDE = 16;       // rows of a tile, and sums in a row of it
constexpr int TILE_BYTES = 64;      // of a row
constexpr int TILE_INNER = 32;      // bfloat16 values in a row: inner dimension of one product
constexpr int HALF_INNER = TILE_INNER / 2;
constexpr int BLOCK_ROWS = 2 * TILE_SIDE; // of activations whose sums are held in tiles at once

#if defined(__AMX_BF16__)
constexpr bool HAS_TILES = true;

// Shapes of the eight tiles, as the processor reads them.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t row_counts[16] = {};
    void set(int tile, int rows, int bytes) { row_counts[tile] = uint8_t(rows), row_bytes[tile] = uint16_t(bytes); }
};

// The compiler does not know that loads of tiles read memory.
INLINE void finish_stores() { asm volatile("" ::: "memory"); }

INLINE void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Shapes that a thread has loaded, to load each only once in a row.
class TileState {
  public:
    // For products of `rows` rows, up to 32: sums in tiles 0 to 3, rows in 4 and 5, weights in 6
    // and 7 (and 5 if there are at most 16 rows, which then share tiles 0 to 3).
    void use_for_product(int rows) {
        if (loaded_ == rows) return;
        const int first = std::min(rows, TILE_SIDE), second = rows - first;
        TileShapes shapes;
        for (int tile : {0, 1, 4}) shapes.set(tile, first, TILE_BYTES);
        for (int tile : {2, 3}) shapes.set(tile, second ? second : first, TILE_BYTES);
        shapes.set(5, second ? second : TILE_SIDE, TILE_BYTES);
        for (int tile : {6, 7}) shapes.set(tile, TILE_SIDE, TILE_BYTES);
        load(shapes, rows);
    }

    // For `rows` rows, up to 16: sums in tiles 0 to 3, rows in 4, weights in 6; in 5 and 7 rows and
    // weights of half the inner dimension.
    void use_for_attention(int rows) {
        if (loaded_ == -rows) return;
        TileShapes shapes;
        for (int tile : {0, 1, 2, 3, 4}) shapes.set(tile, rows, TILE_BYTES);
        shapes.set(5, rows, TILE_BYTES / 2);
        shapes.set(6, TILE_SIDE, TILE_BYTES);
        shapes.set(7, TILE_SIDE / 2, TILE_BYTES);
        load(shapes, -rows);
    }

    // Until the next use the processor has no tiles to save when it changes threads.
    void release() {
        if (loaded_) _tile_release();
        loaded_ = 0;
    }

  private:
    void load(const TileShapes &shapes, int name) {
        _tile_loadconfig(&shapes);
        loaded_ = name;
    }
    int loaded_ = 0;
};

#else
constexpr bool HAS_TILES = false;

struct TileState {
    void release() {}
};
#endif

} // namespace
