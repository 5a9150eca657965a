/*
amx.h -- the tile registers of Intel's AMX: their shapes, and permission to use them.

A tile has up to 16 rows of 64 bytes. A thread sets the shapes of its eight tiles before it uses
them.
*/
#ifndef LLMC_AMX_H
#define LLMC_AMX_H

#include <stdint.h>

#include "llmc/base/intrinsics.h"

// AMX_COMPILES: the compiler and the system support tiles.
#if defined(X86_INTRINSICS) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define AMX_COMPILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Operand of ldtilecfg. It is constant because gcc does not tell the optimizer that the instruction
// reads it.
typedef struct {
    uint8_t palette, start_row, zeros[14]; // palette 1
    uint16_t row_bytes[16];
    uint8_t rows[16];
} AmxShapes;

#ifdef AMX_COMPILES
// Types of tile elements; the value is the bit of cpuid.
typedef enum { AMX_BF16 = 1 << 22, AMX_INT8 = 1 << 25 } AmxFeature;

#ifndef EMULATED_X86 // which defines it otherwise
// Requests the tiles from the system. True if the processor has them, the system saves them (XCR0)
// and grants them to this process: a kernel before 5.16 does not know the request, and a virtual
// machine may refuse it.
static inline int amx_runs(AmxFeature feature) {
    enum { ARCH_REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, TILE_STATE = 3 << 17, OSXSAVE = 1 << 27 };
    const unsigned wanted = 1u << 24 | (unsigned)feature;
    unsigned eax, ebx, ecx, edx = 0, saved = 0, high;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & OSXSAVE) ||
        !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & wanted) != wanted) {
        return 0;
    }
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    return (saved & TILE_STATE) == TILE_STATE &&
           syscall(SYS_arch_prctl, ARCH_REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif
#endif

#endif
