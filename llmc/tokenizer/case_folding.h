/*
case_folding.h -- Unicode's full case folding: texts that differ in case only become the same
(case_tables.h).
*/
#ifndef LLMC_CASE_FOLDING_H
#define LLMC_CASE_FOLDING_H

#include <stdint.h>

#include "llmc/tokenizer/case_tables.h"

enum { CASE_MOST = 3 }; // characters that one becomes

// Returns the last row that starts at or before c, of rows that ascend; -1: none.
static inline int case_row_(const void* rows, int count, uint32_t c) {
    const uint32_t(*row)[4] = (const uint32_t(*)[4])rows;
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        *(row[middle][0] <= c ? &low : &high) = row[middle][0] <= c ? middle + 1 : middle;
    }
    return low - 1;
}

// Sets `folded` to what a character becomes; returns how many characters.
static inline int case_fold(uint32_t c, uint32_t folded[CASE_MOST]) {
    const int range = case_row_(case_ranges, CASE_RANGES, c),
              string = case_row_(case_strings, CASE_STRINGS, c);
    folded[0] = c;
    if (range >= 0 && c <= (uint32_t)case_ranges[range][1] &&
        (c - (uint32_t)case_ranges[range][0]) % (uint32_t)case_ranges[range][2] == 0) {
        folded[0] = (uint32_t)((int32_t)c + case_ranges[range][3]);
    } else if (string >= 0 && case_strings[string][0] == c) {
        const uint32_t* to = case_strings[string] + 1;
        folded[0] = to[0];
        folded[1] = to[1];
        folded[2] = to[2];
        return to[2] ? 3 : 2;
    }
    return 1;
}

#endif
