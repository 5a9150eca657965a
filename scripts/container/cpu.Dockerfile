# cpu.Dockerfile -- an image of Debian with the CPU trainer, ./tokenize and Open MPI, in which the
# README's commands work as they stand there (dev/doc/building.md). dev/test/container.sh tests its
# steps.
#
#     docker build -f scripts/container/cpu.Dockerfile -t pretrain-cpu .
FROM debian:bookworm
# MARCH=native instead: faster, for processors like the one that builds the image
ARG MARCH=-march=x86-64-v3
# `make` in a container builds for the same processors
ENV MARCH=${MARCH}
# the commit that --version names
ARG COMMIT=
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        gcc libc6-dev make zlib1g-dev libisal-dev libzstd-dev libsnappy-dev libopenmpi-dev openmpi-bin \
        openssh-client ca-certificates curl zstd && \
    rm -rf /var/lib/apt/lists/*
# A container's user is usually root. Its kernel lets no process read another's memory, which Open
# MPI tries and then complains.
ENV OMPI_ALLOW_RUN_AS_ROOT=1
ENV OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ENV OMPI_MCA_btl_vader_single_copy_mechanism=none
WORKDIR /pretrain
COPY . /pretrain
# Any user may write into the directory: --user "$(id -u)" then owns what a run writes.
RUN make -j"$(nproc)" COMMIT="$COMMIT" train_gpt2 tokenize && \
    make COMMIT="$COMMIT" install && \
    chmod -R a+rwX /pretrain
CMD ["bash"]
