// test_checkpoint.c -- a checkpoint restores everything that was saved; it is complete or absent,
// whatever fails at any time; --keep removes the right ones and nothing else; a damaged one is
// reported, and the one before it is used.
//
//     test_checkpoint --save_checkpoint DIR STEP VALUE    saves a model, while calls fail
#define CHECKPOINT_LOCK_WAIT_S 0.2
#define DIRECTORY_IMPLEMENTATION

#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "llmc/base/float16.h"
#include "llmc/checkpoint/checkpoint.h"
#include "llmc/checkpoint/directory.h"
#include "dev/test/lib/test.h"
#include "dev/test/lib/whole_model.h"

static const ModelConfig TINY = {.max_T = 6, .V = 5, .Vp = 128, .L = 2, .NH = 2, .C = 4};

// One run's directory and options.
typedef struct {
    char out[256];
    int keep, major;
    float model_file_gb;
} Run;

static Run run_open(const char* name, int keep, int major) {
    Run run;
    snprintf(run.out, sizeof(run.out), "%s", test_path(name));
    run.keep = keep;
    run.major = major;
    run.model_file_gb = 5;
    EXPECT(mkdir(run.out, 0777) == 0, "%s", run.out);
    return run;
}

static Options options_of(const Run* run) {
    const char* line[] = {"test", "--seed", "7"};
    Options options;
    options_parse(&options, 3, (char**)line, options_program(OPTION_CPU));
    options.output.dir = run->out;
    options.output.save_every = 10;
    options.output.keep = run->keep;
    options.output.keep_major = run->major;
    options.output.model_file_gb = run->model_file_gb;
    return options;
}

// Fills n elements of the given type with numbers that all differ, beginning with `value`.
static void fill(void* memory, size_t n, SafeTensorsDtype dtype, float value) {
    for (size_t i = 0; i < n; i++) {
        const float x = i ? rand_normal(5, (uint64_t)dtype + (uint64_t)value, i) : value;
        const uint16_t narrow = dtype == SAFETENSORS_BF16 ? bf16_from_float(x) : fp16_from_float(x);
        memcpy((char*)memory + i * safetensors_dtype_bytes(dtype),
               dtype == SAFETENSORS_F32 ? (const void*)&x : &narrow, safetensors_dtype_bytes(dtype));
    }
}

static const Optimizer adamw = {.name = OPTIMIZER_ADAMW, .lr_scale = {1, 1, 1, 1, 1, 1, 1}};

// Tensors of TINY, in place: parameters of some type, then the optimizer's state.
struct Model {
    SafeTensorsDtype dtype;
    char *params, *state;
    size_t params_bytes, state_bytes;
};

// Returns the map of one process, which updates everything.
static const Map* map_of(ModelConfig cfg) {
    static Memory memory;
    static Map map;
    MapOf of = map_of_model(cfg);
    optimizer_set_map(&of, adamw);
    memory_close(&memory);
    memory = memory_on_host();
    map_open(&map, &memory, MEMORY_HOST, &of, 0);
    return &map;
}

static void* get_group(Model* model, int g, void* group) {
    const Map* m = map_of(TINY);
    const size_t bytes = safetensors_dtype_bytes(model->dtype);
    char* place = model->params + map_trained(m, g)->in[MAP_PARAMETERS].begin * bytes;
    return group ? memcpy(group, place, map_group_elements(m, g) * bytes) : place;
}

// Where the state of a model of one process lies in memory: v behind m.
static const OptimizerState* layout_of(ModelConfig cfg) {
    static OptimizerState layout;
    optimizer_state_open(&layout, adamw, map_of(cfg));
    return &layout;
}

static void* get_state(Model* model, int slot, size_t at, void* state, size_t bytes) {
    char* place = model->state + layout_of(TINY)->slots[slot].offset_bytes + at;
    return state ? memcpy(state, place, bytes) : place;
}

static CheckpointRun run_of(ModelConfig cfg, Model* model, SafeTensorsDtype dtype) {
    static Comm alone = {.size = 1};
    static const DataSources train = {.tokens = 1000, .fingerprint = 0xABCDEF0123456789};
    const CheckpointRun run = {.trainer = "test",
                               .model = {.model = model,
                                         .access = {.get_group = get_group, .get_state = get_state},
                                         .map = map_of(cfg),
                                         .state = layout_of(cfg),
                                         .dtype = dtype,
                                         .in_place = 1,
                                         .comm = &alone},
                               .card = model_card_of(4),
                               .train = &train};
    return run;
}

// Bytes of the copy that a save makes.
static size_t copy_bytes(SafeTensorsDtype dtype) {
    return checkpoints_bytes(&map_of(TINY)->of, 0, layout_of(TINY), dtype, 5);
}

static RunState state_of(int64_t step) {
    RunState state = run_state_open(outliers_open(0, 0), loss_scale_off());
    state.step = state.updates = step;
    return state;
}

// Fills memory with means of squares, which are not negative.
static void fill_squares(float* memory, size_t n, float value) {
    fill(memory, n, SAFETENSORS_F32, value);
    for (size_t i = 0; i < n; i++) {
        memory[i] = fabsf(memory[i]);
    }
}

static Model model_of(SafeTensorsDtype dtype) {
    const size_t bytes = copy_bytes(dtype),
                 params = map_of(TINY)->totals.elements[MAP_PARAMETERS] * safetensors_dtype_bytes(dtype);
    char* memory = check_alloc(bytes, 1, "model");
    return (Model){dtype, memory, memory + params, params, bytes - params};
}

// Elements of m, and of v.
static size_t state_elements(void) { return layout_of(TINY)->slots[STATE_M].bytes / sizeof(float); }

static float* m_of(const Checkpoints* c) { return (float*)c->slots[STATE_M]; }
static float* v_of(const Checkpoints* c) { return (float*)c->slots[STATE_V]; }

// Saves a model whose first weight is `value`, after what spoil (NULL: nothing) does to it; path
// becomes the checkpoint's.
static void save_spoiled(char path[PATH_MAX], const Run* run, int64_t step, float value,
                         SafeTensorsDtype dtype, void (*spoil)(Checkpoints*)) {
    Checkpoints c;
    const Options options = options_of(run);
    Model model = model_of(dtype);
    const RunState state = state_of(step);
    checkpoints_open(&c, &options, run_of(TINY, &model, dtype), NULL, 0);
    fill(c.weights[HF_LAST].groups, c.params_bytes / safetensors_dtype_bytes(dtype), dtype, value);
    fill(m_of(&c), state_elements(), SAFETENSORS_F32, value + 1);
    fill_squares(v_of(&c), state_elements(), value + 2);
    if (spoil) {
        spoil(&c);
    }
    checkpoint_start(&c, &state);
    EXPECT(checkpoint_wait(&c, path) && !checkpoint_wait(&c, path), "one save");
    checkpoints_close(&c);
    free(model.params);
}

