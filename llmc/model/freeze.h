/*
freeze.h -- --freeze: the parameters that training leaves as they are.

    LIST     ITEM,ITEM,...
    ITEM     NAME or WORD            in all blocks
             NAME[2] or WORD[0-5]    in these blocks only
    NAME     of a parameter in model.h's table; * matches any letters, ? any single one: wte, '*b',
             ln1?; or of a tensor or module in Hugging Face's files: wte.weight, 'h.*.mlp',
             transformer.h.0.attn.c_attn; attn.c_attn is that module of all blocks
    WORD     embeddings, blocks, attention, mlp, norms, experts or router (freeze_words_)

A frozen parameter has no gradient, no optimizer state and no update. A parameter that is frozen in
all blocks needs no memory for them, and neither do blocks 0 ... k - 1 if all their parameters are
frozen (zero.h). If the embeddings are also frozen, the backward pass ends at block k, and the
blocks below keep no activations for it. If the classifier has no matrix of its own, its weight is
wte, so freezing wte also freezes the classifier.
*/
#ifndef LLMC_FREEZE_H
#define LLMC_FREEZE_H

#include <ctype.h>
#include <fnmatch.h>
#include <stdint.h>
#include <string.h>

#include "llmc/model/families.h"
#include "llmc/model/model.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int first_block; // the lowest block that the backward pass reaches; L: none
    TensorSet rows;  // frozen in all blocks that have them
    // Frozen in each block; rows outside of the blocks have the same bit in all of
    // them.
    TensorSet in_block[MODEL_MAX_LAYERS];
} Freeze;

static inline int freeze_has(const Freeze* freeze, int row, int l) {
    return tensor_is_in(freeze->in_block[l], row);
}

// Returns 1 if each parameter that is frozen in some block from `first` on (of parameters:
// model_copies) is frozen in all blocks.
int freeze_is_whole(const Freeze* freeze, ModelConfig cfg, int first);

// ---- the list ----

// Sets `freeze` from a list for a model; if that is empty or NULL, nothing is frozen.
// Returns 0 and the reason in `error` if the list is invalid, or leaves nothing to train.
int freeze_parse(Freeze* freeze, ModelConfig cfg, const char* list, char* error);

// Returns the parameters frozen by a list that is known to be valid.
Freeze freeze_of(ModelConfig cfg, const char* list);

// Returns what is frozen in the layers of a part of the model, counted from its first one. If a
// stage has wte only to look up tokens, the stage that has it as the classifier's matrix updates
// it.
Freeze freeze_of_part(const Freeze* whole, ModelConfig part);

// ---- consequences ----

// Returns 1 if the weight of the classifier is frozen.
int freeze_has_classifier(const Freeze* freeze, ModelConfig cfg);

// Returns 1 if every shared parameter is frozen in all layers that share it, or in none; if not, 0
// and the reason in `error`.
int freeze_check_shared(const Freeze* freeze, ModelConfig cfg, char* error);

// Returns the lowest block of parameters (model_copies) with a trained parameter; their number if
// all are frozen.
int freeze_first_copy(const Freeze* freeze, ModelConfig cfg);

// Returns the number of frozen elements in memory, without the padding of the vocabulary.
double freeze_count(const Freeze* freeze, ModelConfig cfg);

// Returns model_flops_per_token without the skipped work: 2 for the gradient of each frozen weight,
// 2 for the gradient of its input in blocks that the backward pass does not reach, and two thirds
// of the attention in these.
double freeze_flops_per_token(const Freeze* freeze, ModelConfig cfg, int T);

#ifdef __cplusplus
}
#endif

#ifdef FREEZE_IMPLEMENTATION

#include <stdio.h>
#include <stdlib.h>

#include "llmc/base/check.h"

int freeze_is_whole(const Freeze* freeze, ModelConfig cfg, int first) {
    for (int k = first; k < model_copies(cfg); k++) {
        if (freeze->in_block[model_group_layer(cfg, 1 + k)] & ~freeze->rows) {
            return 0;
        }
    }
    return 1;
}

