#pragma once
#include <cusim.h>
