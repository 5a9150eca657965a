# pretrain.c: pretraining of language models in C and CUDA. `make help` lists the targets.

# ---- settings: make NAME=value ----
PLATFORM := $(shell uname -s)-$(shell uname -m)
CC     ?= cc
# Instruction set: native, x86-64-v3, or options of the compiler. It determines the vector width
# (llmc/base/vec.h). Apple's clang has no such name for its own processors, and uses their vectors
# anyway.
MARCH  ?= $(if $(filter Darwin-arm64,$(PLATFORM)),,native)
override MARCH := $(foreach word,$(MARCH),$(if $(filter -%,$(word)),,-march=)$(word))
OPT    ?= -O3
MODULES_OPT ?=              # more flags for modules (COMPILED) without kernels (not in KERNEL_ROOMS)
TEST_OPT ?=                 # more flags for the tests themselves
UNITS  ?=                   # 1: compile the modules of a room as one file, for the tests' variants
# Empty: one thread. Apple's clang comes without OpenMP; with Homebrew's libomp:
# OPENMP="-Xpreprocessor -fopenmp -I$(brew --prefix libomp)/include" LDLIBS="-L$(brew --prefix
# libomp)/lib -lomp"
OPENMP ?= $(if $(filter Darwin-%,$(PLATFORM)),,-fopenmp)
V      ?=                   # 1: show the compilers' commands
WERROR ?=                   # -Werror in `make test` and `make lint`
MPI    ?= mpicc             # MPI's compiler, for runs on several ranks, if installed. Empty: without MPI
# Directories of `make run`, and of `make install`, under DESTDIR; they may contain blanks
OUT    ?= out/quickstart
PREFIX ?= /usr/local

# -ffp-contract: in its standard mode the compiler would not turn a*b+c into one instruction.
# No -ffast-math: NaN and infinity must stay visible.
override CFLAGS += -std=gnu11 $(OPT) $(MARCH) -ffp-contract=fast -fno-math-errno -fno-trapping-math \
    $(strip $(OPENMP)) -Wall -Wextra -Werror=switch -Wno-unused-function $(if $(strip $(OPENMP)),,-Wno-unknown-pragmas) \
    $(strip $(WERROR)) -D_GNU_SOURCE -pthread -MMD -MP
override LDLIBS += -lm

comma := ,
quoted = '$(subst ','\'',$(1))'
# Goes before a compiler's command: prints the target instead of the command, which V=1 shows.
quiet = $(if $(strip $(V)),,@$(if $(findstring s,$(firstword -$(MAKEFLAGS))),,echo "  $(firstword $(1))  $@";))

# Libraries for compressed data, if installed: GZIP (ISA-L decompresses .gz faster than zlib), ZSTD
# and SNAPPY. Without one, its files are refused by a message that names the library.
HAVE_ZLIB := $(shell printf '#include <zlib.h>\n' | $(CC) -E - >/dev/null 2>&1 && echo 1)
HAVE_ISAL := $(shell printf '#include <isa-l/igzip_lib.h>\n' | $(CC) -E - >/dev/null 2>&1 && echo 1)
HAVE_ZSTD := $(shell printf '#include <zstd.h>\n' | $(CC) -E - >/dev/null 2>&1 && echo 1)
HAVE_SNAPPY := $(shell printf '#include <snappy-c.h>\n' | $(CC) -E - >/dev/null 2>&1 && echo 1)
COMPRESSION_FLAGS := $(if $(HAVE_ZLIB),-DHAVE_ZLIB) $(if $(HAVE_ISAL),-DHAVE_ISAL) $(if $(HAVE_ZSTD),-DHAVE_ZSTD) $(if $(HAVE_SNAPPY),-DHAVE_SNAPPY)
COMPRESSION_LIBS := $(if $(HAVE_ZLIB),-lz) $(if $(HAVE_ISAL),-lisal) $(if $(HAVE_ZSTD),-lzstd) $(if $(HAVE_SNAPPY),-lsnappy)
override CFLAGS += $(COMPRESSION_FLAGS)
override LDLIBS += $(if $(filter Darwin-%,$(PLATFORM)),,-Wl$(comma)--as-needed) $(COMPRESSION_LIBS)

