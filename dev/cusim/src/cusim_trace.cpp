// cusim_trace.cpp -- CUSIM_TRACE=FILE: appends a line of JSON to the file for everything that
// streams do, in the order in which it is done. FLOP and bytes of a matmul follow from its formula:
// every matrix is read or written once.
#include "cusim_internal.h"

#include <cstdarg>
#include <cxxabi.h>

// Returns the trace file; NULL: no trace.
static FILE* trace_file() {
    static FILE* file = nullptr;
    static bool is_open = false;
    const char* path = getenv("CUSIM_TRACE");
    if (!is_open && path && path[0]) {
        file = fopen(path, "a");
        if (!file) {
            cusim_die("CUSIM_TRACE=%s: cannot write", path);
        }
    }
    is_open = true;
    return file;
}

// Writes a line. Flushed, so that programs can write their own lines in between.
void trace_line(const char* format, ...) {
    FILE* file = trace_file();
    if (file) {
        va_list arguments;
        va_start(arguments, format);
        vfprintf(file, format, arguments);
        va_end(arguments);
        fputc('\n', file);
        fflush(file);
    }
}

void trace_kernel(const void* kernel, dim3 grid, dim3 block, size_t dynamic_bytes) {
    if (trace_file()) {
        int status = 0;
        char* name = abi::__cxa_demangle(kernel_name(kernel), nullptr, nullptr, &status);
        trace_line("{\"kernel\":\"%s\",\"grid\":[%u,%u,%u],\"block\":[%u,%u,%u],\"shared\":%zu}",
                   name ? name : kernel_name(kernel), grid.x, grid.y, grid.z, block.x, block.y, block.z,
                   dynamic_bytes);
        free(name);
    }
}
