// Files of a model that ranks have in parts: the optimizer's state is the same for every grid of
// ranks that wrote it; whole groups come from parts and go to them.
#include <pthread.h>

#include "dev/test/lib/state_test.h"
#include "dev/test/lib/test.h"
#include "llmc/base/xxh64.h"
#include "llmc/checkpoint/model_files.h"
#include "llmc/checkpoint/optimizer_parts.h"
#include "llmc/comm/comm.h"
#include "llmc/layers/q8_weights.h"
#include "llmc/model/part.h"
#include "llmc/parallel/grid.h"

static ModelConfig gpt2_of(int L, int C, int heads) {
    const ModelConfig cfg = {.max_T = 8, .V = 100, .Vp = 128, .L = L, .NH = heads, .C = C};
    return cfg;
}

// Four heads of keys.
static ModelConfig qwen2(void) {
    ModelConfig cfg = gpt2_of(4, 32, 8);
    cfg.arch = ARCH_QWEN2;
    cfg.KV = 4;
    cfg.F = 96;
    cfg.has_head = 1;
    return cfg;
}

// A rank of a grid with its stage of ZeRO; all stages have equally many layers.
static RankPart part_of_rank(ModelConfig whole, GridShape shape, int zero, int rank) {
    RankPart part;
    const Grid grid = grid_of(shape, rank);
    const GridMember data = grid_member(&grid, GRID_DATA);
    const int P = shape.pipeline, L = whole.L / P;
    ModelPart which = {0};
    if (shape.tensor > 1) {
        which.tensor_rank = grid.tensor_rank, which.tensor_ranks = shape.tensor;
        whole.Vp = model_padded_vocab_of_ranks(whole.V, shape.tensor);
    }
    if (grid_experts(shape) > 1) {
        const GridMember experts = grid_member(&grid, GRID_EXPERTS);
        which.expert_ranks = experts.size, which.expert_rank = experts.rank;
    }
    if (P > 1) {
        which.first_layer = grid.stage * L, which.layers = L, which.of_layers = whole.L;
    }
    memset(&part, 0, sizeof(part));
    part.whole = whole;
    part.own = model_part_of(whole, which);
    part.zero = zero_plan(part.own, zero, data.rank, data.size);
    part.zero.experts = grid_experts(shape);
    part.grid = grid;
    return part;
}

// ---- the optimizer's state ----

// A value that identifies an element of a slot: of which parameter of the whole model it is.
static float value_of(int slot, const TensorRow* row, int copy, size_t at) {
    const uint64_t who[] = {(uint64_t)slot, row->stream, (uint64_t)copy, at};
    return (float)(xxh64(who, sizeof(who)) % 251);
}

// Sets, or checks, what a rank has of the slots of a range.
static void visit_range(const CheckpointPart* part, const ZeroRange* range, int slot, int is_check) {
    const StateSlot* s = &part->state.slots[slot];
    const TensorRow *row = &part->state.rows[range->row], *whole = &part->space.state.rows[range->row];
    const int l = part->of.own.part.first_layer + tensor_lowest_layer(row, range->copy);
    const size_t step = s->shape == SLOT_BLOCKS ? OPTIMIZER_BLOCK : 1;
    char* array = (char*)state_array(&part->state, slot, range);
    for (size_t i = 0; i < range->count && array; i += step, array += s->element_bytes) {
        const PartRun run = part_run(row, part->of.whole, part->of.own.part, range->before + i);
        const float value = value_of(slot, row, tensor_copy(whole, l), run.whole / step),
                    found = s->element_bytes == 1 ? *(uint8_t*)array : *(float*)(void*)array;
        if (is_check && found != value) {
            EXPECT(0, "%s, copy %d, element %zu of %s is %f, wanted %f", row->name, range->copy,
                   range->before + i, s->name, found, value);
            return;
        }
        if (s->element_bytes == 1) {
            *(uint8_t*)array = (uint8_t)value;
        } else {
            *(float*)(void*)array = value;
        }
    }
}

