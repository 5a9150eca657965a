# gpu.mk -- part of the Makefile: the GPU trainer, its tests and benches, and the simulated GPU.

# ---- settings: make NAME=value ----
NVCC   ?= nvcc              # compiler of CUDA 12 or 13
NVCCFLAGS ?=                # more flags for it: NVCCFLAGS='-ccbin g++-12' chooses the compiler of host code
ARCH   ?=                   # GPU architecture, such as sm_90a; empty: that of this machine's GPU
PRECISION ?= BF16           # BF16, FP16 or FP32: type of the GPU trainer's weights and activations
USE_CUDNN ?=                # 1: attention by cuDNN 9; needs its headers, those of cudnn-frontend, and NVRTC
CUDNN_FRONTEND ?= build/cudnn-frontend/include
NCCL   ?= -lnccl            # for several ranks, if nvcc has nccl.h. Empty: without NCCL
KIT    ?=                   # contents of `make gpu-kit` (dev/bench/gpu_kit.sh); empty: everything
TOY    ?=                   # 1: a kit of the simulated GPU

override PRECISION := $(shell echo '$(strip $(PRECISION))' | tr a-z A-Z)
ifeq ($(filter BF16 FP16 FP32,$(PRECISION)),)
$(error PRECISION=$(PRECISION): wanted BF16, FP16 or FP32)
endif

# Without a GPU, the code is compiled for Hopper. The path of each object has its architecture and
# precision.
GPU_ARCH := $(patsubst sm_90,sm_90a,$(strip $(or $(strip $(ARCH)),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader \
    2>/dev/null | head -n 1 | sed -n 's/^\([0-9]*\)\.\([0-9]*\)$$/sm_\1\2/p'),sm_90a)))
GPU_BUILD = build/cuda/$(GPU_ARCH)-$(PRECISION)
# The option -arch=sm_90a would compile once more, for GPUs without the instructions of sm_90a.
GPU_CODE := $(if $(filter %a,$(GPU_ARCH)),-gencode arch=$(GPU_ARCH:sm_%=compute_%)$(comma)code=$(GPU_ARCH),-arch=$(GPU_ARCH))
override NVCCFLAGS += -std=c++17 -O3 $(GPU_CODE) -DGPU_SM=$(shell echo '$(GPU_ARCH)' | tr -dc 0-9) -DPRECISION_$(PRECISION) -D_GNU_SOURCE -MMD -MP \
    -diag-suppress 1675 -Xcompiler "$(MARCH) $(strip $(OPENMP)) -pthread -ffp-contract=fast -Wall -Wno-unknown-pragmas" \
    $(if $(strip $(WERROR)),-Werror all-warnings)
