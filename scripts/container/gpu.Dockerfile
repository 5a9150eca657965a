# gpu.Dockerfile -- NVIDIA's image of the CUDA toolkit with both trainers, ./tokenize, NCCL and Open
# MPI (dev/doc/building.md). Not tested: nobody has built it yet.
#
#     docker build -f scripts/container/gpu.Dockerfile -t pretrain-gpu .
#     docker run --rm -it --gpus all --ipc host -v "$PWD/out:/pretrain/out" pretrain-gpu
#
# Its toolkit has nvcc, cuBLASLt and NCCL.
ARG CUDA=12.6.3
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04
# architecture of the GPUs: sm_80 for A100, sm_89 for RTX 4090 and L40S, sm_90a for H100 and H200,
# sm_100 for B200 (with CUDA=13.0.1)
ARG ARCH=sm_90a
# type of the weights and activations: BF16, FP16 or FP32
ARG PRECISION=BF16
# MARCH=native instead: faster, for processors like the one that builds the image
ARG MARCH=-march=x86-64-v3
# `make` in a container builds the same
ENV ARCH=${ARCH}
ENV PRECISION=${PRECISION}
ENV MARCH=${MARCH}
# the commit that --version names
ARG COMMIT=
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        gcc g++ make zlib1g-dev libisal-dev libzstd-dev libsnappy-dev libopenmpi-dev openmpi-bin \
        openssh-client ca-certificates curl zstd && \
    rm -rf /var/lib/apt/lists/*
# as in cpu.Dockerfile
ENV OMPI_ALLOW_RUN_AS_ROOT=1
ENV OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ENV OMPI_MCA_btl_vader_single_copy_mechanism=none
WORKDIR /pretrain
COPY . /pretrain
RUN make -j"$(nproc)" COMMIT="$COMMIT" train_gpt2 train_gpt2cu tokenize && \
    make COMMIT="$COMMIT" install && \
    chmod -R a+rwX /pretrain
CMD ["bash"]