static void save_value(char path[PATH_MAX], const Run* run, int64_t step, float value,
                       SafeTensorsDtype dtype) {
    save_spoiled(path, run, step, value, dtype, NULL);
}

static void save(const Run* run, int64_t step) {
    char path[PATH_MAX];
    save_value(path, run, step, (float)step, SAFETENSORS_F32);
}

// Reads m and v into memory that is laid out by the rows of TINY,
static void read_optimizer(const SavedState* state, const char* directory, float* memory) {
    CheckpointParts parts;
    checkpoint_parts_open(&parts, state, directory, layout_of(TINY), map_of(TINY));
    for (size_t i = 0; i < parts.own.count; i++) {
        const StateEntry* own = &parts.own.all[i];
        for (int slot = STATE_M; slot <= STATE_V; slot++) {
            checkpoint_parts_read(&parts, own, slot,
                                  memory + (slot == STATE_V ? state_elements() : 0) + own->at[slot]);
        }
    }
    checkpoint_parts_close(&parts);
}

// and the weights, too.
static void read_checkpoint(const SavedState* state, const char* directory, float* params, float* memory) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows_of(rows, TINY, sizeof(float));
    whole_model_read(directory, TINY, rows, params);
    read_optimizer(state, directory, memory);
}

// The first weight in a checkpoint, or NAN if none is valid.
static float value_in(const char* out, const char* directory) {
    char path[PATH_MAX], error[ERROR_BYTES];
    SavedState state;
    snprintf(path, sizeof(path), "%s/%s", out, directory);
    if (!checkpoint_try_check(&state, path, error)) {
        return NAN;
    }
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const size_t bytes = model_parameter_rows_of(rows, TINY, sizeof(float));
    float *params = (float*)check_alloc(bytes, 1, "params"),
          *memory = (float*)check_alloc(2 * state_elements(), sizeof(float), "optimizer");
    read_checkpoint(&state, path, params, memory);
    const float value =
        memory[0] == params[0] + 1 && memory[state_elements()] == params[0] + 2 ? params[0] : -1;
    state_close(&state);
    free(params);
    free(memory);
    return value;
}

// The step of the newest valid checkpoint, or the return value of checkpoint_newest if none is.
static int64_t newest_in(const char* out) {
    char path[PATH_MAX];
    SavedState state;
    const int found = checkpoint_newest(path, &state, out, NULL, NULL);
    if (found <= 0) {
        return found;
    }
    const int64_t step = state.run.step;
    state_close(&state);
    return step;
}

static int compare_names(const void* a, const void* b) { return strcmp((const char*)a, (const char*)b); }

// The entries of a directory in order, separated by blanks, "step_" and leading zeros left out.
static const char* list_of(const char* directory) {
    static char list[4096];
    char names[64][256];
    int count = 0;
    struct dirent* entry;
    DIR* dir = opendir(directory);
    while (dir && count < 64 && (entry = readdir(dir))) {
        if (entry->d_name[0] != '.' &&
            strcmp(entry->d_name, "run.lock") != 0) { // of one that ended in a thread
            strcpy(names[count++], entry->d_name);
        }
    }
    if (dir) {
        closedir(dir);
    }
    qsort(names, (size_t)count, sizeof(names[0]), compare_names);
    list[0] = '\0';
    for (int i = 0; i < count; i++) {
        const char* name = names[i] + (strncmp(names[i], "step_0", 6) == 0 ? strspn(names[i], "step_0") : 0);
        snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s%s", i ? " " : "", name);
    }
    return list;
}

static void expect_list(const Run* run, const char* wanted) {
    const char* list = list_of(run->out);
    EXPECT(strcmp(list, wanted) == 0, "%s has \"%s\", wanted \"%s\"", run->out, list, wanted);
}

#define ALL_FILES "config.json generation_config.json model.safetensors optimizer.1of1.safetensors state.json"

#define CUT_FILES                                                                                            \
    "config.json generation_config.json model-00001-of-00003.safetensors model-00002-of-00003.safetensors "  \
    "model-00003-of-00003.safetensors model.safetensors.index.json optimizer.1of1.safetensors state.json"

// ---- saving and reading ----

TEST(save) {
    const Run run = run_open("save", 0, 0);
    char path[PATH_MAX], wanted[PATH_MAX];
    save_value(path, &run, 1000, 0.5f, SAFETENSORS_F32);
    snprintf(wanted, sizeof(wanted), "%s/step_00001000", run.out);
    EXPECT(strcmp(path, wanted) == 0, "saved as %s", path);
    EXPECT(strcmp(list_of(path), ALL_FILES) == 0, "it holds \"%s\"", list_of(path));
    EXPECT(value_in(run.out, "step_00001000") == 0.5f, "the weights");
    save_value(path, &run, 123456789012, 2, SAFETENSORS_F32);
    EXPECT(value_in(run.out, "step_123456789012") == 2, "more than eight digits");
    save(&run, 7);
    save(&run, 3);
    expect_list(&run, "3 7 1000 step_123456789012"); // 0: all are kept
    EXPECT(newest_in(run.out) == 3, "the one that was written last, whatever its step");
    SavedState second;
    memset(&second, 0, sizeof(second));
    second.serial = 2;
    second.identity = 1;
    checkpoint_remove_after(run.out, &second);
    expect_list(&run, "3 7 1000 step_123456789012"); // of another run
    second.identity = 0;
    checkpoint_remove_after(run.out, &second);
    expect_list(&run, "1000 step_123456789012");
}

// Element e of the first layer, or a later one: a weight as it was written, m and v. The
// vocabulary's padding is zero.
static int is_as_written(const float* got, const float* want, const uint16_t* bits, size_t n, size_t e,
                         int is_padding, SafeTensorsDtype dtype) {
    const float weight = dtype == SAFETENSORS_F32    ? want[e]
                         : dtype == SAFETENSORS_BF16 ? bf16_to_float(bits[e])
                                                     : fp16_to_float(bits[e]);
    return got[e] == (is_padding ? 0 : weight) && got[n + e] == (is_padding ? 0 : want[n + e]) &&
           got[2 * n + e] == (is_padding ? 0 : want[2 * n + e]);
}