// Word for the parameters on every line that names it.
typedef struct {
    const char *word, *names;
} FreezeWord_;

static const FreezeWord_* freeze_words_(int* count) {
    static const FreezeWord_ words[] = {
        {"embeddings", "w?e"},  {"blocks", "ln[12]?"},   {"blocks", "ln[12]post?"}, {"blocks", "qkv?"},
        {"blocks", "?normw"},   {"blocks", "sinks"},     {"blocks", "attproj?"},    {"blocks", "fc*"},
        {"blocks", "?fc*"},     {"blocks", "routerw*"},  {"blocks", "lnqw"},        {"blocks", "lnkvw"},
        {"blocks", "*upw"},     {"attention", "qkv?"},   {"attention", "?normw"},   {"attention", "lnqw"},
        {"attention", "lnkvw"}, {"attention", "*upw"},   {"attention", "sinks"},    {"attention", "attproj?"},
        {"mlp", "fc*"},         {"mlp", "?fc*"},         {"mlp", "routerw*"},       {"experts", "?fc*"},
        {"router", "routerw*"}, {"norms", "ln*"},        {"norms", "?normw"},       {"embeddings", "*_table"},
        {"blocks", "*_gate"},   {"attention", "*_gate"}, {"blocks", "scales"},
    };
    *count = (int)(sizeof(words) / sizeof(words[0]));
    return words;
}

enum { FREEZE_ITEM_BYTES_ = 64 };

typedef struct {
    char text[FREEZE_ITEM_BYTES_], name[FREEZE_ITEM_BYTES_];
    int has_blocks, first, last; // blocks, from [first-last]
} FreezeItem_;

// Reads a number of at most four digits; returns the text after it, or NULL without one.
static const char* freeze_read_number_(const char* text, int* number) {
    int digits = 0;
    for (*number = 0; isdigit((unsigned char)text[digits]) && digits < 5; digits++) {
        *number = 10 * *number + (text[digits] - '0');
    }
    return 0 < digits && digits < 5 ? text + digits : NULL;
}

// Reads "[2]" or "[0-5]"; returns 0 for anything else.
static int freeze_read_blocks_(FreezeItem_* item, const char* text) {
    const char* end = freeze_read_number_(text + 1, &item->first);
    item->has_blocks = 1;
    item->last = item->first;
    if (end && *end == '-') {
        end = freeze_read_number_(end + 1, &item->last);
    }
    return end && strcmp(end, "]") == 0;
}

static int freeze_read_item_(FreezeItem_* item, const char* text, size_t length, int L, char* error) {
    memset(item, 0, sizeof(*item));
    item->last = L - 1;
    snprintf(item->text, sizeof(item->text), "%.*s", (int)length, text);
    const size_t name = strcspn(item->text, "[");
    memcpy(item->name, item->text, name);
    if (item->text[name] &&
        (!freeze_read_blocks_(item, item->text + name) || item->last >= L || item->first > item->last)) {
        return error_set(error, "--freeze",
                         "%s is not NAME[BLOCK] or NAME[FIRST-LAST] with blocks of 0 to %d", item->text,
                         L - 1);
    }
    return 1;
}

// Returns 1 if the model has a parameter that the word stands for.
static int freeze_word_has_(const FreezeWord_* word, const TensorRow* rows, int row) {
    return !tensor_is_absent(&rows[row]) && fnmatch(word->names, rows[row].name, 0) == 0;
}

// Returns 1 if an item matches a parameter, by a pattern of its name or by a word.
static int freeze_names_(const FreezeItem_* item, const TensorRow* rows, int row) {
    int count;
    const FreezeWord_* words = freeze_words_(&count);
    for (int i = 0; i < count; i++) {
        if (strcmp(item->name, words[i].word) == 0 && freeze_word_has_(&words[i], rows, row)) {
            return 1;
        }
    }
    return fnmatch(item->name, rows[row].name, 0) == 0;
}