NVCC_HOME := $(patsubst %/bin/,%,$(dir $(realpath $(shell command -v $(NVCC)))))
HAVE_NCCL := $(if $(and $(strip $(NCCL)),$(NVCC_HOME)),$(shell printf '#include <nccl.h>\n' | $(CC) -I$(NVCC_HOME)/include -E - >/dev/null 2>&1 && echo 1))
override NVCCFLAGS += $(if $(HAVE_NCCL),-DHAVE_NCCL)
GPU_LIBS = -lcublasLt $(if $(HAVE_NCCL),-L$(NVCC_HOME)/lib $(strip $(NCCL))) $(COMPRESSION_LIBS) $(patsubst -Wl$(comma)%,-Xlinker %,$(MPI_LIBS))
ifeq ($(strip $(USE_CUDNN)),1)
ifeq ($(wildcard $(CUDNN_FRONTEND)/cudnn_frontend.h),)
$(error USE_CUDNN: no cudnn_frontend.h in $(CUDNN_FRONTEND): scripts/install_deps.sh --cudnn, or set CUDNN_FRONTEND)
endif
ifneq ($(shell echo '\#include <cudnn.h>' | $(NVCC) -E -x cu - >/dev/null 2>&1 || echo missing),)
$(error USE_CUDNN: nvcc finds no cudnn.h: install cudnn9-cuda-12 or cudnn9-cuda-13 from NVIDIA's package repository)
endif
GPU_BUILD := $(GPU_BUILD)-cudnn
override NVCCFLAGS += -DUSE_CUDNN -isystem $(CUDNN_FRONTEND)
GPU_LIBS += -lcudnn -lnvrtc
endif
GPU_FLAGS := $(strip $(NVCC) $(filter-out -Werror all-warnings,$(NVCCFLAGS)) $(MPI_FLAGS) $(GPU_LIBS))
$(GPU_BUILD)/train_gpt2: override NVCCFLAGS += $(if $(COMMIT),-DGIT_COMMIT='"$(COMMIT)"')
$(GPU_BUILD)/flags: TEXT = $(GPU_FLAGS)
$(GPU_BUILD)/flags: $(call stale,$(GPU_BUILD)/flags,$(GPU_FLAGS))
$(GPU_BUILD)/commit: TEXT = $(COMMIT)
$(GPU_BUILD)/commit: $(call stale,$(GPU_BUILD)/commit,$(COMMIT))

.PHONY: sim bench gpu-kit test-gpu gpu-tests no-nvcc

# Everything for a GPU is compiled after this file: so a missing nvcc ends make at once, and not
# after the C files.
ifeq ($(shell command -v $(firstword $(NVCC)) 2>/dev/null),)
$(GPU_BUILD)/flags: no-nvcc
endif
no-nvcc:
	@{ echo "error: no $(firstword $(NVCC)) here; wanted the CUDA toolkit, 12 or 13:"; \
	    echo "    sudo apt install nvidia-cuda-toolkit      Debian, Ubuntu; newer ones: https://developer.nvidia.com/cuda-downloads"; \
	    echo "    make $(or $(firstword $(MAKECMDGOALS)),train_gpt2cu) NVCC=/usr/local/cuda/bin/nvcc      if it is installed, but not in PATH"; \
	    echo "Without a GPU, \`make sim\` builds the same trainer for a simulated one, which only tests and plans"; } >&2; exit 1

# ---- targets ----

sim: build/sim/$(PRECISION)/train_gpt2cu  ## the GPU trainer on the simulated GPU: build/sim/PRECISION/train_gpt2cu

test-gpu: $(GPU_TESTS:%=$(GPU_BUILD)/%) $(GPU_BUILD)/test_gpt2  ## the tests of the GPU trainer, on a GPU
	@set -e; for test in $^; do $$test; done
gpu-tests: $(GPU_TESTS:%=$(GPU_BUILD)/%)

bench: $(GPU_BUILD)/bench_gpu  ## every kernel and matmul of 124M and 1558M on a GPU, against its peak
	$(GPU_BUILD)/bench_gpu --model d12 --batch 64
	$(GPU_BUILD)/bench_gpu --model d48 --batch 16

gpu-kit:    ## build/gpu_kit.tar.xz, to measure a GPU on a machine without a compiler
	@KIT='$(strip $(KIT))' TOY='$(strip $(TOY))' NVCC='$(strip $(NVCC))' dev/bench/gpu_kit.sh

# ---- rules ----

$(eval $(call LIBRARY_RULES,$(GPU_BUILD)))
vpath %.cu . dev/bench
$(GPU_BUILD)/train_gpt2: $(GPU_BUILD)/commit
link_gpu = $(call quiet,$(NVCC))$(NVCC) $(NVCCFLAGS) $(filter %.o %.a,$^) -o $@ $(GPU_LIBS)
$(GPU_BUILD)/test/%.cu.o: dev/test/%.cu Makefile $(GPU_BUILD)/flags
	@mkdir -p $(@D)
	$(call quiet,$(NVCC))$(NVCC) $(NVCCFLAGS) -I. -c $< -o $@
$(GPU_BUILD)/test_gpt2.o: test_gpt2.cu Makefile $(GPU_BUILD)/flags
	$(call quiet,$(NVCC))$(NVCC) $(NVCCFLAGS) -I. -c $< -o $@
$(GPU_BUILD)/test_gpt2: $(GPU_BUILD)/test_gpt2.o $(GPU_BUILD)/test/lib/cpu_trainer.o $(GPU_BUILD)/test/lib/runner.o $(GPU_BUILD)/libllmc.a
	$(link_gpu)
$(GPU_BUILD)/%: %.cu $(GPU_BUILD)/libllmc.a Makefile $(GPU_BUILD)/flags
	@mkdir -p $(@D)
	$(call quiet,$(NVCC))$(NVCC) $(NVCCFLAGS) -I. $< $(GPU_BUILD)/libllmc.a -o $@ $(GPU_LIBS)

# The simulated GPU (dev/cusim): CUDA sources compiled by the C++ compiler.
# build/sim/MODE/test_ROOM, and the trainer and its test by precision:
# build/sim/PRECISION/train_gpt2cu, build/sim/PRECISION-MODE/test_gpt2.
SIM_MODES = plain asan tsan msan
# The library of C modules that all modes but msan link: one thread, and no sanitizer, because the
# modules have tests of their own.
SERIAL = OPENMP= OPT=-O2 UNITS=1
SIM_BUILD = SIM_LIBS='$(COMPRESSION_LIBS) $(MPI_LIBS)' dev/cusim/build.sh
run_once = CUSIM_FLAGS=-O1 # two thirds of the time to compile, and these tests take little to run
SIM_SOURCES = $(HEADERS) $(wildcard train_gpt2.c dev/cusim/include/* dev/cusim/src/* dev/test/lib/*) dev/cusim/build.sh
define SIM_RULES
# Objects that all programs of a mode link: .done marks that they are built, .base when they last
# changed.
build/sim/$(1).done: $(SIM_SOURCES) $(if $(filter asan tsan,$(1)),build/sim/plain.done)
	+dev/cusim/build.sh $(1) build/sim/$(1).base && touch $$@
build/sim/$(1).base: build/sim/$(1).done
	@:
build/sim/$(1)/test/%.o: dev/test/%.cu | build/sim/$(1).done
	$(if $(filter plain,$(1)),$(run_once) )$(SIM_BUILD) $$< $(1) $$@
build/sim/$(1)/units/%.o: build/sim/units/%.cu | build/sim/$(1).done
	$(if $(filter plain,$(1)),$(run_once) )$(SIM_BUILD) $$< $(1) $$@
build/sim/%-$(1)/test_gpt2.o: test_gpt2.cu | build/sim/$(1).done
	CUSIM_FLAGS=-DPRECISION_$$* $(SIM_BUILD) $$< $(1) $$@
build/sim/%-$(1)/test_gpt2: build/sim/%-$(1)/test_gpt2.o build/sim/$(1).base
	$(SIM_BUILD) $$< $(1) $$@ dev/test/lib/cpu_trainer.c dev/test/lib/runner.c
# sim-MODE: the tests of a mode; the whole model in BF16, in plain mode also in FP32.
sim-$(1): $(GPU_TESTS:%=build/sim/$(1)/%) $(patsubst %,build/sim/%-$(1)/test_gpt2,BF16 $(if $(filter plain,$(1)),FP32))
endef
$(foreach mode,$(SIM_MODES),$(eval $(call SIM_RULES,$(mode))))
build/sim/bench_group: dev/bench/bench_group.cu build/sim/plain.base
	CUSIM_FLAGS=-DPRECISION_BF16 $(SIM_BUILD) $< plain $@
build/sim/%/train_gpt2cu: train_gpt2.cu build/sim/plain.base
	CUSIM_FLAGS=-DPRECISION_$* $(SIM_BUILD) $< plain $@

# The tests of a room are one program (dev/test.mk), on the GPU and on the simulated one. There it is
# compiled as one unit, which reads headers and makes kernels once: a namespace for each file, after
# all their headers. A program of one file, and a file that defines something for a header, are
# compiled as they are.
SET_HEADERS := $(shell awk 'FNR == 1 { sets = 0 } /^\#define/ { sets = 1 } /^\#include/ && sets { print FILENAME; nextfile }' $(wildcard dev/test/*/*.cu) /dev/null)
united = $(if $(word 2,$(1)),$(filter-out $(SET_HEADERS),$(1)))
sim_objects = $(if $(call united,$(2)),units/$(1).o) $(patsubst dev/%.cu,%.o,$(filter-out $(call united,$(2)),$(2)))
# call GPU_TEST_PROGRAM,NAME,SOURCES
define GPU_TEST_PROGRAM
$(GPU_BUILD)/$(1): $(2:dev/%=$(GPU_BUILD)/%.o) $(if $(filter test_collectives,$(1)),,$(GPU_BUILD)/test/lib/runner.o) $(GPU_BUILD)/libllmc.a
	$$(link_gpu)
build/sim/units/$(1).cu: $(call united,$(2))
	@mkdir -p $$(@D)
	@{ grep -h '^#include' $$^ | awk '!seen[$$$$0]++'; for file in $$^; do \
	    printf 'namespace %s {\n#include "%s"\n}\n' "$$$$(basename $$$$file .cu)" $$$$file; done; } >$$@
$(foreach mode,$(SIM_MODES),$(call SIM_TEST_PROGRAM,$(1),$(2),$(mode)))
endef
define SIM_TEST_PROGRAM
build/sim/$(3)/$(1): $(addprefix build/sim/$(3)/,$(call sim_objects,$(1),$(2))) build/sim/$(3).base
	$$(SIM_BUILD) $$< $(3) $$@ $$(wordlist 2,99,$$(filter %.o,$$^)) $(if $(filter test_collectives,$(1)),,dev/test/lib/runner.c)

endef
$(foreach room,$(call test_rooms,cu),$(eval $(call GPU_TEST_PROGRAM,test_$(room),$(call test_sources,cu,$(room)))))
$(foreach source,$(call alone_sources,cu),$(eval $(call GPU_TEST_PROGRAM,$(basename $(notdir $(source))),$(source))))