// Every bit of weights, m and v, but not the vocabulary's padding, which comes back as zero.
static void test_tensors(SafeTensorsDtype dtype) {
    char name[64], path[PATH_MAX], error[ERROR_BYTES];
    snprintf(name, sizeof(name), "tensors_%s", safetensors_dtype_name(dtype));
    const Run run = run_open(name, 0, 0);
    save_value(path, &run, 1, 1, dtype);
    SavedState state;
    EXPECT(checkpoint_try_check(&state, path, error), "%s", error);
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const size_t bytes = model_parameter_rows_of(rows, TINY, sizeof(float)), n = bytes / sizeof(float);
    float* got = (float*)check_alloc(3 * n, sizeof(float), "read");
    float* want = (float*)check_alloc(3 * n, sizeof(float), "wanted");
    read_checkpoint(&state, path, got, got + n);
    fill(want, n, SAFETENSORS_F32, 1);
    fill(want + n, n, SAFETENSORS_F32, 2);
    fill_squares(want + 2 * n, n, 3);
    uint16_t* bits = (uint16_t*)check_alloc(n, sizeof(uint16_t), "16-bit weights");
    fill(bits, dtype == SAFETENSORS_F32 ? 0 : n, dtype, 1);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const size_t used = model_rows_in_files(&rows[i], TINY) * rows[i].cols;
        for (size_t k = 0; k < tensor_elements(&rows[i]); k++) {
            const size_t in_layer = k % tensor_layer_elements(&rows[i]);
            const int l = (int)(k / tensor_layer_elements(&rows[i]));
            const size_t e = (size_t)((float*)tensor_at_layer(&rows[i], got, l) - got) + in_layer;
            if (!is_as_written(got, want, bits, n, e, in_layer >= used, dtype)) {
                EXPECT(0, "%s, element %zu of %s", name, k, rows[i].name);
                break;
            }
        }
    }
    state_close(&state);
    free(bits);
    free(want);
    free(got);
}

// The weights in a file for each group, and one file again in the same place.
TEST(model_files) {
    Run run = run_open("model_files", 0, 0);
    char path[PATH_MAX], error[ERROR_BYTES];
    SavedState state;
    run.model_file_gb = 1e-9f;
    save_value(path, &run, 1000, 0.5f, SAFETENSORS_F32);
    EXPECT(strcmp(list_of(path), CUT_FILES) == 0, "it holds \"%s\"", list_of(path));
    EXPECT(value_in(run.out, "step_00001000") == 0.5f, "the weights");
    save(&run, 999);
    for (int f = 2; f <= 4; f++) {
        char file[PATH_MAX];
        file_path(file, "%s/model%s", path,
                  f == 4   ? ".safetensors.index.json"
                  : f == 3 ? "-00003-of-00003.safetensors"
                           : "-00002-of-00003.safetensors");
        EXPECT(truncate(file, f == 2 ? 100 : 0) == 0, "%s", file);
        EXPECT(!checkpoint_try_check(&state, path, error) && strncmp(error, file, strlen(file)) == 0, "%s",
               error);
        save_value(path, &run, 1000, 2, SAFETENSORS_F32);
    }
    run.model_file_gb = 5;
    save_value(path, &run, 1000, 3, SAFETENSORS_F32);
    EXPECT(strcmp(list_of(path), ALL_FILES) == 0, "it holds \"%s\"", list_of(path));
    EXPECT(value_in(run.out, "step_00001000") == 3 && value_in(run.out, "step_00000999") == 999,
           "the weights");
}

