/*
intrinsics.h -- the processor's instructions as functions of C: the only file that includes their
headers.

nvcc's front end reads host code, too, and knows the builtins of its own time only: that of CUDA 12
ends with an error in the immintrin.h of a current gcc, or in arm_neon.h. So it sees neither, and
takes the plain C beside every use. What is compiled once into libllmc.a keeps its instructions.

needs:   nothing
*/
#ifndef LLMC_INTRINSICS_H
#define LLMC_INTRINSICS_H

#if defined(__x86_64__) && !defined(__CUDACC__)
#define X86_INTRINSICS
#include <cpuid.h>
#if defined(__GNUC__) && !defined(__clang__) // gcc 12 warns of its own header in C++ (bug 105593)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#elif defined(__aarch64__) && !defined(__CUDACC__)
#define ARM_INTRINSICS
#include <arm_neon.h>
#endif

#endif
