// Found before the toolkit's header of this name; cusim.h includes that one in its turn.
#ifndef CUSIM_CUDA_RUNTIME_H
#define CUSIM_CUDA_RUNTIME_H
#include "cusim.h"
#endif