// All numbers of a state come back with the same bits.
TEST(state) {
    const Run run = run_open("state", 0, 0);
    const Options options = options_of(&run);
    SavedState s, again;
    char error[ERROR_BYTES];
    memset(&s, 0, sizeof(s));
    s.run = run_state_open(outliers_open(3, 4), loss_scale_open());
    s.run.step = 1234567890123;
    s.run.updates = 1234567890000;
    s.run.tokens = INT64_MAX / 2;
    s.run.stage = STAGE_VALIDATED;
    s.train_data = 0xABCDEF0123456789;
    s.run.sequence = 77;
    s.run.samples_at = 123;
    s.run.loss_scale.scale = 0x1p-3f;
    s.run.loss_scale.good_steps = 1999;
    for (int i = 0; i < 300; i++) {
        outliers_check(&s.run.guard, i % 50 ? rand_normal(1, 1, (uint64_t)i) : NAN,
                       exp(rand_normal(1, 2, (uint64_t)i)));
    }
    s.run.guard.consecutive = 3;
    s.run.validations.best = 0.1 + 0.7;
    s.run.validations.best_step = 41;
    s.run.validations.since = 2;
    s.serial = 9;
    s.train_tokens = 5;
    s.padded_vocab = 128;
    s.trainer = "a \"trainer\" \n";
    SavedFile file = {"model.safetensors", 123, 0xFEDCBA9876543210u};
    SourceState sources[] = {{"web", 0xFEDCBA9876543210u, 123, 1, 7, 3}, {"a \"b\"\xff", 0, 1, 0, 2, 0}};
    const MixtureState mixture = {sources, 2, 5, {1, 2, 3}};
    s.mixture = mixture;
    s.val_sets[0] = (ValidationSet){"web", 0x0123456789ABCDEF};
    s.val_sets[1] = (ValidationSet){"b\xff", 5};
    s.num_val_sets = 2;
    s.files = &file;
    s.num_files = 1;
    s.trainer = "CPU";
    for (int is_nan = 0; is_nan < 2; is_nan++) {
        s.run.val_loss = is_nan ? NAN : 0.1 + 0.2;
        state_write(test_path("state/state.json"), &s, &options);
        EXPECT(state_try_read(&again, test_path("state/state.json"), error), "%s", error);
        EXPECT(memcmp(&again.run.guard.losses, &s.run.guard.losses, sizeof(s.run.guard.losses)) == 0,
               "losses");
        EXPECT(memcmp(&again.run.guard.norms, &s.run.guard.norms, sizeof(s.run.guard.norms)) == 0, "norms");
        EXPECT(again.run.guard.best_mean == s.run.guard.best_mean && again.run.guard.consecutive == 3,
               "guard");
        EXPECT(isnan(again.run.validations.first) && again.run.validations.best == 0.1 + 0.7 &&
                   again.run.validations.best_step == 41 && again.run.validations.since == 2,
               "validations");
        EXPECT(again.run.step == s.run.step && again.run.updates == s.run.updates &&
                   again.run.tokens == s.run.tokens && again.run.sequence == 77 &&
                   again.run.samples_at == 123,
               "numbers");
        EXPECT(is_nan ? isnan(again.run.val_loss) : again.run.val_loss == 0.1 + 0.2, "%g",
               again.run.val_loss);
        EXPECT(again.run.loss_scale.scale == 0x1p-3f && again.run.loss_scale.good_steps == 1999,
               "loss scale");
        EXPECT(again.run.stage == STAGE_VALIDATED && again.train_data == s.train_data, "stage and data");
        EXPECT(again.serial == 9 && again.train_tokens == 5 && again.padded_vocab == 128, "run");
        EXPECT(strcmp(again.trainer, "CPU") == 0 && again.num_files == 1 && again.files[0].bytes == 123 &&
                   again.files[0].xxh64 == file.xxh64 && strcmp(again.files[0].name, file.name) == 0,
               "files");
        const MixtureState* m = &again.mixture;
        EXPECT(m->count == 2 && m->first == 5 && m->from.step == 1 && m->from.tokens == 2 &&
                   m->from.sequence == 3,
               "mixture");
        for (int i = 0; i < 2; i++) {
            const SourceState *a = &m->source[i], *b = &sources[i];
            EXPECT(strcmp(a->name, b->name) == 0 && a->fingerprint == b->fingerprint &&
                       a->tokens == b->tokens && a->number == b->number && a->given == b->given &&
                       a->share == b->share,
                   "source %d", i);
        }
        ValidationSet sets[2] = {{"other", s.val_sets[0].checksum}, {"web", 1}};
        EXPECT(again.num_val_sets == 2 && state_val_set(&again, "web") == 0x0123456789ABCDEF &&
                   state_val_set(&again, "b\xff") == 5 && state_val_set(&again, "none") == 0,
               "validation sets");
        EXPECT(state_validates_same(&again, sets, 2) && !state_validates_same(&again, sets + 1, 1),
               "the first");
        again.num_val_sets = 0;
        EXPECT(state_validates_same(&again, sets + 1, 1), "unknown");
        EXPECT(strcmp(state_option(&again, "seed"), "7") == 0 && !state_option(&again, "none"), "options");
        EXPECT(strcmp(state_option(&again, "lr"), "auto") == 0 &&
                   strcmp(state_option(&again, "shuffle"), "on") == 0,
               "words");
        EXPECT(strcmp(state_option(&again, "out"), run.out) == 0, "%s", state_option(&again, "out"));
        state_close(&again);
    }
}

// A later run in the same place replaces what it finds, whole.
TEST(replace) {
    const Run run = run_open("replace", 0, 0);
    char path[PATH_MAX];
    save_value(path, &run, 10, 1, SAFETENSORS_F32);
    test_write("replace/step_00000010/notes.txt", "x", 1);
    save_value(path, &run, 10, 2, SAFETENSORS_F32);
    EXPECT(value_in(run.out, "step_00000010") == 2, "the new weights");
    EXPECT(strcmp(list_of(path), ALL_FILES) == 0, "it holds \"%s\"", list_of(path));
    expect_list(&run, "10");
}

// A killed run leaves files of an unfinished save.
TEST(left_over) {
    const Run run = run_open("left_over", 1, 0);
    save(&run, 20);
    rename(test_path("left_over/step_00000020"),
           test_path("left_over/step_00000020.old")); // about to be replaced
    mkdir(test_path("left_over/step_00000005.part"), 0777);
    test_write("left_over/step_00000005.part/model.safetensors.part", "half", 4);
    mkdir(test_path("left_over/step_00000099.part"), 0777);
    mkdir(test_path("left_over/step_00000098.part.part"), 0777);
    save(&run, 21);
    expect_list(&run, "21 98.part.part"); // not ours
    save(&run, 22);
    rename(test_path("left_over/step_00000022"), test_path("left_over/step_00000022.old"));
    checkpoint_recover_(run.out);
    EXPECT(newest_in(run.out) == 22, "back in its place");
}

// Links under the names of checkpoints go; what they point to stays. One that is a checkpoint
// elsewhere can be read, replaced and removed like any other.
TEST(links) {
    const Run run = run_open("links", 1, 0), elsewhere = run_open("elsewhere", 0, 0);
    save(&elsewhere, 2);
    mkdir(test_path("victim"), 0777);
    test_write("victim/precious", "x", 1);
    EXPECT(symlink("../victim", test_path("links/step_00000007.part")) == 0, "link");
    EXPECT(symlink("../victim", test_path("links/step_00000002.old")) == 0, "link");
    EXPECT(symlink("../elsewhere/step_00000002", test_path("links/step_00000002")) == 0, "link");
    checkpoint_recover_(run.out);
    expect_list(&run, "2");
    EXPECT(value_in(run.out, "step_00000002") == 2, "the linked one");
    save(&run, 3); // keeps one
    expect_list(&run, "3");
    EXPECT(symlink("../elsewhere/step_00000002", test_path("links/step_00000004")) == 0, "link");
    save(&run, 4);
    expect_list(&run, "4");
    EXPECT(value_in(run.out, "step_00000004") == 4, "its own, not the linked one");
    EXPECT(value_in(elsewhere.out, "step_00000002") == 2, "the other run's checkpoint is whole");
    EXPECT(access(test_path("victim/precious"), F_OK) == 0, "not ours");
}

static void spoil_weight(Checkpoints* c) { ((float*)c->weights[HF_LAST].groups)[7] = -INFINITY; }
static void spoil_block(Checkpoints* c) {
    ((float*)c->weights[HF_LAST].groups)[whole_group_begin(&c->weights[HF_LAST].whole, 2) / 4] = NAN;
}
static void spoil_half(Checkpoints* c) { // bf16
    ((uint16_t*)c->weights[HF_LAST].groups)[7] = 0x7F80;
}
static void spoil_m(Checkpoints* c) { m_of(c)[0] = NAN; }
static void spoil_v(Checkpoints* c) { v_of(c)[0] = -1; }

static void body_save_infinite(const void* run) {
    char path[PATH_MAX];
    save_spoiled(path, (const Run*)run, 30, 30, SAFETENSORS_F32, spoil_weight);
}