static void visit(const CheckpointPart* part, int is_check) {
    for (int i = 0; i < part->num_ranges; i++) {
        for (int slot = 0; slot < STATE_MASTER; slot++) {
            visit_range(part, &part->ranges[i], slot, is_check);
        }
    }
}

enum { MOST_FILES = 32 };

typedef struct {
    SavedFile files[MOST_FILES];
    char names[MOST_FILES][64];
    SavedState state;
} Saved;

// Writes the state as the ranks of a grid do.
static void save(Saved* saved, Optimizer optimizer, ModelConfig whole, GridShape shape, int zero) {
    memset(saved, 0, sizeof(*saved));
    saved->state.files = saved->files;
    for (int rank = 0; rank < grid_size(shape); rank++) {
        const RankPart of = part_of_rank(whole, shape, zero, rank);
        const int i = checkpoint_part_number(&of);
        CheckpointPart part;
        checkpoint_part_open(&part, optimizer, &of);
        part.state.memory = check_alloc(part.state.bytes + 1, 1, "state");
        visit(&part, 0);
        if (i >= 0) {
            EXPECT(i == saved->state.num_files && checkpoint_part_rank(&of, i) == rank, "part %d", i);
            checkpoint_part_name(saved->names[i], i, checkpoint_part_writers(&of));
            saved->files[saved->state.num_files++].name = saved->names[i];
            checkpoint_part_write(&part, test_path(saved->names[i]), part.state.memory);
        }
        free(part.state.memory);
        checkpoint_part_close(&part);
    }
}

// Reads the state in all ranks of a grid.
static void load(const Saved* saved, Optimizer optimizer, ModelConfig whole, GridShape shape, int zero) {
    for (int rank = 0; rank < grid_size(shape); rank++) {
        const RankPart of = part_of_rank(whole, shape, zero, rank);
        CheckpointParts parts;
        checkpoint_parts_open(&parts, &saved->state, test_tmpdir(), optimizer, &of);
        char* memory = state_read(&parts, of.zero.groups);
        visit(&parts.own, 1);
        checkpoint_parts_close(&parts);
        free(memory);
    }
}

// Every grid reads what every grid, or every second one, has written.
static void elastic(Optimizer optimizer, ModelConfig whole, const GridShape* shapes, int count) {
    Saved saved;
    for (int from = 0; from < count; from++) {
        if (!test_has_case(from)) {
            continue;
        }
        save(&saved, optimizer, whole, shapes[from], (from + 1) % 3);
        for (int to = 0; to < count; to++) {
            load(&saved, optimizer, whole, shapes[to], to % 3);
        }
    }
}

static Optimizer adamw(OptimizerName name) { return optimizer_of(name, 0, MASTER_NONE); }

// t, c, D, P
static const GridShape GRIDS[] = {{1, 1, 1, 1, 1}, {1, 1, 3, 1, 1}, {2, 1, 1, 1, 1}, {4, 1, 1, 1, 1},
                                  {4, 1, 2, 1, 1}, {1, 1, 1, 2, 1}, {2, 2, 1, 4, 1}, {2, 1, 1, 2, 1}};
enum { COUNT = sizeof(GRIDS) / sizeof(GRIDS[0]) };

SERIAL_TEST(parts_elastic) {
    elastic(adamw(OPTIMIZER_ADAMW), gpt2_of(4, 32, 4), GRIDS, COUNT);
    elastic(adamw(OPTIMIZER_ADAMW), qwen2(), GRIDS, COUNT);
    elastic(adamw(OPTIMIZER_ADAMW8BIT), gpt2_of(1, 256, 4), GRIDS, 5);
}

// t, c, D, P, e
static const GridShape EXPERTS[] = {
    {1, 1, 1, 1, 1}, {1, 1, 3, 1, 1}, {1, 1, 2, 1, 2}, {1, 1, 4, 1, 2}, {1, 1, 4, 1, 4}};

