/*
intrinsics.h -- the processor's instructions as C functions: the only file that includes their
headers.

nvcc's front end also reads host code, and knows only the builtins of its own time: CUDA 12's fails
on the immintrin.h of a current gcc, and on arm_neon.h. So nvcc sees neither, and compiles the plain
C that stands next to every use. Modules compiled once into libllmc.a keep their instructions.
*/
#ifndef LLMC_INTRINSICS_H
#define LLMC_INTRINSICS_H

#if defined(__x86_64__) && !defined(__CUDACC__)
#define X86_INTRINSICS
#include <cpuid.h>
// gcc 12 warns about its own header in C++ (bug 105593)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#ifdef EMULATED_X86 // a header that has newer instructions as C functions (dev/test)
#include EMULATED_X86
#endif
#elif defined(__aarch64__) && !defined(__CUDACC__)
#define ARM_INTRINSICS
#include <arm_neon.h>
#endif

#endif