static void body_save_infinite_group(const void* run) {
    char path[PATH_MAX];
    Run cut = *(const Run*)run;
    cut.model_file_gb = 1e-9f;
    save_spoiled(path, &cut, 30, 30, SAFETENSORS_F32, spoil_block);
}

static void body_save_infinite_half(const void* run) {
    char path[PATH_MAX];
    save_spoiled(path, (const Run*)run, 30, 30, SAFETENSORS_BF16, spoil_half);
}

static void body_read(const void* path) {
    SavedState state;
    char error[ERROR_BYTES];
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const size_t bytes = model_parameter_rows_of(rows, TINY, sizeof(float));
    void *params = check_alloc(bytes, 1, "p"), *optimizer = check_alloc(2 * bytes, 1, "optimizer");
    CHECK(checkpoint_try_check(&state, (const char*)path, error), "%s", error);
    read_checkpoint(&state, (const char*)path, params, optimizer);
}

// Weights that are not finite are not saved over those that are; an optimizer's state that cannot
// be is not read.
TEST(not_finite) {
    const Run run = run_open("not_finite", 1, 0);
    char path[PATH_MAX];
    save(&run, 20);
    EXPECT(test_dies(body_save_infinite, &run, 1,
                     "error: |step_00000030: not saved|element 7 of wte|not finite"),
           "fp32");
    EXPECT(test_dies(body_save_infinite_half, &run, 1, "error: |step_00000030: not saved|element 7 of wte"),
           "bf16");
    EXPECT(test_dies(body_save_infinite_group, &run, 1,
                     "error: |step_00000030: not saved|element 0 of ln1w, layer 1, is not finite"),
           "of a block");
    expect_list(&run, "20");
    save_spoiled(path, &run, 30, 30, SAFETENSORS_F32, spoil_m);
    EXPECT(test_dies(body_read, path, 1, "error: |optimizer|element 0 of m is nan, wanted a number"), "m");
    save_spoiled(path, &run, 31, 30, SAFETENSORS_F32, spoil_v);
    EXPECT(test_dies(body_read, path, 1, "error: |optimizer|element 0 of v is -1|wanted 0 or more"), "v");
}

// Two runs at a time would remove each other's files.
static void body_save(const void* run) {
    char path[PATH_MAX];
    save_value(path, (const Run*)run, 30, 30, SAFETENSORS_F32);
}

static void body_save_silently(const void* run) {
    // it says that it waits
    CHECK(freopen("/dev/null", "w", stdout), "/dev/null: cannot be opened");
    body_save(run);
}

TEST(lock) {
    const Run run = run_open("lock", 0, 0);
    Lock* lock = checkpoint_lock(run.out);
    EXPECT(test_dies(body_save_silently, &run, 1, "error: |lock: another run is writing here (|, pid "),
           "locked");
    lock_release(lock);
    body_save(&run);
}

// One save after another, waited for in both ways.
TEST(two_saves) {
    const Run run = run_open("two", 0, 0);
    const Options options = options_of(&run);
    Checkpoints c;
    char path[PATH_MAX];
    Model model = model_of(SAFETENSORS_F32);
    checkpoints_open(&c, &options, run_of(TINY, &model, SAFETENSORS_F32), NULL, 0);
    for (int step = 1; step <= 20; step++) {
        const RunState state = state_of(step);
        fill(c.weights[HF_LAST].groups, 1, SAFETENSORS_F32, (float)step);
        fill(m_of(&c), 1, SAFETENSORS_F32, (float)step + 1);
        fill(v_of(&c), 1, SAFETENSORS_F32, (float)step + 2);
        checkpoint_start(&c, &state);
        while (step % 2 && !checkpoint_finished(&c, path)) {
        }
        EXPECT(checkpoint_wait(&c, path) == !(step % 2), "step %d", step);
    }
    checkpoints_close(&c);
    free(model.params);
    EXPECT(value_in(run.out, "step_00000017") == 17 && value_in(run.out, "step_00000020") == 20, "values");
    EXPECT(newest_in(run.out) == 20, "the last");
}

// A run that continues after a save: what becomes of the model meanwhile is not saved.
TEST(copy) {
    const Run run = run_open("copy", 0, 0);
    Options options = options_of(&run);
    Checkpoints c;
    char path[PATH_MAX], name[32];
    Model model = model_of(SAFETENSORS_F32);
    options.output.save_every = 1;
    options.batch.steps = 10;
    checkpoints_open(&c, &options, run_of(TINY, &model, SAFETENSORS_F32), NULL, 0);
    EXPECT(c.copies && copy_bytes(SAFETENSORS_F32) == c.params_bytes + c.optimizer_bytes,
           "bytes of the copy");
    for (int step = 1; step <= 3; step++) {
        const RunState state = state_of(step);
        fill(model.params, model.params_bytes / sizeof(float), SAFETENSORS_F32, (float)step);
        fill(model.state, state_elements(), SAFETENSORS_F32, (float)step + 1);
        fill_squares((float*)(void*)model.state + state_elements(), state_elements(), (float)step + 2);
        checkpoint_start(&c, &state);
        memset(model.params, 0xFF, model.params_bytes);
        memset(model.state, 0xFF, model.state_bytes);
        EXPECT(checkpoint_wait(&c, path), "step %d", step);
        snprintf(name, sizeof(name), "step_%08d", step);
        EXPECT(value_in(run.out, name) == (float)step, "the weights of step %d", step);
    }
    checkpoints_close(&c);
    free(model.params);
}

// ---- keeping ----

TEST(keep) {
    const Run one = run_open("keep_1", 1, 0), three = run_open("keep_3", 3, 0);
    for (int64_t step = 5; step <= 25; step += 5) {
        save(&one, step);
        save(&three, step);
    }
    expect_list(&one, "25");
    expect_list(&three, "15 20 25");
    save(&three, 99999998);
    save(&three, 100000000); // by number, not by name
    save(&three, 100000001);
    expect_list(&three, "step_100000000 step_100000001 step_99999998");
}

TEST(keep_major) {
    const Run run = run_open("major", 2, 10), only_major = run_open("only_major", 0, 10);
    for (int64_t step = 2; step <= 32; step += 2) {
        save(&run, step);
        save(&only_major, step);
    }
    expect_list(&run, "10 20 28 30 32");
    expect_list(&only_major, "2 4 6 8 10 12 14 16 18 20 22 24 26 28 30 32"); // --keep 0: all
}