static ModelConfig mixtral(int C) {
    ModelConfig cfg = gpt2_of(2, C, 4);
    cfg.arch = ARCH_MIXTRAL;
    cfg.E = 4, cfg.E_used = 2;
    cfg.F = 64;
    return cfg;
}

SERIAL_TEST(parts_experts) {
    elastic(adamw(OPTIMIZER_ADAMW), mixtral(32), EXPERTS, 5);
    elastic(adamw(OPTIMIZER_ADAMW8BIT), mixtral(256), EXPERTS, 5);
}

SERIAL_TEST(parts_three_ranks) {
    static const GridShape grids[] = {{1, 1, 1, 1, 1}, {3, 1, 1, 1, 1}, {2, 1, 2, 1, 1}, {6, 1, 1, 1, 1}};
    elastic(adamw(OPTIMIZER_ADAMW), gpt2_of(2, 48, 6), grids, 4);
}

// ---- damaged metadata ----

typedef struct {
    const char *ranges[2], *tensor[2], *total; // of two files; NULL: none
    const char* error;
} Damage;

static void write_file(const char* name, const char* ranges, const char* tensor, const char* total,
                       size_t count) {
    SafeTensorsWriter writer;
    float* zeros = (float*)check_alloc(count, sizeof(float), "zeros");
    safetensors_writer_open(&writer, test_path(name));
    safetensors_writer_metadata(&writer, "ranges", ranges);
    if (tensor) {
        const int is_old = tensor[0] == 's'; // s4: in 4 slices
        safetensors_writer_metadata(&writer, is_old ? "slices" : "tensor", tensor + is_old);
    }
    safetensors_writer_metadata(&writer, "total", total);
    safetensors_writer_declare(&writer, "m", SAFETENSORS_F32, 1, &count);
    safetensors_writer_begin(&writer);
    safetensors_write_raw(&writer, zeros, count * sizeof(float));
    safetensors_writer_commit(&writer);
    free(zeros);
}

static void body_read_damaged(const void* damage) {
    const Damage* d = (const Damage*)damage;
    const GridShape one = {1, 1, 1, 1, 1};
    const RankPart of = part_of_rank(gpt2_of(4, 32, 4), one, 0, 0);
    SavedFile files[2] = {{.name = "optimizer.1of2.safetensors"}, {.name = "optimizer.2of2.safetensors"}};
    SavedState state;
    CheckpointParts parts;
    memset(&state, 0, sizeof(state));
    state.files = files;
    state.num_files = 2;
    for (int i = 0; i < 2; i++) {
        write_file(files[i].name, d->ranges[i], d->tensor[i], d->total, i ? 54336 - 100 : 100);
    }
    checkpoint_parts_open(&parts, &state, test_tmpdir(), adamw(OPTIMIZER_LION), &of);
    checkpoint_parts_close(&parts);
}

