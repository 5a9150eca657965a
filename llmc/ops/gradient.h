/*
gradient.h -- whether a backward pass sets a gradient or adds to it.

The first micro-batch of a step sets every gradient of a parameter, the others add to it, so no
gradient has to be cleared.
*/
#ifndef LLMC_GRADIENT_H
#define LLMC_GRADIENT_H

typedef enum { GRADIENT_SET, GRADIENT_ADD } GradientMode;

#endif