// Beside --keep, step `best` stays.
TEST(keep_best) {
    const Run run = run_open("best", 2, 0);
    SavedState last;
    memset(&last, 0, sizeof(last));
    const CheckpointsKept two = {2, 0, 4}, one = {1, 0, -1};
    for (int64_t step = 2; step <= 4; step += 2) {
        save(&run, step);
    }
    last.run.step = 9;
    for (int64_t step = 6; step <= 8; step++) {
        Run all = run;
        all.keep = 0;
        save(&all, step);
    }
    checkpoint_thin(run.out, &last, two);
    expect_list(&run, "4 7 8");
    checkpoint_thin(run.out, &last, one);
    expect_list(&run, "8");
}

static void made_by_clock(Checkpoints* c) { c->state.by_clock = 1; }
static void of_another_run(Checkpoints* c) { c->state.identity = 7; }

// --keep auto: of those that the clock made, two stay, and all others.
TEST(keep_auto) {
    const Run run = run_open("auto", CHECKPOINT_KEEP_AUTO, 4);
    char path[PATH_MAX];
    for (int step = 1; step <= 11; step++) {
        save_spoiled(path, &run, step, 1, SAFETENSORS_F32, step % 3 ? made_by_clock : NULL);
    }
    expect_list(&run, "3 4 6 8 9 10 11"); // 4 and 8 are multiples of --keep-major
}

// --keep counts the checkpoints of its own run.
TEST(keep_own) {
    const Run run = run_open("own", 1, 0);
    char path[PATH_MAX];
    save(&run, 1);
    save_spoiled(path, &run, 2, 1, SAFETENSORS_F32, of_another_run);
    save_spoiled(path, &run, 3, 1, SAFETENSORS_F32, of_another_run);
    expect_list(&run, "1 3");
}

// Checkpoints of an earlier, longer run in the same place stay, and do not push out the new ones.
TEST(earlier_run) {
    const Run run = run_open("earlier", 1, 0);
    save(&run, 1000);
    save(&run, 10);
    expect_list(&run, "10 1000");
    save(&run, 20);
    expect_list(&run, "20 1000");
    save(&run, 1000);
    expect_list(&run, "1000");
}

// Entries that only resemble a checkpoint are left alone.
TEST(other_entries) {
    static const char* const directories[] = {"step_3",         "step_",         "step_00000001.bak",
                                              "step_00000001x", "step_-0000001", "steps",
                                              "xstep_00000001", "step_000000002"};
    const Run run = run_open("others", 1, 0);
    for (int i = 0; i < 8; i++) {
        char name[64];
        snprintf(name, sizeof(name), "others/%s", directories[i]);
        EXPECT(mkdir(test_path(name), 0777) == 0, "%s", name);
        snprintf(name, sizeof(name), "others/%s/model.bin", directories[i]);
        test_write(name, "mine", 4);
    }
    test_write("others/log.jsonl", "{}\n", 3);
    alarm(20); // a search for what cannot be removed must end
    save(&run, 10);
    save(&run, 20);
    alarm(0);
    for (int i = 0; i < 8; i++) {
        char name[64];
        struct stat info;
        snprintf(name, sizeof(name), "others/%s/model.bin", directories[i]);
        EXPECT(stat(test_path(name), &info) == 0 && info.st_size == 4, "%s is touched", name);
    }
    EXPECT(value_in(run.out, "step_00000020") == 20 && isnan(value_in(run.out, "step_00000010")), "kept");
    EXPECT(strncmp(list_of(run.out), "log.jsonl ", 10) == 0, "%s", list_of(run.out));
}

// A checkpoint that cannot be removed, here because of a directory in it, ends neither the run nor
// the save.
TEST(cannot_remove) {
    const Run run = run_open("stuck", 1, 0);
    save(&run, 1);
    mkdir(test_path("stuck/step_00000001/mine"), 0777);
    test_write("stuck/step_00000001/mine/x", "x", 1);
    alarm(20);
    save(&run, 2);
    alarm(0);
    EXPECT(value_in(run.out, "step_00000002") == 2, "saved");
    expect_list(&run, "1.part 2");
}

// ---- damage ----

// Not inlined: gcc 12 then believes that its result points to its own variable.
__attribute__((noinline)) static char* read_all(const char* path, size_t* bytes) {
    char *text = NULL, error[ERROR_BYTES];
    CHECK(file_try_read(path, 1 << 20, &text, bytes, error), "%s", error);
    return text;
}

static void write_all(const char* path, const char* text, size_t bytes) {
    FILE* file = fopen(path, "wb");
    CHECK(file && fwrite(text, 1, bytes, file) == bytes && fclose(file) == 0, "%s", path);
}

// Every byte of every file, changed in turn: noticed, with the name of the file; the one before is
// taken.
TEST(flips) {
    const Run run = run_open("flips", 0, 0);
    char path[PATH_MAX], file[PATH_MAX], error[ERROR_BYTES], files[] = ALL_FILES, *save_at = NULL;
    save_value(path, &run, 1, 1, SAFETENSORS_F32);
    save_value(path, &run, 2, 2, SAFETENSORS_F32);
    const int quiet = dup(STDERR_FILENO), nowhere = open("/dev/null", O_WRONLY);
    size_t flips = 0, missed = 0, unnamed = 0;
    for (char* name = strtok_r(files, " ", &save_at); name; name = strtok_r(NULL, " ", &save_at)) {
        size_t bytes;
        file_join(file, path, name);
        char* text = read_all(file, &bytes);
        FILE* open_file = fopen(file, "r+b");
        for (size_t i = 0; i < bytes; i++) {
            SavedState state;
            pwrite(fileno(open_file), (char[1]){(char)(text[i] ^ (1 << i % 8))}, 1, (off_t)i);
            const int is_valid = checkpoint_try_check(&state, path, error);
            missed += (size_t)is_valid;
            unnamed += !is_valid && !strstr(error, name);
            if (is_valid) {
                state_close(&state);
            }
            if (i % 97 == 0) {
                dup2(nowhere, STDERR_FILENO);
                EXPECT(newest_in(run.out) == 1, "%s, byte %zu", name, i);
                dup2(quiet, STDERR_FILENO);
            }
            pwrite(fileno(open_file), text + i, 1, (off_t)i);
            flips++;
        }
        fclose(open_file);
        free(text);
    }
    EXPECT(missed == 0 && unnamed == 0, "of %zu changes, %zu were not noticed, %zu not named", flips, missed,
           unnamed);
    EXPECT(flips > 5000 && newest_in(run.out) == 2, "whole again");
    close(quiet);
    close(nowhere);
}

