# test.mk -- part of the Makefile: the tests' programs, and when each test runs again.

# The tests of a room are one program, test_ROOM. These files are separate programs: collectives has
# its own main(), the others change a constant of a module that other tests use unchanged.
ALONE = collectives bpe_split documents encode_threads attention_small offload
alone_sources = $(wildcard $(foreach name,$(ALONE),dev/test/*/test_$(name).$(1)))
TEST_FILES = % # in these rooms' programs
test_sources = $(filter-out $(call alone_sources,$(1)),$(filter $(TEST_FILES),$(wildcard dev/test/$(2)/test_*.$(1))))
test_rooms = $(sort $(foreach source,$(call test_sources,$(1),*),$(word 3,$(subst /, ,$(source)))))
test_programs = $(addprefix test_,$(call test_rooms,$(1))) $(basename $(notdir $(call alone_sources,$(1))))

TESTS := $(call test_programs,c)
GPU_TESTS := $(call test_programs,cu)
# Rooms that use vectors (llmc/base/vec.h): they are tested for other processors, too.
VECTOR_TESTS = $(addprefix test_,base ops bf16 optim tokenizer run)
TEST_INPUTS := $(wildcard dev/ref/fixtures/* dev/ref/fixtures/*/* dev/test/fuzz/corpus/*/*)

# ---- programs ----

# A test of private functions has its own copy of their module: of a unit, which the linker cannot
# leave out, the second one is ignored.
second_copy = $(if $(strip $(UNITS)),-Wl$(comma)-z$(comma)muldefs)
# call TEST_PROGRAM,NAME,SOURCES
define TEST_PROGRAM
$(BUILD)/$(1): $(patsubst dev/%.c,$(BUILD)/%.o,$(2) $(if $(filter test_collectives,$(1)),,dev/test/lib/runner.c)) $(LIBRARY)
	$$(call quiet,$$(CC))$$(CC) $$(CFLAGS) $$(second_copy) $$(filter %.o %.a,$$^) -o $$@ $$(LDLIBS)
endef
$(foreach room,$(call test_rooms,c),$(eval $(call TEST_PROGRAM,test_$(room),$(call test_sources,c,$(room)))))
$(foreach source,$(call alone_sources,c),$(eval $(call TEST_PROGRAM,$(basename $(notdir $(source))),$(source))))

tests: $(TESTS:%=$(BUILD)/%)  ## build the test programs of one variant into BUILD

# ---- runs: the file X.ok means that X has passed since X or its inputs last changed ----

# With WORDS a program runs the tests whose names contain one of them.
WORDS =
run_test = @dev/test/run_one.sh $@
%.ok: % $(TEST_INPUTS)
	$(run_test) $< $(WORDS)

# The whole model: a sanitizer, and other vectors, run each operation (composition) and the frozen
# parameters, whose memory is laid out otherwise.
build/asan/test_run.ok build/avx2/test_run.ok: private WORDS = composition freeze mup -coordinates

# `make check` leaves out what takes longest.
build/check/test_run.ok: private WORDS = composition freeze
build/check/test_checkpoint.ok: private WORDS = -parts_e -faults

# Emulated instructions (dev/test/lib/emulated_x86.h): modules and tests that use them, the rest of
# the library from the plain build; processors that have fewer.
EMULATED_OPS = activation cross_entropy delta_rule gated_norm heads matmul norm q8 short_conv
EMULATED_MODULES = $(filter llmc/bf16/% $(EMULATED_OPS:%=llmc/ops/%.h) %/q8_amx.h %/bpe_encode.h,$(COMPILED))
EMULATED_TEST_FILES = dev/test/bf16/% $(EMULATED_OPS:%=dev/test/ops/test_%.c) %/test_vec.c %/test_bpe_encode.c
$(TESTS:%=build/avx512/%): build/plain/libllmc.a
build/avx512/test_bf16.znver4.ok: private WORDS = mat mlp # which ask for the fastest kernel
define PROCESSOR_RULES
build/avx512/%.$(1).ok: build/avx512/% $(TEST_INPUTS)
	$$(run_test) env EMULATED=$(1) $$< $$(WORDS)
endef
$(foreach processor,znver4 icelake,$(eval $(call PROCESSOR_RULES,$(processor))))

PARTS = 1of4 2of4 3of4 4of4

# A trainer that counts what it allocates beside its plan.
ALLOCATORS = malloc calloc realloc posix_memalign free memory_check $(addprefix memory_,take take_unset allocate allocate_unset)
$(BUILD)/train_allocations: train_gpt2.c dev/test/lib/allocations.c $(LIBRARY) Makefile $(BUILD)/flags
	$(call quiet,$(CC))$(CC) $(CFLAGS) -rdynamic -I. train_gpt2.c dev/test/lib/allocations.c $(LIBRARY) -o $@ $(ALLOCATORS:%=-Wl,--wrap=%) $(LDLIBS)
$(BUILD)/train_allocations: private OPT = -O0

# Scripts that start programs; cli_NAME is dev/test/cli/test_NAME.sh.
CLI = dev/test/cli/test_%.sh $(wildcard dev/test/lib/*.sh dev/test/lib/fault.c dev/test/lib/mpi_stand_in.c scripts/* scripts/*/*)
$(BUILD)/cli_%.ok: $(CLI) $(BUILD)/train_gpt2
	$(run_test) $< $(BUILD)/train_gpt2
$(BUILD)/cli_ranks.ok $(PARTS:%=$(BUILD)/cli_ranks.%.ok): $(BUILD)/test_collectives
$(BUILD)/cli_answers.ok: $(BUILD)/tokenize
$(BUILD)/cli_allocations.ok: $(subst %,allocations,$(CLI)) dev/test/lib/allocations.c $(BUILD)/train_allocations
	$(run_test) $< $(BUILD)/train_allocations
$(BUILD)/cli_allocations.short.ok: $(subst %,allocations,$(CLI)) dev/test/lib/allocations.c $(BUILD)/train_allocations
	$(run_test) $< $(BUILD)/train_allocations short
# X.1of4.ok is the first quarter of the script's cases.
define PART_RULES
$(BUILD)/cli_%.$(1).ok: $(CLI) $(BUILD)/train_gpt2
	$$(run_test) $$< $(BUILD)/train_gpt2 --part $(subst of,/,$(1))
endef
$(foreach part,$(PARTS),$(eval $(call PART_RULES,$(part))))
$(BUILD)/cli_tokenize.ok: $(subst %,tokenize,$(CLI)) $(BUILD)/tokenize
	$(run_test) $< $(BUILD)/tokenize
build/scripts/%.ok: $(CLI) Makefile dev/gpu.mk dev/test.mk
	$(run_test) $<

SOURCES = $(HEADERS) $(wildcard *.c *.cu dev/*/*.[ch] dev/*/*.cu dev/*/*/*.[ch] dev/*/*/*.cu dev/*/*.sh dev/*/*/*.sh)
build/lint.ok: $(SOURCES) $(wildcard dev/test/lint* llmc/*/README.md)
	$(run_test) dev/test/lint.sh
build/lint_quick.ok: $(SOURCES) $(wildcard dev/test/lint* llmc/*/README.md)
	$(run_test) dev/test/lint.sh quick
$(BUILD)/one_run.ok: $(BUILD)/train_gpt2
	$(run_test) $< --layers 1 --channels 16 --heads 2 --seq-len 16 --batch 2 --steps 2

# The simulated GPU: sanitizers run in the regular order of threads, except ThreadSanitizer. It
# remembers four accesses of each 8 bytes; in a regular order it would overwrite the same ones every
# time, and miss the same races. Plain builds run in the orders that show most, with lazy streams,
# and with random ones, because some forgotten waits between streams show only there. X.ORDER.ok is
# X in that order.
build/sim/tsan/%.ok build/sim/BF16-tsan/%.ok: export CUSIM_ORDER = random
ORDERS = down random greedy
in_order = env CUSIM_ORDER=$(1) CUSIM_STREAMS=$(if $(filter random,$(1)),random,lazy)
define ORDER_RULES
build/sim/%.$(1).ok: build/sim/% $(TEST_INPUTS)
	$$(run_test) $$(call in_order,$(1)) $$<
endef
$(foreach order,$(ORDERS),$(eval $(call ORDER_RULES,$(order))))

# The whole model: sanitizers see each operation.
build/sim/BF16-asan/test_gpt2.ok build/sim/BF16-tsan/test_gpt2.ok build/sim/BF16-msan/test_gpt2.ok: private WORDS = composition

SIM_TRAINER = build/sim/$(1)/train_gpt2cu build/plain/train_gpt2
build/sim/cli_sim.ok: $(subst %,sim,$(CLI)) $(call SIM_TRAINER,FP32)
	$(run_test) $<
build/sim/cli_generate.ok: $(subst %,generate,$(CLI)) $(call SIM_TRAINER,FP32)
	$(run_test) $< build/plain/train_gpt2 build/sim/FP32/train_gpt2cu
build/sim/%/cli_families.ok: $(subst %,families,$(CLI)) build/sim/%/train_gpt2cu
	$(run_test) $< build/sim/$*/train_gpt2cu
build/sim/%/cli_qk_clip.ok: $(subst %,qk_clip,$(CLI)) build/sim/%/train_gpt2cu build/plain/train_gpt2
	$(run_test) $< build/sim/$*/train_gpt2cu
build/sim/cli_dropout.ok: $(subst %,dropout,$(CLI)) $(call SIM_TRAINER,FP32)
	$(run_test) $< build/sim/FP32/train_gpt2cu
build/sim/cli_ranks.ok $(PARTS:%=build/sim/cli_ranks.%.ok): build/sim/plain/test_collectives
define SIM_RANKS_RULES
build/sim/cli_$(1).ok: $(subst %,$(1),$(CLI)) $(call SIM_TRAINER,BF16)
	$$(run_test) $$< build/sim/BF16/train_gpt2cu
endef
define SIM_PART_RULES
build/sim/cli_$(1).$(2).ok: $(subst %,$(1),$(CLI)) $(call SIM_TRAINER,BF16)
	$$(run_test) $$< build/sim/BF16/train_gpt2cu --part $(subst of,/,$(2))
endef
$(foreach name,ranks experts pipeline,$(eval $(call SIM_RANKS_RULES,$(name))))
$(foreach name,ranks pipeline,$(foreach part,$(PARTS),$(eval $(call SIM_PART_RULES,$(name),$(part)))))
BENCHES = $(wildcard dev/bench/*)
build/sim/cli_kit.ok: $(subst %,kit,$(CLI)) $(BENCHES) $(call SIM_TRAINER,FP32) $(call SIM_TRAINER,BF16) build/sim/FP32-plain/test_gpt2 \
    build/sim/bench_group build/sim/plain/test_gpu build/sim/plain/test_collectives
	$(run_test) $<
build/sim/cli_multi_gpu.ok build/sim/cli_roofline.ok build/sim/cli_scaling.ok: build/sim/cli_%.ok: $(CLI) $(BENCHES) \
    $(call SIM_TRAINER,BF16) $(call SIM_TRAINER,FP32)
	$(run_test) $< build/sim/BF16/train_gpt2cu
# Relations between drawn runs (dev/test/crossings), for a minute of wall time; the commit draws.
CROSSINGS = $(wildcard dev/test/crossings/*.c)
$(BUILD)/crossings: $(patsubst dev/%.c,$(BUILD)/%.o,$(CROSSINGS)) $(LIBRARY)
	$(call quiet,$(CC))$(CC) $(CFLAGS) $(second_copy) $(filter %.o %.a,$^) -o $@ $(LDLIBS)
$(BUILD)/crossings.ok: $(BUILD)/crossings $(BUILD)/train_gpt2 $(BUILD)/tokenize dev/test/lib/mpi_stand_in.c
	$(run_test) $< --trainer $(BUILD)/train_gpt2 --tokenize $(BUILD)/tokenize --seconds 60 --seed $(or $(CROSSINGS_SEED),1)
# Tests of the simulated GPU itself, without and with a sanitizer; they build their own programs.
define CUSIM_RULES
build/sim/cusim.$(1).ok: $(wildcard dev/cusim/test/*) build/sim/plain.base build/sim/$(1).base
	$$(run_test) dev/cusim/test/run.sh $(1)
endef
$(foreach mode,asan tsan msan,$(eval $(call CUSIM_RULES,$(mode))))

NVCC_SOURCES = train_gpt2.cu $(HEADERS) dev/test/nvcc.sh
build/nvcc/bf16.ok: $(NVCC_SOURCES)
	$(run_test) dev/test/nvcc.sh
build/nvcc/all.ok: $(NVCC_SOURCES)
	$(run_test) dev/test/nvcc.sh all
build/nvcc/cudnn.ok: $(NVCC_SOURCES) build/plain/libllmc.a
	$(run_test) dev/test/nvcc.sh cudnn