// The model has 54336 elements.
TEST(parts_damaged) {
    static const Damage good = {{"0-100", "100-54336"}, {"4", "4"}, "54336", NULL},
                        one_slice = {{"0-100", "100-54336"}, {"s1", NULL}, "54336", NULL};
    static const Damage damaged[] = {
        {{"0-100", "100-54336"},
         {"3", "3"},
         "54336",
         "tensor: 3, into which the model cannot be cut: 4 heads"},
        {{"0-100", "100-54336"},
         {"0", "0"},
         "54336",
         "tensor: 0, into which the model cannot be cut: 4 heads"},
        {{"0-100", "100-54336"},
         {"99999999999", "4"},
         "54336",
         "tensor: 99999999999, wanted at most the number of heads, 4"},
        {{"0-100", "100-54336"}, {"four", "4"}, "54336", "tensor: \"four\", wanted a number"},
        {{"0-100", "100-54336"}, {"4x", "4"}, "54336", "tensor: \"x\" after the number"},
        {{"0-100", "100-54336"}, {"4", NULL}, "54336", "tensor: 1, wanted 4"},
        {{"0-100", "100-54336"}, {"s4", "s4"}, "54336", "in 4 slices, |5e8cb2dd|--tensor-slices 1|--model"},
        {{"0-100", "99-54336"}, {"4", "4"}, "54336", "the parts do not fit"},
        {{"0-100", "101-54336"}, {"4", "4"}, "54336", "the parts do not fit"},
        {{"0-100", "100-54335"}, {"4", "4"}, "54336", "optimizer state of 54335 elements"},
        {{"0-100", "100-54336"}, {"4", "4"}, "54337", "a part of 54337 elements"}};
    body_read_damaged(&good);
    body_read_damaged(&one_slice);
    for (size_t i = 0; i < sizeof(damaged) / sizeof(damaged[0]); i++) {
        EXPECT(test_dies(body_read_damaged, &damaged[i], 1, damaged[i].error), "%s", damaged[i].error);
    }
}

// ---- whole groups ----

enum { MOST_RANKS = 16 };

// A message between two ranks: the receiver waits for it, and the sender until it is taken.
typedef struct {
    const void* data;
    size_t bytes;
} Mail;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Mail mail[MOST_RANKS][MOST_RANKS];
    pthread_barrier_t all;
    char gathered[MOST_RANKS * sizeof(ModelPart)];
} world = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

struct Model {
    RankPart part;
    ModelFiles files;
    Comm comm;
    float *params, *set; // its own memory, and the groups that were set
    pthread_t thread;
    const float* whole; // all groups of the whole model
    int writer;
};

static float* group_in(const Model* model, float* memory, int g) {
    return memory + zero_group_begin(&model->part.zero, g);
}

static void* get_group(Model* model, int g, void* group) {
    float* place = group_in(model, model->params, g);
    return group ? memcpy(group, place, zero_group_elements(&model->part.zero, g) * sizeof(float)) : place;
}

static void set_group(Model* model, int g, const float* group) {
    memcpy(group_in(model, model->set, g), group, zero_group_elements(&model->part.zero, g) * sizeof(float));
}

static void move(Model* model, GridGroup group, GroupMove m) {
    Grid peer = model->part.grid;
    if (group == GRID_EXPERTS) {
        peer.data_rank += m.peer - grid_member(&peer, group).rank;
    } else {
        *(group == GRID_TENSOR ? &peer.tensor_rank : &peer.stage) = m.peer;
    }
    const int here = grid_rank(&model->part.grid), there = grid_rank(&peer);
    Mail* mail = m.sends ? &world.mail[here][there] : &world.mail[there][here];
    pthread_mutex_lock(&world.lock);
    if (m.sends) {
        mail->data = m.data;
        mail->bytes = m.bytes;
        pthread_cond_broadcast(&world.changed);
    }
    while ((mail->data == NULL) != m.sends) {
        pthread_cond_wait(&world.changed, &world.lock);
    }
    if (!m.sends) {
        EXPECT(mail->bytes == m.bytes, "%zu bytes sent, %zu wanted", mail->bytes, m.bytes);
        memcpy(m.data, mail->data, m.bytes);
        mail->data = NULL;
        pthread_cond_broadcast(&world.changed);
    }
    pthread_mutex_unlock(&world.lock);
}

static void all_gather(Comm* c, void* all, const void* mine, size_t bytes) {
    memcpy(world.gathered + (size_t)c->rank * bytes, mine, bytes);
    pthread_barrier_wait(&world.all);
    memcpy(all, world.gathered, (size_t)c->size * bytes);
    pthread_barrier_wait(&world.all);
}

static const CommEngine engine = {.all_gather = all_gather};