static void body_newest(const void* run) {
    if (newest_in(((const Run*)run)->out) != 1) {
        fprintf(stderr, "error: another\n");
    }
    exit(3);
}

// Files that are cut short, missing or empty; a directory that is no checkpoint.
TEST(damage) {
    const Run run = run_open("damage", 0, 0);
    char path[PATH_MAX], file[PATH_MAX], error[ERROR_BYTES], files[] = ALL_FILES, *save_at = NULL;
    save_value(path, &run, 1, 1, SAFETENSORS_F32);
    save_value(path, &run, 2, 2, SAFETENSORS_F32);
    for (char* name = strtok_r(files, " ", &save_at); name; name = strtok_r(NULL, " ", &save_at)) {
        size_t bytes;
        SavedState state;
        file_join(file, path, name);
        char* text = read_all(file, &bytes);
        for (size_t length = 0; length < bytes;
             length += length < 40 || length > bytes - 40 ? 1 : bytes / 20) {
            write_all(file, text, length);
            EXPECT(!checkpoint_try_check(&state, path, error) && strstr(error, name), "%s of %zu bytes", name,
                   length);
        }
        unlink(file);
        EXPECT(!checkpoint_try_check(&state, path, error) && strstr(error, name), "no %s", name);
        char wanted[256];
        snprintf(wanted, sizeof(wanted), "warning: |step_00000002/%s|trying the checkpoint before it", name);
        EXPECT(test_dies(body_newest, &run, 3, wanted), "%s", name);
        write_all(file, text, bytes);
        free(text);
    }
    EXPECT(newest_in(run.out) == 2, "whole again");
    EXPECT(newest_in(test_path("nowhere")) == 0, "no directory");
}

// A checkpoint whose state cannot be read may be the newest: it is not passed over in silence, nor
// removed, and new ones come after it.
TEST(unreadable) {
    const Run run = run_open("unreadable", 0, 0);
    char path[PATH_MAX], state_path[PATH_MAX], away[PATH_MAX];
    SavedState state;
    for (int step = 1; step <= 3; step++) {
        save(&run, step);
    }
    EXPECT(checkpoint_newest(path, &state, run.out, NULL, NULL) == CHECKPOINTS_NEWEST, "all can be read");
    state_close(&state);
    EXPECT(checkpoint_last_serial(run.out) == 3, "three");
    snprintf(state_path, sizeof(state_path), "%s/step_00000003/state.json", run.out);
    snprintf(away, sizeof(away), "%s/away", run.out);
    rename(state_path, away);
    EXPECT(checkpoint_newest(path, &state, run.out, NULL, NULL) == CHECKPOINTS_OLDER && state.run.step == 2,
           "the one before the unreadable one");
    EXPECT(checkpoint_last_serial(run.out) == 3, "the unreadable one may be the third");
    state.serial = 1;
    checkpoint_remove_after(run.out, &state);
    state_close(&state);
    expect_list(&run, "away 1 3");
    rename(away, state_path);
    EXPECT(newest_in(run.out) == 3, "read again");
}

// One that could not be read when the list was made, and now can, takes its place in the order of
// writing.
TEST(read_at_second_try) {
    CheckpointEntry_ entries[3] = {{1, CHECKPOINT_UNKNOWN_, 0, 0}, {3, 9, 0, 0}, {2, 5, 0, 0}};
    EXPECT(!checkpoint_is_first_(entries, 3, 7) && entries[0].step == 3 && entries[1].step == 1,
           "not the newest");
    CheckpointEntry_ newest[2] = {{4, CHECKPOINT_UNKNOWN_, 0, 0}, {3, 9, 0, 0}};
    EXPECT(checkpoint_is_first_(newest, 2, 10) && newest[0].step == 4, "the newest");
}

// state.json is not trusted: names outside, numbers too large, keys that are missing or doubled.
TEST(bad_state) {
    static const char* const cases[][3] = {
        {"\"model.safetensors\"", "\"../model.safetensors\"", "wanted one beside it"},
        {"\"step\":2", "\"step\":99999999999999999999", "a number above"},
        {"\"step\":2", "\"step\":9999999999999999999", "below 2^62"},
        {"\"count\":0", "\"count\":9223372036854775807", "below 2^62"}, // more would overflow
        {"\"updates\":2", "\"updates\":9223372036854775807", "below 2^62"},
        {"\"step\":2", "\"step\":-2", "a whole number"},
        {"\"step\":2", "\"serial\":2", "serial appears twice"},
        {"\"step\":2,", "", "no key step"},
        {"\"step\":2", "\"steps\":2", "steps is unknown"},
        {"\"version\":1", "\"version\":2", "version 2, wanted 1"},
        {"pretrain.c run", "pretrain.c ruin", "format pretrain.c ruin"},
        {"\"count\":0", "\"count\":1", "a window of 0 values, wanted 1"},
        {"\"shuffle\":true", "\"shuffle\":[true]", "the value of an option"},
        {"\"scale\":1", "\"scale\":1e99", "scale is 1e+99"},
        {"\"bytes\"", "\"byte\"", "byte is unknown"},
    };
    const Run run = run_open("bad_state", 0, 0);
    char path[PATH_MAX], file[PATH_MAX], error[ERROR_BYTES];
    save_value(path, &run, 2, 2, SAFETENSORS_F32);
    file_join(file, path, "state.json");
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t bytes;
        SavedState state;
        char *text = read_all(file, &bytes), *at = strstr(text, cases[i][0]);
        char* changed = (char*)malloc(bytes + 100);
        CHECK(at && changed, "no %s", cases[i][0]);
        const int length = snprintf(changed, bytes + 100, "%.*s%s%s", (int)(at - text), text, cases[i][1],
                                    at + strlen(cases[i][0]));
        EXPECT(!state_try_parse(&state, file, changed, (size_t)length, error) && strstr(error, cases[i][2]),
               "%s: %s", cases[i][1], error);
        free(text);
    }
}

// ---- failures ----

// Saves as if the disk were full: no file can grow beyond 2 KiB.
static void body_save_limited(const void* run) {
    const struct rlimit limit = {2048, 2048};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    body_save(run);
}