# Flags that MPI's compiler adds, for Open MPI, MPICH and Intel MPI alike. Only comm_mpi.o and
# group.o see its header.
MPI_SHOW := $(if $(strip $(MPI)),$(shell $(strip $(MPI)) -show 2>/dev/null))
HAVE_MPI := $(if $(MPI_SHOW),$(shell printf '#include <mpi.h>\n' | $(CC) $(filter -I%,$(MPI_SHOW)) -E - >/dev/null 2>&1 && echo 1))
MPI_FLAGS := $(if $(HAVE_MPI),-DHAVE_MPI $(filter -I% -D%,$(MPI_SHOW)))
MPI_LIBS := $(if $(HAVE_MPI),$(filter -L% -l% -Wl$(comma)-rpath% -Wl$(comma)/%,$(MPI_SHOW)))
override LDLIBS += $(MPI_LIBS)

BUILD  ?= build/plain
# Modules are compiled once, into libllmc.a: the part of their header behind
# #ifdef NAME_IMPLEMENTATION.
COMPILED := $(shell grep -sl '_IMPLEMENTATION$$' llmc/*.h llmc/*/*.h)
LIBRARY = $(BUILD)/libllmc.a
HEADERS = $(wildcard llmc/*.h llmc/*/*.h llmc/*/*.cuh)

# A build depends on the compiler and its flags, too: its file `flags` records them, and is out of
# date if they differ. So a newly installed library, or another MARCH, takes effect. Warnings change
# no code.
FLAGS := $(strip $(CC) $(filter-out -Werror,$(CFLAGS)) $(strip $(MODULES_OPT) $(TEST_OPT)) $(MPI_FLAGS) $(LDLIBS))
# `--version` names a program's commit; only the programs depend on it. If git does not answer, for
# root for example, its last answer stays.
PROGRAMS = $(BUILD)/train_gpt2 $(BUILD)/tokenize
COMMIT := $(or $(shell git --git-dir=.git describe --always --dirty 2>/dev/null),$(shell cat $(BUILD)/commit 2>/dev/null))
$(PROGRAMS): override CFLAGS += $(if $(COMMIT),-DGIT_COMMIT='"$(COMMIT)"')
stale = $(if $(findstring <$(2)>,<$(strip $(shell cat $(1) 2>/dev/null))>),,FORCE)
$(BUILD)/flags: TEXT = $(FLAGS)
$(BUILD)/flags: $(call stale,$(BUILD)/flags,$(FLAGS))
$(BUILD)/commit: TEXT = $(COMMIT)
$(BUILD)/commit: $(call stale,$(BUILD)/commit,$(COMMIT))

.DEFAULT_GOAL := train_gpt2
# The code that checks whether the processor has this build's instructions must not use them itself.
BASE_CFLAGS = -std=gnu11 -O2 $(if $(findstring x86_64,$(shell $(CC) -dumpmachine)),-march=x86-64) -Wall -Wextra -D_GNU_SOURCE -MMD -MP

KERNEL_ROOMS = ops bf16 optim parallel tokenizer
# With UNITS=1 the headers that a room's modules share are read once: a library at -O0 takes a third
# of the time. Compiled apart are: what has flags of its own; what a header includes before its own
# declarations; and modules of which tests change a constant. The plain build has no units: so each
# header also compiles alone, and kernels are the same whatever else is in their room.
APART = base/printable base/processor $(addprefix setup/,option_files options options_config options_names options_values) data/documents data/encode_threads tokenizer/bpe_encode tokenizer/bpe_train
# A program may have its own copy of a module: what changes its constants or its table, and tests of
# private functions. Of a unit, which the linker cannot leave out, the second copy is ignored.
second_copy = $(if $(strip $(UNITS)),-Wl$(comma)-z$(comma)muldefs)
ROOMS := $(sort $(foreach file,$(COMPILED),$(word 2,$(subst /, ,$(file)))))
unit_modules = $(filter-out $(APART:%=llmc/%.h),$(filter llmc/$(1)/%,$(COMPILED)))
implementations = $(addprefix -D,$(addsuffix _IMPLEMENTATION,$(shell echo $(basename $(notdir $(1))) | tr a-z A-Z)))
# call UNIT_RULE,BUILD,ROOM
define UNIT_RULE
$(1)/units/$(2).o: $(call unit_modules,$(2)) Makefile $(1)/flags
	@mkdir -p $$(@D)
	$$(call quiet,$$(CC))$$(CC) $$(CFLAGS) $(if $(filter $(2),$(KERNEL_ROOMS)),,$$(strip $$(MODULES_OPT))) -I. $$(call implementations,$(call unit_modules,$(2))) $(patsubst %,-include %,$(call unit_modules,$(2))) -x c -c /dev/null -o $$@

endef
# call test_opt,FILE,ROOM: no flags for copies of modules; where tests compute much, -O1 for -O0.
test_opt = $(if $(filter $(ALONE:%=test_%),$(1)),,$(if $(filter test_$(2),$(VECTOR_TESTS)),$(TEST_OPT:-O0=-O1),$(strip $(TEST_OPT))))
define LIBRARY_RULES
$(foreach room,base data formats report log setup checkpoint generate cost plan run,$(1)/llmc/$(room)/%.o): private OPT = -O2
$(1)/llmc/comm/comm_mpi.o $(1)/llmc/comm/group.o $(1)/units/comm.o: private override CFLAGS += $(MPI_FLAGS)
$(1)/llmc/base/processor.o: private override CFLAGS = $$(BASE_CFLAGS)
$(1)/llmc/%.o: llmc/%.h Makefile $(1)/flags
	@mkdir -p $$(@D)
	$$(call quiet,$$(CC))$$(CC) $$(CFLAGS) $$(if $$(filter $$(KERNEL_ROOMS),$$(notdir $$(*D))),,$$(strip $$(MODULES_OPT))) -I. -x c $$(call implementations,$$<) -c $$< -o $$@
$(foreach room,$(ROOMS),$(call UNIT_RULE,$(1),$(room)))
$(1)/libllmc.a: $(if $(strip $(UNITS)),$(APART:%=$(1)/llmc/%.o) $(ROOMS:%=$(1)/units/%.o),$(COMPILED:llmc/%.h=$(1)/llmc/%.o))
	@rm -f $$@ && $$(AR) rc $$@ $$^
$(1)/test/%.o: private OPT = -O1
$(1)/test/%.o: dev/test/%.c Makefile $(1)/flags
	@mkdir -p $$(@D)
	$$(call quiet,$$(CC))$$(CC) $$(CFLAGS) $$(call test_opt,$$(basename $$(@F)),$$(notdir $$(*D))) -Wno-missing-field-initializers -I. -c $$< -o $$@
endef
$(eval $(call LIBRARY_RULES,$(BUILD)))
include dev/test.mk # the tests
include dev/gpu.mk  # the GPU trainer, its tests and benches; the simulated GPU

.PHONY: train_gpt2cu help run check test tests lint format bench-cpu bench-tokenizer soak clean install uninstall FORCE
.DELETE_ON_ERROR:
.SECONDARY:

train_gpt2: $(BUILD)/train_gpt2  ## the trainer on the CPU
	@rm -f $@ && cp $< $@  # a running program cannot be overwritten

train_gpt2cu: $(GPU_BUILD)/train_gpt2  ## the trainer on an NVIDIA GPU; needs nvcc
	@rm -f $@ && cp $< $@

tokenize: $(BUILD)/tokenize  ## turn text, .jsonl or .parquet files into shards of tokens; train vocabularies
	@rm -f $@ && cp $< $@

help:       ## this list
	@awk -F ':.*## ' '/^[a-z][a-z_0-9.-]*:.*## / { printf "  make %-21s", $$1; at = 28; n = split($$2, word, " "); \
	    for (i = 1; i <= n; i++) { if (at + 1 + length(word[i]) > 79) { printf "\n%28s", ""; at = 28 } \
	        printf " %s", word[i]; at += 1 + length(word[i]) } print "" }' Makefile dev/gpu.mk

# The GPU trainer, if this machine has a GPU and nvcc.
# the model with the lowest loss after the time that it takes (dev/LOG.md, a race for the stories)
RUN_MODEL   = --arch lfm2 --layer-types conv,full --steps 2900
RUN_TRAINER = train_gpt2$(if $(and $(shell command -v $(NVCC) 2>/dev/null),$(shell nvidia-smi -L 2>/dev/null)),cu)
run: $(RUN_TRAINER)  ## train on the built-in stories for a minute or two, without a download, or continue; results in out/quickstart
	./$(RUN_TRAINER) $(RUN_MODEL)$(if $(filter train_gpt2,$(RUN_TRAINER)), --matmul auto) --out $(call quoted,$(OUT)) --resume auto
	@echo "what these numbers mean: README.md, What you just saw"

check:      ## a quick test: each room, a short run, the quick linters; TEST=json: only tests whose names contain it
	@dev/test/run.sh check $(TEST)

test:       ## all tests that need no GPU, of some a part (DRAW=all: all); ends with `N passed, N failed, N skipped`
	@dev/test/run.sh test

print-%:
	@echo $($*)

lint:       ## headers alone as C and C++, includes between rooms, formatting
	@dev/test/lint.sh

format:     ## clang-format all sources in place
	clang-format -i *.c *.cu $(HEADERS) dev/test/*/*.[ch] dev/test/*/*.cu dev/bench/*.c dev/bench/*.cu dev/data/*.[ch]

bench-cpu: $(BUILD)/bench_cpu  ## matmuls, attention and memory-bound operations against this machine's peak
	$(BUILD)/bench_cpu

bench-tokenizer: $(BUILD)/bench_tokenizer  ## speed of encoding text, and of training a vocabulary; TEXT=FILE, GPT2_VOCAB=FILE
	$(BUILD)/bench_tokenizer $(if $(TEXT),--text $(TEXT)) $(if $(GPT2_VOCAB),--vocabulary $(GPT2_VOCAB))

soak:       ## all that `make test` draws from, and long tests: learning down to the floor, kills, fuzzing, forgotten waits
	@dev/test/soak.sh

# One line per source: call COMMAND,compiler and flags,file. clangd reads CUDA sources for the host.
COMMAND = '{"directory": "$(CURDIR)", "file": "$(2)", "command": "$(1) -D_GNU_SOURCE -I. -c $(2)"}'
CLANG_CUDA = clang++ -xcuda --cuda-host-only -std=c++17 -DPRECISION_$(PRECISION) -I$(or $(CUDA_HOME),$(firstword $(wildcard /usr/local/cuda build/cuda-headers)))/include
compile_commands.json: FORCE  ## how each source is compiled, for clangd and other tools
	@{ echo '['; printf '%s\n' $(foreach file,$(wildcard *.c dev/*/*.c dev/test/*/*.c),$(call COMMAND,$(CC) $(CFLAGS),$(file))) \
	    $(foreach file,$(COMPILED),$(call COMMAND,$(CC) $(CFLAGS) -xc -D$(shell echo $(basename $(notdir $(file))) | tr a-z A-Z)_IMPLEMENTATION,$(file))) \
	    $(foreach file,$(wildcard *.cu dev/*/*.cu dev/test/*/*.cu llmc/*/*.cuh),$(call COMMAND,$(CLANG_CUDA),$(file))) \
	    | sed '$$!s/$$/,/'; echo ']'; } >$@

