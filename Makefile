# pretrain.c: GPT-2 and GPT-3 class pretraining in C and CUDA. `make help` lists the targets.

# ---- settings: make NAME=value ----
CC     ?= cc
ARCH   ?= -march=native     # instruction set: the vectors' width follows it (llmc/vec.h)
OPT    ?= -O3
OPENMP ?= -fopenmp          # empty: one thread
WERROR ?=                   # -Werror in `make test` and `make lint`
OUT    ?= out/quickstart    # directory of `make run`

# Contraction is asked for: a standard mode of the compiler would keep a*b+c from becoming one instruction.
# No -ffast-math: NaN and infinity must be seen.
override CFLAGS += -std=gnu11 $(OPT) $(strip $(ARCH)) -ffp-contract=fast -fno-math-errno -fno-trapping-math \
    $(strip $(OPENMP)) -Wall -Wextra -Wno-unused-function $(if $(strip $(OPENMP)),,-Wno-unknown-pragmas) \
    $(strip $(WERROR)) -D_GNU_SOURCE -MMD -MP
LDLIBS += -lm

BUILD  ?= build/plain
MODULES = $(basename $(notdir $(wildcard dev/test/test_*.c)))
TESTS   = $(MODULES:%=$(BUILD)/%) $(BUILD)/test_gpt2

.PHONY: help run test tests lint format bench-cpu soak clean
.DELETE_ON_ERROR:

train_gpt2: $(BUILD)/train_gpt2
	@rm -f $@ && cp $< $@  # a running program cannot be written over

help:       ## this list
	@sed -n 's/^\([a-z_][a-z_0-9-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

run: train_gpt2  ## train on the built-in stories for a minute or two, no download; results in out/quickstart
	./train_gpt2 --out $(strip $(OUT))

test:       ## everything that needs no GPU; ends with `N passed, N failed, N skipped`
	@dev/test/run.sh

tests: $(TESTS)  ## build the test programs of one variant into BUILD

lint:       ## every header alone as C and as C++, with gcc and clang; formatting
	@dev/test/lint.sh

format:     ## clang-format all sources in place
	clang-format -i *.c llmc/*.h dev/*/*.c dev/test/*.h

bench-cpu: $(BUILD)/bench_cpu  ## matrix products, attention and memory-bound operations against this machine's peak
	$(BUILD)/bench_cpu

soak:       ## long tests: the built-in run at full length against its floor
	@dev/test/soak.sh

clean:      ## remove what was built
	rm -rf build train_gpt2

# Every program is one source file and the headers it includes.
vpath %.c . dev/test dev/bench
$(BUILD)/%: %.c Makefile
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -I. $< -o $@ $(LDLIBS)

-include $(wildcard build/*/*.d)
