/*
former_names.h -- names that options had in earlier versions: command lines, --config files,
checkpoints and logs may still use them.
*/
#ifndef LLMC_FORMER_NAMES_H
#define LLMC_FORMER_NAMES_H

#include <stddef.h>
#include <string.h>

// Returns today's name of the option that was called name[0 .. length); NULL if it is no former
// name.
static inline const char* former_name(const char* name, size_t length) {
    static const char* const names[][2] = {{"products", "matmul"}};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (strlen(names[i][0]) == length && memcmp(names[i][0], name, length) == 0) {
            return names[i][1];
        }
    }
    return NULL;
}

#endif
