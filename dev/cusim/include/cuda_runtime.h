// Found before the toolkit's header of this name, which cusim.h includes.
#ifndef CUSIM_CUDA_RUNTIME_H
#define CUSIM_CUDA_RUNTIME_H
#include "cusim.h"
#endif
