/*
host_device.h -- one word for functions that kernels call as well as the host.

needs:   nothing
defines: HOST_DEVICE
*/
#ifndef LLMC_HOST_DEVICE_H
#define LLMC_HOST_DEVICE_H

#ifdef __CUDACC__
#define HOST_DEVICE static inline __host__ __device__
#else
#define HOST_DEVICE static inline
#endif

#endif
