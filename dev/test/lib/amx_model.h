/*
amx_model.h -- AMX's tiles in plain C, as Intel's manual describes them.

Kernels that use tiles are compiled with these functions, so that their source is tested on any
machine. A fault of the processor is a failure of the test.
*/
#ifndef DEV_AMX_MODEL_H
#define DEV_AMX_MODEL_H

#include <string.h>

#include "llmc/base/amx.h"
#include "dev/test/lib/test.h"

// The tiles of a thread: 16 rows of 16 times 4 bytes, of which the shapes may have less.
typedef struct {
    const AmxShapes* shapes; // NULL: none are set, and using a tile is a fault
    uint32_t tile[8][16][16];
} AmxModel_;
static _Thread_local AmxModel_ amx_model_;

static inline void amx_model_begin(const AmxShapes* shapes) {
    EXPECT(shapes->palette == 1, "palette %d", shapes->palette);
    for (int t = 0; t < 16; t++) {
        EXPECT(shapes->row_bytes[t] <= (t < 8 ? 64 : 0) && shapes->rows[t] <= (t < 8 ? 16 : 0),
               "tile %d: %d rows of %d bytes", t, shapes->rows[t], shapes->row_bytes[t]);
    }
    memset(&amx_model_, 0, sizeof(amx_model_));
    amx_model_.shapes = shapes;
}
static inline void amx_model_end(void) { amx_model_.shapes = NULL; }

static inline uint32_t (*amx_model_tile(int t))[16] {
    EXPECT(amx_model_.shapes && amx_model_.shapes->rows[t] > 0, "tile %d is used without a shape", t);
    return amx_model_.tile[t];
}
static inline void amx_model_zero(int t) { memset(amx_model_tile(t), 0, sizeof(amx_model_.tile[t])); }
static inline void amx_model_load(int t, const void* base, size_t stride) {
    amx_model_zero(t);
    for (int r = 0; r < amx_model_.shapes->rows[t]; r++) {
        memcpy(amx_model_tile(t)[r], (const char*)base + r * stride, amx_model_.shapes->row_bytes[t]);
    }
}
static inline void amx_model_store(int t, void* base, size_t stride) {
    for (int r = 0; r < amx_model_.shapes->rows[t]; r++) {
        memcpy((char*)base + r * stride, amx_model_tile(t)[r], amx_model_.shapes->row_bytes[t]);
    }
}

// The shapes of a product: to (M, N) += left (M, K) right (K, N), in elements of 4 bytes.
static inline void amx_model_check(int to, int left, int right) {
    const AmxShapes* s = amx_model_.shapes;
    EXPECT(s && s->rows[to] == s->rows[left] && s->row_bytes[left] == 4 * s->rows[right] &&
               s->row_bytes[to] == s->row_bytes[right],
           "tiles %d, %d and %d do not fit", to, left, right);
}

#endif
