/*
test_element.h -- finds an element of a tensor by its number, counted over the layers, wherever they
are in memory.
*/
#ifndef LLMC_TEST_ELEMENT_H
#define LLMC_TEST_ELEMENT_H

#include <stddef.h>

#include "llmc/model/model.h"

// Element k of a tensor in `memory`.
static inline void* test_element(const TensorRow* row, const void* memory, size_t k) {
    const size_t layer = tensor_layer_elements(row);
    return (char*)tensor_at_layer(row, memory, (int)(k / layer)) + k % layer * row->element_bytes;
}

#endif