// Elements of whole groups, of which those outside of the trained vocabulary are zero, too.
static float* whole_model(ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const size_t bytes = model_parameter_rows_of(rows, cfg, sizeof(float));
    float* whole = (float*)check_alloc(bytes, 1, "whole");
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int k = 0; k < rows[i].layers; k++) {
            float* tensor = (float*)tensor_at_layer(&rows[i], whole, k);
            for (size_t at = 0; at < tensor_layer_elements(&rows[i]); at++) {
                tensor[at] = value_of(0, &rows[i], k, at) + 1;
            }
        }
    }
    return whole;
}

// Sets the part of a rank from whole groups.
static void set_part(Model* model) {
    const ZeroPlan plan = model_files_plan(&model->part);
    PartGroups parts;
    part_groups_open_to_set(&parts, &model->files);
    for (int g = 0; g < plan.groups; g++) {
        if (model_files_have(model->part.whole, model->part.own.part, g)) {
            part_groups_set(&parts, g, (float*)model->whole + zero_group_begin(&plan, g));
        }
    }
    part_groups_set_last(&parts);
    part_groups_close(&parts);
    const size_t bytes = zero_count(&model->part.zero, ZERO_FULL) * sizeof(float);
    if (model->files.in_place && !rank_part_is_whole(&model->part)) {
        EXPECT(memcmp(model->set, model->params, bytes) == 0, "in place");
    }
    memcpy(model->params, model->set, bytes);
}

// The first stage's copy of the classifier's matrix is not the one that is saved.
static void spoil_embedding(Model* model) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const ModelConfig own = model->part.own;
    zero_parameter_rows(rows, &model->part.zero, own, sizeof(float));
    if (!own.has_head && model_has_first(own) && !model_has_last(own)) {
        memset(tensor_at_layer(&rows[0], model->params, 0), 0xFF, tensor_layer_elements(&rows[0]) * 4);
    }
}

// Puts the whole groups together again in one rank, and compares them.
static void* get_whole(void* m) {
    Model* model = (Model*)m;
    const ZeroPlan plan = model_files_plan(&model->part);
    const Grid writer = grid_of(model->part.grid.shape, model->writer);
    const int is_writer = model->comm.rank == model->writer;
    PartGroups parts;
    part_groups_open_to_get(&parts, &model->files);
    for (int g = 0; g < plan.groups; g++) {
        const size_t bytes = zero_group_elements(&plan, g) * sizeof(float);
        void *room = is_writer ? check_alloc(bytes, 1, "group") : NULL,
             *group = part_groups_get(&parts, g, &writer, room);
        if (is_writer) {
            EXPECT(memcmp(group, model->whole + zero_group_begin(&plan, g), bytes) == 0, "group %d", g);
        }
        free(room);
    }
    part_groups_close(&parts);
    return NULL;
}

// Takes a whole model apart, and puts it together in each rank.
static void take_and_put(ModelConfig cfg, GridShape shape, int in_place) {
    static Model models[MOST_RANKS];
    const int size = grid_size(shape);
    cfg = part_of_rank(cfg, shape, 0, 0).whole;
    float* whole = whole_model(cfg);
    pthread_barrier_init(&world.all, NULL, (unsigned)size);
    for (int r = 0; r < size; r++) {
        Model* model = &models[r];
        const RankPart part = part_of_rank(cfg, shape, 0, r);
        const ModelAccess access = {.get_group = get_group, .set_group = set_group, .move = move};
        const size_t elements = zero_count(&part.zero, ZERO_FULL);
        model->part = part;
        model->comm = (Comm){.rank = r, .size = size, .engine = &engine};
        model->files = (ModelFiles){model,           access,   part,        adamw(OPTIMIZER_ADAMW),
                                    SAFETENSORS_F32, in_place, &model->comm};
        model->params = (float*)check_alloc(elements, sizeof(float), "params");
        model->set = (float*)check_alloc(elements, sizeof(float), "params");
        model->whole = whole;
        set_part(model);
        spoil_embedding(model);
    }
    for (int writer = 0; writer < size; writer++) {
        for (int r = 0; r < size; r++) {
            models[r].writer = writer;
            pthread_create(&models[r].thread, NULL, get_whole, &models[r]);
        }
        for (int r = 0; r < size; r++) {
            pthread_join(models[r].thread, NULL);
        }
    }
    for (int r = 0; r < size; r++) {
        free(models[r].params);
        free(models[r].set);
    }
    free(whole);
}