TEST(full_disk) {
    const Run run = run_open("full", 1, 0);
    save(&run, 20);
    EXPECT(test_dies(body_save_limited, &run, 1, "error: |step_00000030|model.safetensors|File too large"),
           "full");
    EXPECT(value_in(run.out, "step_00000020") == 20, "the older one stays");
    EXPECT(isnan(value_in(run.out, "step_00000030")), "the new one is not there");
    char path[PATH_MAX];
    save_value(path, &run, 30, 1, SAFETENSORS_F32);
    EXPECT(test_dies(body_save_limited, &run, 1, "error: |step_00000030|File too large"), "full again");
    EXPECT(value_in(run.out, "step_00000030") == 1, "an older one of the same step stays, too");
}

// A model that no disk has room for.
static void body_open_large(const void* run) {
    const ModelConfig large = {.max_T = 1 << 20, .V = 5, .Vp = 128, .L = 1000, .NH = 1, .C = 65536};
    const Options options = options_of((const Run*)run);
    Checkpoints c;
    Model model = {.dtype = SAFETENSORS_F32};
    checkpoints_open(&c, &options, run_of(large, &model, SAFETENSORS_F32), NULL, 0);
}

TEST(bad_places) {
    const Run run = run_open("bad", 1, 0);
    Run missing = run, file = run, long_name = run;
    snprintf(missing.out, sizeof(missing.out), "%s", test_path("bad/missing"));
    EXPECT(test_dies(body_save, &missing, 1, "error: |bad/missing|No such file"), "missing");
    snprintf(file.out, sizeof(file.out), "%s", test_write("bad/file", "x", 1));
    EXPECT(test_dies(body_save, &file, 1, "error: |bad/file|Not a directory"), "a file");
    memset(long_name.out, 'x', sizeof(long_name.out) - 1);
    EXPECT(test_dies(body_save, &long_name, 1, "error: |xxx"), "a long name");
    EXPECT(test_dies(body_open_large, &run, 1, "error: |bad: a checkpoint takes|MiB, the disk has|free"),
           "no room");
    test_write("bad/step_00000030", "mine", 4); // a file where the checkpoint should be
    EXPECT(test_dies(body_save, &run, 1, "error: |step_00000030: a file, wanted nothing or a directory"),
           "in the way");
    expect_list(&run, "file 30");
}

// ---- faults: every call that can fail, fails once ----

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CAN_PRELOAD 0
#else
#define CAN_PRELOAD 1
#endif

// Saves in another process, step 2 with a file for each group of weights, in which call number `at`
// fails (0: none, and *calls is set). Returns its status.
static int save_with_fault(const Run* run, int step, int at, int* calls) {
    char command[PATH_MAX + 1024];
    snprintf(command, sizeof(command),
             "LD_PRELOAD=%s FAULT_PATH=/faults/ FAULT_AT=%d '%s' --save_checkpoint %s %d %d 2>%s 3>%s",
             test_path("fault.so"), at, test_path("self"), run->out, step, step, test_path("fault.err"),
             test_path("fault.calls"));
    const int status = system(command);
    FILE* file = fopen(test_path("fault.calls"), "r");
    if (!file || (at == 0 && fscanf(file, "%d", calls) != 1)) {
        *calls = 0;
    }
    if (file) {
        fclose(file);
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(faults) {
    char command[PATH_MAX];
    int calls, calls_of_2;
    snprintf(command, sizeof(command), "cc -shared -fPIC dev/test/lib/fault.c -o %s -ldl 2>/dev/null",
             test_path("fault.so"));
    if (!CAN_PRELOAD) {
        return; // the other builds do it
    }
    if (system(command) != 0) {
        printf("skipped: faults: no compiler called cc\n");
        return;
    }
    char self[PATH_MAX];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[length > 0 ? length : 0] = '\0';
    EXPECT(symlink(self, test_path("self")) == 0, "self");
    const Run run = run_open("faults", 1, 0);
    save(&run, 1);
    // it replaces step 1
    EXPECT(save_with_fault(&run, 1, 0, &calls) == 0 && calls > 30, "%d calls", calls);
    EXPECT(save_with_fault(&run, 2, 0, &calls_of_2) == 0 && calls_of_2 > calls + 10, "%d calls", calls_of_2);
    int failed = 0;
    for (int at = 1; at <= calls_of_2; at++) {
        // one that replaces, and a new one
        for (int step = at <= calls ? 1 : 2; step <= 2; step++) {
            save(&run, 1);
            const int status = save_with_fault(&run, step, at, &(int){0});
            size_t bytes;
            char* said = read_all(test_path("fault.err"), &bytes);
            EXPECT(status == 0 || (status == 1 && strncmp(said, "error: ", 7) == 0 && strstr(said, "faults")),
                   "call %d of %d: status %d, %s", at, calls, status, said);
            free(said);
            failed += status == 1;
            int64_t* parts;
            EXPECT(checkpoint_steps(run.out, CHECKPOINT_PART, &parts) == 0, "call %d leaves %s", at,
                   list_of(run.out));
            free(parts);
            checkpoint_recover_(run.out);
            const int64_t newest = newest_in(run.out);
            EXPECT(newest == 1 || newest == 2, "call %d: newest %lld", at, (long long)newest);
            EXPECT(status != 0 || newest == step, "call %d: saved, but newest %lld", at, (long long)newest);
        }
    }
    EXPECT(failed > calls, "%d of %d faults were fatal", failed, calls + calls_of_2);
}

COMMAND(save_checkpoint) { // DIR STEP VALUE
    Run run;
    char path[PATH_MAX];
    CHECK(argc == 3, "%d arguments; wanted DIR STEP VALUE", argc);
    memset(&run, 0, sizeof(run));
    snprintf(run.out, sizeof(run.out), "%s", argv[0]);
    run.keep = 1;
    run.model_file_gb = atoi(argv[1]) == 2 ? 1e-9f : 5;
    save_value(path, &run, atoi(argv[1]), (float)atof(argv[2]), SAFETENSORS_F32);
    return 0;
}

TEST(tensors) {
    test_tensors(SAFETENSORS_F32);
    test_tensors(SAFETENSORS_BF16);
    test_tensors(SAFETENSORS_F16);
}

// Hundreds of saves, each flushed several times, need no disk.
__attribute__((constructor)) static void save_in_memory(void) {
    if (access("/dev/shm", W_OK) == 0) {
        setenv("TMPDIR", "/dev/shm", 0);
    }
}
