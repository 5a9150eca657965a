/*
test_element.h -- finds a tensor by its name, and an element of a tensor by its number, counted over
the layers, wherever they are in memory.
*/
#ifndef LLMC_TEST_ELEMENT_H
#define LLMC_TEST_ELEMENT_H

#include <stddef.h>

#include "dev/test/lib/test.h"
#include "llmc/model/model.h"

// Returns the row with this name.
static inline const TensorRow* row_called(const TensorRow* rows, int count, const char* name) {
    for (int i = 0; i < count; i++) {
        if (strcmp(rows[i].name, name) == 0) {
            return &rows[i];
        }
    }
    EXPECT(0, "no row is called %s", name);
    return rows;
}

// Element k of a tensor in `memory`.
static inline void* test_element(const TensorRow* row, const void* memory, size_t k) {
    const size_t layer = tensor_layer_elements(row);
    return (char*)tensor_at_layer(row, memory, (int)(k / layer)) + k % layer * row->element_bytes;
}

#endif