// Returns 1 if a pattern matches the name of a tensor, or of a module that has it.
static int freeze_is_in_module_(const char* pattern, const char* name) {
    FileTensorName module;
    snprintf(module.text, sizeof(module.text), "%s", name);
    for (char* end = module.text + strlen(module.text); end; end = strrchr(module.text, '.')) {
        *end = '\0';
        if (fnmatch(pattern, module.text, 0) == 0) {
            return 1;
        }
    }
    return 0;
}

// Returns 1 if the item names a tensor of block l, and of an expert, as Hugging Face's files do,
// with or without the model's prefix and the block.
static int freeze_names_tensor_(const FreezeItem_* item, const FileTensor* tensor, int l, int expert) {
    const FileTensorName name = file_tensor_name(tensor->hf_name, l, expert);
    const char* in_block = strstr(tensor->hf_name, "%d.");
    return freeze_is_in_module_(item->name, name.text) ||
           freeze_is_in_module_(item->name, file_tensor_bare_name(name.text)) ||
           (in_block &&
            freeze_is_in_module_(item->name, file_tensor_name(in_block + strlen("%d."), expert, 0).text));
}

// Extent of a parameter that an item names.
typedef enum { FREEZE_NOTHING_, FREEZE_PART_, FREEZE_WHOLE_ } FreezeExtent_;

// Returns the extent of parameter `row` of block l that the item names. Files may have it in
// several parts.
static FreezeExtent_ freeze_extent_(const FreezeItem_* item, const TensorRow* rows, ModelConfig cfg, int row,
                                    int l) {
    const FileTensor* tensors = file_tensors();
    int parts = 0, named = 0;
    for (int i = 0; i < FILE_TENSOR_ROWS; i++) {
        const int is_part =
            tensors[i].row == row && file_tensor_layers(&tensors[i], tensors[i].hf_name, rows, cfg.arch) > 0;
        for (int e = 0; e < rows[row].experts && is_part; e++) {
            parts++;
            named += freeze_names_tensor_(item, &tensors[i], l, e);
        }
    }
    if (tensor_is_absent(&rows[row]) || !tensor_has_layer(&rows[row], l)) {
        return FREEZE_NOTHING_;
    }
    return (named > 0 && named == parts) || freeze_names_(item, rows, row) ? FREEZE_WHOLE_
           : named > 0                                                     ? FREEZE_PART_
                                                                           : FREEZE_NOTHING_;
}

static void freeze_append_(char* text, size_t room, const char* name) {
    snprintf(text + strlen(text), room - strlen(text), "%s%s", text[0] ? ", " : "", name);
}

// Appends the names of all parameters that the model has, and the words for them.
static void freeze_list_names_(const TensorRow* rows, char* text, size_t room) {
    int count;
    const FreezeWord_* words = freeze_words_(&count);
    const char* last = "";
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (!tensor_is_absent(&rows[i])) {
            freeze_append_(text, room, rows[i].name);
        }
    }
    for (int k = 0; k < count * MODEL_PARAMETER_ROWS; k++) {
        const FreezeWord_* word = &words[k / MODEL_PARAMETER_ROWS];
        if (freeze_word_has_(word, rows, k % MODEL_PARAMETER_ROWS) && strcmp(last, word->word) != 0) {
            freeze_append_(text, room, last = word->word);
        }
    }
}

static int freeze_partial_(const FreezeItem_* item, const TensorRow* row, char* error) {
    return error_set(error, "--freeze", "%s is only a part of %s; wanted all of it: %s", item->text,
                     row->name, row->name);
}

static int freeze_unknown_(const FreezeItem_* item, const TensorRow* rows, int is_outside, char* error) {
    char names[512] = "";
    if (is_outside) {
        return error_set(error, "--freeze", "%s: %s is outside of the blocks; wanted it without [...]",
                         item->text, item->name);
    }
    freeze_list_names_(rows, names, sizeof(names));
    return error_set(
        error, "--freeze",
        "no parameter is called '%s'; wanted %s, a pattern of these, or a Hugging Face name such as "
        "h.0.attn.c_attn",
        item->text, names);
}

