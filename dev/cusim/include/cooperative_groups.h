/*
cooperative_groups.h -- the only part of cooperative groups without another spelling: a barrier over
the whole grid, for kernels launched with cudaLaunchAttributeCooperative. The trainer's kernels do
not use it.
*/
#ifndef CUSIM_COOPERATIVE_GROUPS_H
#define CUSIM_COOPERATIVE_GROUPS_H

#include "cusim.h"

namespace cooperative_groups {

struct grid_group {
    void sync(CUSIM_LOC) const { cusim_grid_sync(CUSIM_L); }
};
inline grid_group this_grid() { return {}; }

} // namespace cooperative_groups

#endif