BIN = $(call quoted,$(DESTDIR)$(PREFIX)/bin)
install: train_gpt2 tokenize  ## copy the programs into PREFIX/bin; `make uninstall` removes them
	mkdir -p $(BIN)
	install -m 755 train_gpt2 tokenize $(wildcard train_gpt2cu) $(BIN)

uninstall:
	rm -f $(BIN)/train_gpt2 $(BIN)/train_gpt2cu $(BIN)/tokenize

clean:      ## remove what was built
	rm -rf build train_gpt2 train_gpt2cu tokenize

# Every program is one source file, the headers it includes, and the library.
vpath %.c . dev/test/fuzz dev/bench dev/data
$(BUILD)/flags $(BUILD)/commit $(GPU_BUILD)/flags $(GPU_BUILD)/commit:
	@mkdir -p $(@D)
	@printf '%s\n' $(call quoted,$(TEXT)) >$@
# Its kernels are in the library: the rest of the trainer gains nothing by -O3, and compiles faster.
$(BUILD)/train_gpt2: private OPT = -O2
$(BUILD)/train_gpt2 $(BUILD)/tokenize: $(BUILD)/commit
$(BUILD)/%: %.c $(LIBRARY) Makefile $(BUILD)/flags
	@mkdir -p $(@D)
	$(call quiet,$(CC))$(CC) $(CFLAGS) $(second_copy) -I. $< $(LIBRARY) -o $@ $(LDLIBS)

BUILDS := $(sort $(BUILD) $(wildcard build/* build/sim/* build/cuda/* build/kit/*))
-include $(wildcard $(BUILDS:%=%/*.d) $(BUILDS:%=%/llmc/*.d) $(BUILDS:%=%/llmc/*/*.d) $(BUILDS:%=%/units/*.d) $(BUILDS:%=%/test/*/*.d))