static int freeze_add_(Freeze* freeze, const FreezeItem_* item, const TensorRow* rows, ModelConfig cfg,
                       char* error) {
    int found = 0, is_outside = 0;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int l = item->first; l <= item->last; l++) {
            const FreezeExtent_ extent = freeze_extent_(item, rows, cfg, i, l);
            const int is_meant = extent == FREEZE_WHOLE_;
            if (extent == FREEZE_PART_) {
                return freeze_partial_(item, &rows[i], error);
            }
            if (is_meant && item->has_blocks && !rows[i].in_block) {
                is_outside = 1;
            } else if (is_meant) {
                freeze->in_block[l] |= tensor_bit(i);
                found = 1;
            }
        }
    }
    return found || freeze_unknown_(item, rows, is_outside, error);
}

// Returns 1 if a parameter of block l has no gradient: it is frozen or absent.
static int freeze_is_still_(const Freeze* freeze, const TensorRow* rows, int i, int l) {
    return tensor_is_absent(&rows[i]) || !tensor_has_layer(&rows[i], l) || freeze_has(freeze, i, l);
}

// Returns 1 if everything in a place is frozen: in block l, or outside of the blocks.
static int freeze_has_all_(const Freeze* freeze, const TensorRow* rows, TensorPlace place, int l) {
    int all = 1;
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        all &= rows[i].place != place || freeze_is_still_(freeze, rows, i, l);
    }
    return all;
}

// Returns 1 if the one tensor of this member is frozen or absent.
static int freeze_has_member_(const Freeze* freeze, const TensorRow* rows, size_t member) {
    int i = 0;
    while (rows[i].member != member) {
        i++;
    }
    return freeze_is_still_(freeze, rows, i, 0);
}

// Returns the lowest block that the backward pass reaches.
static int freeze_first_block_(const Freeze* freeze, const TensorRow* rows, int L) {
    int l = 0;
    if (!freeze_has_member_(freeze, rows, offsetof(ModelParameters, wte)) ||
        !freeze_has_member_(freeze, rows, offsetof(ModelParameters, value_table)) ||
        !freeze_has_member_(freeze, rows, offsetof(ModelParameters, wpe))) {
        return 0;
    }
    while (l < L && freeze_has_all_(freeze, rows, PLACE_BLOCK, l)) {
        l++;
    }
    return l;
}

// Freezes the base of an adapter.
static void freeze_add_base_(Freeze* freeze, const TensorRow* rows, ModelConfig cfg) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS && model_has_adapter(cfg); i++) {
        const TensorSet bit = rows[i].kind == KIND_ADAPTER ? 0 : tensor_bit(i);
        freeze->rows |= bit;
        for (int l = 0; l < cfg.L; l++) {
            freeze->in_block[l] |= bit;
        }
    }
}

// Freezes the parameters that are never trained.
static void freeze_add_fixed_(Freeze* freeze, const TensorRow* rows, int L) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const TensorSet bit = rows[i].kind == KIND_FIXED && !tensor_is_absent(&rows[i]) ? tensor_bit(i) : 0;
        freeze->rows |= bit;
        for (int l = 0; l < L; l++) {
            freeze->in_block[l] |= bit;
        }
    }
}

int freeze_parse(Freeze* freeze, ModelConfig cfg, const char* list, char* error) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    const int L = cfg.L;
    memset(freeze, 0, sizeof(*freeze));
    cfg.share = SHARE_OFF; // a list names layers, whatever they share
    model_parameter_rows(rows, cfg);
    for (const char* text = list; text && *list; text = *text ? text + 1 : NULL) {
        const size_t length = strcspn(text, ",");
        FreezeItem_ item;
        if (!freeze_read_item_(&item, text, length, L, error) ||
            !freeze_add_(freeze, &item, rows, cfg, error)) {
            return 0;
        }
        text += length;
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        int is_whole = list && *list;
        for (int n = 0; n < rows[i].uses; n++) {
            is_whole = is_whole && freeze_has(freeze, i, tensor_layer(&rows[i], n));
        }
        freeze->rows |= is_whole && rows[i].uses > 0 ? tensor_bit(i) : 0;
    }
    freeze_add_fixed_(freeze, rows, L);
    freeze_add_base_(freeze, rows, cfg);
    freeze->first_block = freeze_first_block_(freeze, rows, L);
    if (freeze->first_block == L && freeze_has_all_(freeze, rows, PLACE_ONCE, 0)) {
        return error_set(error, "--freeze", "%s leaves nothing to train", list);
    }
    return 1;
}

