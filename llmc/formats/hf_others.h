/*
hf_others.h -- tensors of a model's files that hold none of its parameters: known ones, which may be
there, parts that are ignored with a note on stderr, and all others, which are refused.
*/
#ifndef LLMC_HF_OTHERS_H
#define LLMC_HF_OTHERS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"
#include "llmc/formats/gguf_keys.h"
#include "llmc/formats/safetensors.h"
#include "llmc/model/families.h"

#define HF_CLASSIFIER "lm_head.weight"

// Kinds of tensors that the table does not have.
typedef enum { HF_UNEXPECTED_, HF_KNOWN_, HF_HEAD_, HF_PREDICTION_, HF_VISION_ } HfOther_;

// True for the causal mask and its value, which old versions of transformers saved with the
// weights: h.0.attn.bias.
static inline int hf_is_mask_(const char* name) {
    int l;
    char what[16], end;
    return sscanf(file_tensor_bare_name(name), "h.%d.attn.%15s%c", &l, what, &end) == 2 &&
           (strcmp(what, "bias") == 0 || strcmp(what, "masked_bias") == 0);
}

// True for the frequencies of rotary positions, which old versions also saved, and for GGUF's
// divisors of them; the configuration has them.
static inline int hf_is_frequencies_(ModelConfig cfg, const char* name) {
    int is_factor = strcmp(name, gguf_factors_name(ROPE_LLAMA3, 0)) == 0;
    for (int i = 0; i < GGUF_FACTORS && cfg.scaling.kind == ROPE_LONG; i++) {
        is_factor |= strcmp(name, gguf_factors_name(ROPE_LONG, i)) == 0;
    }
    return is_factor || file_ends_in(name, "rotary_emb.inv_freq");
}

// True for a tensor of the parts that turn pictures into embeddings.
static inline int hf_is_vision_(const char* name) {
    const char* bare = file_tensor_bare_name(name);
    return strncmp(bare, "vision_tower.", strlen("vision_tower.")) == 0 ||
           strncmp(bare, "visual.", strlen("visual.")) == 0 ||
           strncmp(bare, "multi_modal_projector.", strlen("multi_modal_projector.")) == 0;
}

static inline HfOther_ hf_other_(ModelConfig cfg, const char* name) {
    static const char* const heads[] = {"score.", "multiple_choice_head.", "qa_outputs.", "classifier.",
                                        "v_head."};
    if (hf_is_mask_(name) || hf_is_frequencies_(cfg, name) ||
        strcmp(name, HF_CLASSIFIER) == 0) { // see hf_check_classifier_
        return HF_KNOWN_;
    }
    for (size_t i = 0; i < sizeof(heads) / sizeof(heads[0]); i++) {
        if (strncmp(name, heads[i], strlen(heads[i])) == 0) {
            return HF_HEAD_;
        }
    }
    return hf_is_vision_(name) ? HF_VISION_ : HF_UNEXPECTED_;
}

// True for a tensor of a layer after the model's, or beside them, that predicts a further token.
static inline int hf_is_prediction_(const SafeTensorsSet* set, ModelConfig cfg, const char* name) {
    int l;
    if (strncmp(name, "mtp.", strlen("mtp.")) == 0) {
        return 1;
    }
    if (sscanf(file_tensor_bare_name(name), "layers.%d.", &l) != 1 || l < cfg.L) {
        return 0;
    }
    const FileTensorName mark = file_tensor_name("model.layers.%d.eh_proj.weight", l, 0);
    return safetensors_set_find(set, mark.text) ||
           safetensors_set_find(set, file_tensor_bare_name(mark.text));
}

// First names of a list, for a message.
typedef struct {
    int count;
    char text[512];
} HfNames_;

static inline void hf_add_name_(HfNames_* names, const char* name) {
    const size_t used = strlen(names->text);
    if (names->count < 4) {
        snprintf(names->text + used, sizeof(names->text) - used, "%s%s", names->count ? ", " : "", name);
    } else if (names->count == 4) {
        snprintf(names->text + used, sizeof(names->text) - used, ", ...");
    }
    names->count++;
}

static inline int hf_by_address_(const void* a, const void* b) {
    const SafeTensorsView *first = *(const SafeTensorsView*const*)a,
                          *second = *(const SafeTensorsView*const*)b;
    return (first > second) - (first < second);
}

// Refuses unexpected tensors, and notes ignored ones; `used` are those that were read. Sorts them.
static inline void hf_check_others(const SafeTensorsSet* set, ModelConfig cfg, const SafeTensorsView** used,
                                   size_t num_used) {
    static const char* const notes[HF_VISION_ + 1] = {
        NULL, NULL, "heads for other tasks", "layers that predict further tokens", "parts that see pictures"};
    HfNames_ names[HF_VISION_ + 1] = {{0, ""}};
    safetensors_sort(used, num_used, sizeof(*used), hf_by_address_);
    for (size_t f = 0; f < set->num_files; f++) {
        for (size_t t = 0; t < set->files[f].num_tensors; t++) {
            const SafeTensorsView* view = &set->files[f].tensors[t];
            const int is_used = bsearch(&view, used, num_used, sizeof(*used), hf_by_address_) != NULL;
            const HfOther_ other = is_used                                   ? HF_KNOWN_
                                   : hf_is_prediction_(set, cfg, view->name) ? HF_PREDICTION_
                                                                             : hf_other_(cfg, view->name);
            if (other != HF_KNOWN_) {
                hf_add_name_(&names[other], view->name);
            }
        }
    }
    CHECK(!names[HF_UNEXPECTED_].count, "%s: unexpected tensors: %s (%d; the model has %d layers)", set->path,
          names[HF_UNEXPECTED_].text, names[HF_UNEXPECTED_].count, cfg.L);
    for (int i = HF_HEAD_; i <= HF_VISION_; i++) {
        if (names[i].count) {
            printable_line(stderr, "note: %s: ignored %s: %s", set->path, notes[i], names[i].text);
        }
    }
}

#endif