TEST(parts_whole_groups) {
    for (int i = 2; i < COUNT; i++) {
        take_and_put(gpt2_of(4, 32, 4), GRIDS[i], i % 2);
        take_and_put(qwen2(), GRIDS[i], !(i % 2));
    }
}

TEST(parts_whole_groups_of_experts) {
    for (int i = 2; i < 5; i++) {
        take_and_put(mixtral(32), EXPERTS[i], i % 2);
    }
}

// ---- 8 bits ----

// A model in 8 bits, from fp32 values that are laid out by its rows.
typedef struct {
    ModelConfig cfg;
    TensorRow floats[MODEL_PARAMETER_ROWS], rows[MODEL_PARAMETER_ROWS];
    char *from, *memory;
} Quantized;

static Quantized quantized_of(ModelConfig cfg) {
    Quantized q = {.cfg = cfg};
    q.from = (char*)check_alloc(model_parameter_rows_of(q.floats, cfg, sizeof(float)), 1, "fp32");
    q.memory = (char*)check_alloc(quantized_parameter_rows(q.rows, cfg, sizeof(float)), 1, "8 bits");
    return q;
}

static void quantize(Quantized* q) {
    for (int g = 0; g < model_groups(q->cfg); g++) {
        const char* group = q->from + tensor_group_offset_bytes(q->floats, g);
        quantized_set_group_cpu(q->rows, q->memory, q->cfg, g, (const float*)(const void*)group);
    }
}

// A part has the blocks, and the numbers, of the whole model.
static void expect_part(const Quantized* part, const Quantized* whole, int row, int k) {
    const TensorRow *r = &part->floats[row], *of_whole = &whole->rows[row];
    const size_t step = quantized_is_matrix(r) ? QUANTIZED_BLOCK : 1, bytes = of_whole->element_bytes;
    for (size_t at = 0; at < tensor_layer_elements(r); at += step) {
        const PartRun run = part_run(r, whole->cfg, part->cfg.part, at);
        const char *here = (char*)tensor_at_layer(&part->rows[row], part->memory, k) + at / step * bytes,
                   *there = (char*)tensor_at_layer(of_whole, whole->memory, k) + run.whole / step * bytes;
        if (memcmp(here, there, bytes) != 0) {
            EXPECT(0, "%s, copy %d, element %zu", r->name, k, at);
            return;
        }
    }
}

TEST(parts_quantized) {
    const GridShape shape = {2, 1, 1, 1, 1};
    const RankPart of = part_of_rank(gpt2_of(2, 64, 2), shape, 0, 1);
    Quantized whole = quantized_of(of.whole), part = quantized_of(of.own);
    free(whole.from);
    whole.from = (char*)whole_model(of.whole);
    for (int g = 0; g < model_groups(of.own); g++) {
        for (int G = 0; G < model_groups(of.whole); G++) {
            const PartGroup a = {part.floats, g, part.from + tensor_group_offset_bytes(part.floats, g)},
                            b = {whole.floats, G, whole.from + tensor_group_offset_bytes(whole.floats, G)};
            part_copy_group(PART_TAKE, a, of.own.part, b, of.whole);
        }
    }
    quantize(&whole);
    quantize(&part);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int k = 0; k < part.floats[i].layers; k++) {
            expect_part(&part, &whole, i, k);
        }
    }
    free(whole.from), free(whole.memory);
    free(part.from), free(part.memory);
}