Freeze freeze_of(ModelConfig cfg, const char* list) {
    char error[ERROR_BYTES];
    Freeze freeze;
    CHECK(freeze_parse(&freeze, cfg, list, error), "%s", error);
    return freeze;
}

Freeze freeze_of_part(const Freeze* whole, ModelConfig part) {
    const int first = part.part.first_layer, reached = whole->first_block - first,
              copies_wte = !part.has_head && model_has_first(part) && !model_has_last(part);
    TensorRow rows[MODEL_PARAMETER_ROWS];
    Freeze freeze = *whole;
    model_parameter_rows(rows, part);
    freeze.first_block = reached < 0 ? 0 : reached < part.L ? reached : part.L;
    for (int l = 0; l < MODEL_MAX_LAYERS; l++) {
        freeze.in_block[l] = l < part.L ? whole->in_block[first + l] : whole->rows;
    }
    for (int i = 0; i < MODEL_PARAMETER_ROWS && copies_wte; i++) {
        const TensorSet bit = rows[i].member == offsetof(ModelParameters, wte) ? tensor_bit(i) : 0;
        freeze.rows |= bit;
        for (int l = 0; l < MODEL_MAX_LAYERS; l++) {
            freeze.in_block[l] |= bit;
        }
    }
    return freeze;
}

int freeze_has_classifier(const Freeze* freeze, ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows(rows, cfg);
    return freeze_has_member_(
        freeze, rows, cfg.has_head ? offsetof(ModelParameters, head) : offsetof(ModelParameters, wte));
}

int freeze_check_shared(const Freeze* freeze, ModelConfig cfg, char* error) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    model_parameter_rows(rows, cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int n = 0; n < rows[i].uses; n++) {
            const int l = tensor_layer(&rows[i], n),
                      lowest = tensor_lowest_layer(&rows[i], tensor_copy(&rows[i], l));
            if (freeze_has(freeze, i, l) != freeze_has(freeze, i, lowest)) {
                return error_set(error, "--freeze",
                                 "%s of blocks %d and %d is the same one (--share-layers); wanted both "
                                 "frozen, or neither",
                                 rows[i].name, lowest, l);
            }
        }
    }
    return 1;
}

int freeze_first_copy(const Freeze* freeze, ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    int k = 0;
    model_parameter_rows(rows, cfg);
    while (k < model_copies(cfg) &&
           freeze_has_all_(freeze, rows, PLACE_BLOCK, model_group_layer(cfg, 1 + k))) {
        k++;
    }
    return k;
}

double freeze_count(const Freeze* freeze, ModelConfig cfg) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    double count = 0;
    model_parameter_rows(rows, cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        for (int k = 0; k < rows[i].layers; k++) {
            const double elements = (double)(model_rows_in_files(&rows[i], cfg) * rows[i].cols);
            count += freeze_has(freeze, i, tensor_lowest_layer(&rows[i], k)) ? elements : 0;
        }
    }
    return count;
}

double freeze_flops_per_token(const Freeze* freeze, ModelConfig cfg, int T) {
    TensorRow rows[MODEL_PARAMETER_ROWS];
    double saved = 0;
    for (int l = 0; l < freeze->first_block; l++) {
        saved += 4 * model_attention_products(cfg, l, T);
    }
    model_parameter_rows(rows, cfg);
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        const double elements = model_multiplied_elements(&rows[i], cfg);
        for (int n = 0; n < rows[i].uses; n++) {
            const int l = tensor_layer(&rows[i], n);
            const int is_below = rows[i].in_block && l < freeze->first_block;
            saved += elements * (2 * freeze_has(freeze, i, l) + 2 * is_below);
        }
    }
    return model_flops_per_token(cfg, T) - saved;
}

#endif // FREEZE_IMPLEMENTATION

#endif
