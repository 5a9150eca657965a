/*
settle_model.h -- from options, a named model or a model's files to the sizes of the model.

An option that is "auto" gets the model's size; with a model file the two must agree. Options that
have no meaning for the architecture are refused, and sizes that no model can have.
*/
#ifndef LLMC_SETTLE_MODEL_H
#define LLMC_SETTLE_MODEL_H

#include "llmc/model/config.h"
#include "llmc/setup/options.h"
#include "llmc/setup/run_tokens.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sizes of a new model without a name, and of its run, which trains on a laptop in minutes.
enum { SETUP_LAYERS = 2, SETUP_CHANNELS = 128, SETUP_HEADS = 4, SETUP_CONTEXT = 128 };
enum { SETUP_EXPERTS = 8, SETUP_EXPERTS_USED = 2 };

// Returns the model, and sets all options of its sizes. `path` is a model's files, whose sizes are
// `found`; NULL: a new model.
ModelConfig settle_model(Options* options, const RunData* data, const char* path, ModelConfig found);

#ifdef __cplusplus
}
#endif

#ifdef SETTLE_MODEL_IMPLEMENTATION

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/base/check.h"
#include "llmc/formats/hf_config_families.h"
#include "llmc/model/presets.h"
#include "llmc/model/share_layers.h"

static void settle_size_(int* option, int model, const char* name, const char* path) {
    if (*option == OPTION_AUTO) {
        *option = model;
    } else if (path && *option != model) {
        die_usage("--%s is %d, but the model in %s has %d", name, *option, path, model);
    }
}

static void settle_number_(float* option, float model, const char* name, const char* path) {
    if (*option == OPTION_AUTO) {
        *option = model;
    } else if (path && *option != model) {
        die_usage("--%s is %g, but the model in %s has %g", name, (double)*option, path, (double)model);
    }
}

// Ends the program: --`option` has no meaning in this architecture. `has` tells which ones have it.
static _Noreturn void settle_refuse_(const char* option, Arch arch, int (*has)(const Architecture*)) {
    char words[ARCH_COUNT * 16] = "";
    size_t used = 0;
    int left = 0;
    for (int a = 0; a < ARCH_COUNT; a++) {
        left += has(model_architecture((Arch)a));
    }
    const char* verb = left == 1 ? "has" : "have";
    for (int a = 0; left > 0; a++) {
        if (has(model_architecture((Arch)a))) {
            left--;
            used += (size_t)snprintf(words + used, sizeof(words) - used, "%s%s",
                                     model_architecture((Arch)a)->word,
                                     left > 1 ? ", "
                                     : left   ? " and "
                                              : "");
        }
    }
    die_usage("--%s has no meaning with --arch %s; %s %s it", option, model_architecture(arch)->word, words,
              verb);
}

static int settle_has_experts_(const Architecture* kinds) { return kinds->router != ROUTER_NONE; }
static int settle_has_shared_(const Architecture* kinds) { return kinds->router == ROUTER_SIGMOID; }
static int settle_has_windows_(const Architecture* kinds) { return kinds->windows != WINDOWS_NONE; }
static int settle_has_patterns_(const Architecture* kinds) { return kinds->windows == WINDOWS_ANY; }
static int settle_has_mixer_(const Architecture* kinds) { return kinds->mixer != MIXER_NONE; }
static int settle_has_softcap_(const Architecture* kinds) { return kinds->softcap > 0; }

static int settle_has_additions_(const Architecture* kinds) { return kinds->has_additions; }

static void settle_check_vocab_(const Options* options, const RunData* data, const char* path, int insists) {
    const int V = options->model.vocab_size,
              least = data->has_tokenizer ? tokenizer_least_vocab(&data->tokenizer) : 0,
              tokens = data->has_tokenizer ? data->tokenizer.vocab_size : V;
    if (V < least) {
        die_usage("the vocabulary is %d; wanted at least the %d tokens of the tokenizer (%s)%s", V, least,
                  data->tokenizer.kind,
                  path ? ", or one whose first ids are the tokens of the model's own" : "");
    }
    const int is_foreign = path && !data->is_extended && strcmp(options->data.tokenizer, path) != 0;
    if (data->has_tokenizer && is_foreign && !insists && V > tokens && !run_data_fits(V, tokens)) {
        die_usage("%s has a vocabulary of %d, the tokenizer has %d tokens (%s); wanted the model's own "
                  "--tokenizer, or --vocab-size %d to use this one anyway",
                  path, V, tokens,
                  options->data.tokenizer[0] ? options->data.tokenizer : data->tokenizer.kind, V);
    }
}

// Returns the sizes of a model that has no name and no files.
static ModelConfig settle_unnamed_(const Options* o, int V) {
    const Arch arch = o->model.arch == OPTION_AUTO ? ARCH_GPT2 : (Arch)o->model.arch;
    const Architecture* kinds = model_architecture(arch);
    const ModelPreset sizes = {.arch = arch,
                               .L = SETUP_LAYERS,
                               .C = SETUP_CHANNELS,
                               .NH = SETUP_HEADS,
                               .max_T = o->batch.seq_len > 0 ? o->batch.seq_len : SETUP_CONTEXT,
                               .has_head = kinds->has_head,
                               .softcap = kinds->softcap};
    return model_preset_config(&sizes, V);
}

// Refuses layers with different windows in an architecture in which all have the same one.
static void settle_check_same_windows_(ModelConfig dense, Arch arch) {
    for (int l = 1; l < dense.L; l++) {
        if (model_window(dense, l) != model_window(dense, 0)) {
            die_usage(
                "--experts: layers 0 and %d of the model have different windows; wanted the same in all "
                "layers, as %s has them",
                l, model_architecture(arch)->word);
        }
    }
}

// Returns a dense model with --experts; each expert starts as a copy of the model's MLP.
static ModelConfig settle_upcycled_(const Options* o, ModelConfig dense) {
    const Arch arch = model_arch_with_experts(dense.arch);
    if (dense.E == 0 && o->model.experts != OPTION_AUTO && arch != dense.arch) {
        settle_check_same_windows_(dense, arch);
        dense.arch = arch;
        dense.E = o->model.experts;
    }
    return dense;
}

// Returns the sizes found in a model's files, with more vocabulary rows if the tokenizer extends
// the model's own.
static ModelConfig settle_found_(const Options* o, const RunData* data, const char* path, ModelConfig found) {
    const int V = data->tokenizer.vocab_size;
    if (data->is_extended && tokenizer_least_vocab(&data->own_tokenizer) > found.V) {
        die_usage("%s has a vocabulary of %d; wanted at least the %d tokens of its own tokenizer", path,
                  found.V, tokenizer_least_vocab(&data->own_tokenizer));
    }
    if (data->is_extended && V > found.V) {
        if (found.has_values) {
            die_usage("%s has --value-embeddings for %d tokens; wanted no more tokens, the tokenizer adds %d",
                      path, found.V, V - found.V);
        }
        found.V = V;
        found.Vp = model_padded_vocab(V);
    }
    return settle_upcycled_(o, found);
}

// Returns the model before options change any of it.
static ModelConfig settle_base_(const Options* o, const RunData* data, const char* path, ModelConfig found) {
    const ModelPreset* named = path ? NULL : options_model_size(o);
    const int of_name = named && named->V ? named->V : GPT2_VOCAB,
              V = data->has_tokenizer ? data->tokenizer.vocab_size : of_name;
    return path    ? settle_found_(o, data, path, found)
           : named ? model_preset_config(named, V)
                   : settle_unnamed_(o, V);
}

static void settle_arch_(Options* o, Arch arch, const char* path) {
    if (o->model.arch == OPTION_AUTO) {
        o->model.arch = (int)arch;
    } else if (o->model.arch != (int)arch) {
        die_usage("--arch %s, but the model %s is a %s", model_architecture((Arch)o->model.arch)->word,
                  path ? path : o->model.path, model_architecture(arch)->word);
    }
}

// Refuses experts where the architecture has none. They stay "auto" there.
static void settle_no_experts_(const Options* o, Arch arch) {
    const char* name = o->model.experts != OPTION_AUTO         ? "experts"
                       : o->model.experts_used != OPTION_AUTO  ? "experts-used"
                       : o->model.dense_layers > 0             ? "dense-layers"
                       : o->model.expert_hidden != OPTION_AUTO ? "expert-hidden"
                       : o->model.shared_hidden != OPTION_AUTO ? "shared-hidden"
                                                               : NULL;
    if (name) {
        settle_refuse_(name, arch, settle_has_experts_);
    }
}

static void settle_experts_(Options* o, ModelConfig* cfg, const char* path) {
    const Architecture* kinds = model_architecture(cfg->arch);
    if (!settle_has_experts_(kinds)) {
        settle_no_experts_(o, cfg->arch);
        return;
    }
    settle_size_(&o->model.experts, cfg->E > 0 ? cfg->E : SETUP_EXPERTS, "experts", path);
    const int is_new = cfg->E_used == 0,
              few = o->model.experts < SETUP_EXPERTS_USED ? o->model.experts : SETUP_EXPERTS_USED;
    settle_size_(&o->model.experts_used, is_new ? few : cfg->E_used, "experts-used", is_new ? NULL : path);
    settle_size_(&o->model.dense_layers, cfg->dense_layers, "dense-layers", path);
    if (o->model.dense_layers > 0 && !settle_has_shared_(kinds)) {
        settle_refuse_("dense-layers", cfg->arch, settle_has_shared_);
    }
    if (o->model.dense_layers > 0 && o->model.dense_layers >= cfg->L) {
        die_usage("--dense-layers %d of %d layers; wanted at most %d", o->model.dense_layers, cfg->L,
                  cfg->L - 1);
    }
    cfg->E = o->model.experts, cfg->E_used = o->model.experts_used;
    cfg->dense_layers = o->model.dense_layers;
}

// Returns 8/3 C hidden units, which the experts that process a token share, rounded up to a
// multiple of 64.
static int settle_shared_out_(ModelConfig cfg) {
    const int used = cfg.E_used > 0 ? cfg.E_used : 1;
    return (8 * cfg.C / 3 / used + 63) / 64 * 64;
}

// Returns the default number of hidden units: 4 C, or with a gate 8/3 C, which has as many weights.
static int settle_hidden_(ModelConfig cfg) {
    cfg.E_used = cfg.dense_layers > 0 ? 1 : cfg.E_used;
    return cfg.F > 0 || model_gates(cfg) == 1 ? model_hidden(cfg) : settle_shared_out_(cfg);
}

// Decides the hidden units of an expert, after those of the MLP, which are theirs if all layers
// have experts.
static void settle_expert_hidden_(Options* o, ModelConfig* cfg, const char* path) {
    if (cfg->E == 0) {
        return;
    }
    const int is_own = cfg->dense_layers > 0 && !path && cfg->Fe == 0;
    settle_size_(&o->model.expert_hidden, is_own ? settle_shared_out_(*cfg) : model_expert_hidden(*cfg),
                 "expert-hidden", path);
    if (cfg->dense_layers == 0 && o->model.expert_hidden != model_hidden(*cfg)) {
        die_usage("--expert-hidden %d; wanted --hidden, or --dense-layers 1 or more, whose MLP has others",
                  o->model.expert_hidden);
    }
    cfg->Fe = cfg->dense_layers > 0 ? o->model.expert_hidden : 0;
}

// Decides the hidden units of the shared expert, after the hidden units of the others.
static void settle_shared_expert_(Options* o, ModelConfig* cfg, const char* path) {
    const Architecture* kinds = model_architecture(cfg->arch);
    const int has_shared = settle_has_shared_(kinds), is_new = !path && cfg->Fs == 0;
    if (!settle_has_experts_(kinds)) {
        return;
    }
    settle_size_(&o->model.shared_hidden, has_shared && is_new ? model_expert_hidden(*cfg) : cfg->Fs,
                 "shared-hidden", path);
    if (o->model.shared_hidden > 0 && !has_shared) {
        settle_refuse_("shared-hidden", cfg->arch, settle_has_shared_);
    }
    cfg->Fs = o->model.shared_hidden;
}

// Decides the sizes that GPT-2 does not choose: its own are implied, and 0 in the configuration.
static void settle_heads_(Options* o, ModelConfig* cfg, const char* path) {
    const int is_implied = cfg->HS == 0 && (o->model.head_size == OPTION_AUTO || cfg->arch == ARCH_GPT2);
    if (is_implied && cfg->C % cfg->NH) {
        die_usage("--channels %d is not a multiple of --heads %d", cfg->C, cfg->NH);
    }
    settle_size_(&o->model.head_size, model_head_size(*cfg), "head-size", path);
    settle_size_(&o->model.kv_heads, model_key_heads(*cfg), "kv-heads", path);
    settle_size_(&o->model.hidden, settle_hidden_(*cfg), "hidden", path);
    settle_size_(&o->model.own_head, cfg->has_head, "own-head", path);
    if (cfg->arch != ARCH_GPT2) {
        cfg->HS = o->model.head_size, cfg->KV = o->model.kv_heads, cfg->F = o->model.hidden,
        cfg->has_head = o->model.own_head;
    } else if (o->model.head_size != model_head_size(*cfg) || o->model.kv_heads != cfg->NH ||
               o->model.hidden != model_hidden(*cfg) || o->model.own_head) {
        die_usage(
            "--head-size, --kv-heads, --hidden and --own-head have no meaning with --arch gpt2; --arch llama "
            "has them");
    }
}

// Derives the sizes of a new model's latents: half of a head turns, values are as wide as heads,
// and latents are a quarter of the channels in whole 64s, those of queries twice as wide.
static void settle_latent_(const Options* o, ModelConfig* cfg) {
    if (model_has_latent(*cfg) && o->model.kv_heads != cfg->NH) {
        die_usage("--kv-heads %d, --heads %d, --arch %s, all of whose heads share a latent; wanted as many",
                  o->model.kv_heads, cfg->NH, model_architecture(cfg->arch)->word);
    }
    if (model_has_latent(*cfg) && cfg->latent.rank == 0) {
        cfg->rope_dims = model_head_size(*cfg) / 4 * 2;
        const int rank = (cfg->C / 4 + 63) / 64 * 64;
        cfg->latent = (ModelLatent){2 * rank, rank, model_head_size(*cfg), 0};
    }
}

static void settle_positions_(Options* o, ModelConfig* cfg, const char* path) {
    const int turns = model_architecture(cfg->arch)->positions == POSITIONS_ROPE;
    settle_number_(&o->model.rope_base, turns ? model_rope_base(*cfg) : 0, "rope-base", path);
    if (!turns && o->model.rope_base > 0) {
        die_usage("--rope-base has no meaning with --arch %s, whose positions are learned",
                  model_architecture(cfg->arch)->word);
    }
    if (turns && o->model.rope_base <= 0) {
        die_usage("--rope-base %g; wanted a base above 0", (double)o->model.rope_base);
    }
    cfg->rope_base = o->model.rope_base;
}

// Sets the layers that have the window: letter l of the pattern, which repeats, is S; the last
// layer sees everything. Without a pattern those that have it in the family, or all.
static void settle_windows_(ModelConfig* cfg, const char* pattern) {
    const size_t length = strlen(pattern);
    const int every = hf_families[cfg->arch].full_every;
    memset(cfg->windows, 0, sizeof(cfg->windows));
    for (int l = 0; l < cfg->L && cfg->window > 0; l++) {
        const int by_family = every == 0 || (l + 1) % every != 0,
                  by_pattern = length > 0 && pattern[(size_t)l % length] == 'S' && l < cfg->L - 1;
        cfg->windows[l / 8] |= (uint8_t)((length > 0 ? by_pattern : by_family) << l % 8);
    }
}

// Sets the layers of a new model that do not turn: those of its family.
static void settle_rests_(ModelConfig* cfg) {
    const HfFamily* family = &hf_families[cfg->arch];
    const int every = family->unrotated_every;
    for (int l = 0; l < cfg->L; l++) {
        const int by_window = family->rests_without_window && cfg->window > 0 && !model_window(*cfg, l),
                  rests = by_window || (every > 0 && (l + 1) % every == 0);
        cfg->unrotated[l / 8] |= (uint8_t)(rests << l % 8);
    }
    cfg->window_rope_base = cfg->window > 0 ? cfg->window_rope_base : 0;
}

static void settle_window_(Options* o, ModelConfig* cfg, const char* path) {
    const Architecture* kinds = model_architecture(cfg->arch);
    const char *pattern = o->model.window_pattern, *stages = o->model.window_schedule;
    const ModelConfig found = *cfg;
    settle_size_(&o->model.window, cfg->window, "window", path);
    cfg->window = o->model.window;
    if (o->model.window > 0 && !settle_has_windows_(kinds)) {
        settle_refuse_(stages[0] ? "window-schedule" : "window", cfg->arch, settle_has_windows_);
    }
    if (pattern[0] && !settle_has_patterns_(kinds)) {
        settle_refuse_("window-pattern", cfg->arch, settle_has_patterns_);
    }
    if (stages[0] && o->model.window > cfg->max_T) {
        die_usage("--window-schedule %s, --context %d; wanted windows of at most the context", stages,
                  cfg->max_T);
    }
    if (pattern[strspn(pattern, "SL")] || (pattern[0] && o->model.window == 0)) {
        die_usage("--window-pattern %s; wanted letters S and L, with --window", pattern);
    }
    if (!path || pattern[0]) {
        settle_windows_(cfg, pattern);
    }
    if (!path) {
        settle_rests_(cfg);
    }
    if (path && memcmp(cfg->windows, found.windows, sizeof(found.windows)) != 0) {
        die_usage("--window-pattern %s, but the model in %s has another", pattern, path);
    }
}

// Sets the layers that have a mixer: the list's words, each as often as the number before it says,
// repeat. Returns 0 if the architecture has no such layers.
static int settle_parse_types_(ModelConfig* cfg, const char* list) {
    const char *at = list, *mixed = mixer_parts(model_mixer(*cfg)).word;
    uint8_t types[MODEL_MAX_LAYERS];
    size_t count = 0;
    do {
        size_t times = strspn(at, "0123456789"), is_counted = 0 < times && times < 5 && at[times] == 'x';
        const char* word = at + (is_counted ? times + 1 : 0);
        const size_t length = strcspn(word, ",");
        const int is_mixed = length == strlen(mixed) && strncmp(word, mixed, length) == 0,
                  is_full = length == strlen("full") && strncmp(word, "full", length) == 0;
        times = is_counted ? (size_t)atoi(at) : 1;
        if ((!is_mixed && !is_full) || times < 1 || times > MODEL_MAX_LAYERS - count) {
            return 0;
        }
        memset(types + count, is_mixed, times);
        count += times;
        at = word + length;
    } while (*at++ == ',');
    memset(cfg->mixed, 0, sizeof(cfg->mixed));
    for (int l = 0; l < cfg->L; l++) {
        if (types[(size_t)l % count]) {
            layer_add(cfg->mixed, l);
        }
    }
    return 1;
}

// Derives the sizes of a new model's mixer: heads as attention's, in whole 8s.
static ModelMixer settle_new_mixer_(ModelConfig cfg) {
    const int has_heads = mixer_parts(model_mixer(cfg)).has_heads, heads = has_heads * cfg.NH,
              size = has_heads * ((model_head_size(cfg) + 7) / 8 * 8);
    return (ModelMixer){hf_families[cfg.arch].mixer.taps, heads, heads, size, size};
}

// Decides which layers have a mixer in the place of attention, and its sizes.
static void settle_mixer_(const Options* o, ModelConfig* cfg, const char* path) {
    const ModelPreset* named = path ? NULL : options_model_size(o);
    const MixerParts parts = mixer_parts(model_mixer(*cfg));
    const char *given = o->model.layer_types, *of_name = named ? named->layer_types : NULL,
               *list = given[0]  ? given
                       : of_name ? of_name
                                 : parts.layers;
    const ModelConfig found = *cfg;
    if (model_mixer(*cfg) == MIXER_NONE) {
        if (given[0]) {
            settle_refuse_("layer-types", cfg->arch, settle_has_mixer_);
        }
        return;
    }
    if ((!path || given[0]) && !settle_parse_types_(cfg, list)) {
        die_usage("--layer-types %s; wanted a list of full and %s, perhaps each with a number, as %s", list,
                  parts.word, parts.layers);
    }
    if (path && memcmp(cfg->mixed, found.mixed, sizeof(found.mixed)) != 0) {
        die_usage("--layer-types %s, but the model in %s has others", given, path);
    }
    cfg->mixer = cfg->mixer.taps > 0 ? cfg->mixer : settle_new_mixer_(*cfg);
}

static void settle_softcap_(Options* o, ModelConfig* cfg, const char* path) {
    settle_number_(&o->model.softcap, cfg->softcap, "softcap", path);
    if (o->model.softcap > 0 && !settle_has_softcap_(model_architecture(cfg->arch))) {
        settle_refuse_("softcap", cfg->arch, settle_has_softcap_);
    }
    cfg->softcap = o->model.softcap;
}

// Decides what the architecture may have beside what its class in transformers has.
static void settle_additions_(Options* o, ModelConfig* cfg, const char* path) {
    settle_size_(&o->model.scales, cfg->has_scales, "residual-scales", path);
    settle_size_(&o->model.values, cfg->has_values, "value-embeddings", path);
    cfg->has_scales = o->model.scales, cfg->has_values = o->model.values;
    if (model_has_additions(*cfg) && !settle_has_additions_(model_architecture(cfg->arch))) {
        settle_refuse_(model_addition_word(*cfg), cfg->arch, settle_has_additions_);
    }
}

static int settle_share_layers_(const Options* options, ModelConfig cfg) {
    char error[ERROR_BYTES];
    if (!share_parse(&cfg.share, cfg.L, options->model.share_layers, error) || !share_check(cfg, error)) {
        die_usage("%s", error);
    }
    return cfg.share;
}

static void settle_check_sizes_(ModelConfig cfg) {
    char error[ERROR_BYTES];
    if (!model_check_config(cfg, "the model", error)) {
        die_usage("%s", error);
    }
}

// Marks options whose value the architecture fixes. A resumed run has their values from its
// checkpoint, where they are not "auto".
static void settle_mark_fixed_(Options* o, Arch arch) {
    const Architecture* kinds = model_architecture(arch);
    const struct {
        const char* name;
        int is_fixed;
    } options[] = {
        {"kv-heads", arch == ARCH_GPT2},
        {"head-size", arch == ARCH_GPT2},
        {"hidden", arch == ARCH_GPT2},
        {"own-head", arch == ARCH_GPT2},
        {"softcap", !settle_has_softcap_(kinds)},
        {"window", !settle_has_windows_(kinds)},
        {"residual-scales", !kinds->has_additions},
        {"value-embeddings", !kinds->has_additions},
        {"rope-base", kinds->positions != POSITIONS_ROPE},
    };
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
        if (options[i].is_fixed) {
            options_mark_fixed(o, options[i].name);
        }
    }
}

ModelConfig settle_model(Options* options, const RunData* data, const char* path, ModelConfig found) {
    const int insists = options->model.vocab_size != OPTION_AUTO; // also in a run that resumes
    ModelConfig cfg = settle_base_(options, data, path, found);
    options_mark_following(options);
    settle_arch_(options, cfg.arch, path);
    settle_size_(&options->model.layers, cfg.L, "layers", path);
    settle_size_(&options->model.channels, cfg.C, "channels", path);
    settle_size_(&options->model.heads, cfg.NH, "heads", path);
    settle_size_(&options->model.context, cfg.max_T, "context", path);
    settle_size_(&options->model.vocab_size, cfg.V, "vocab-size", path);
    cfg.L = options->model.layers, cfg.C = options->model.channels, cfg.NH = options->model.heads;
    cfg.max_T = options->model.context, cfg.V = options->model.vocab_size;
    cfg.Vp = path ? cfg.Vp : model_padded_vocab(cfg.V);
    settle_experts_(options, &cfg, path);
    settle_heads_(options, &cfg, path);
    settle_latent_(options, &cfg);
    settle_expert_hidden_(options, &cfg, path);
    settle_shared_expert_(options, &cfg, path);
    settle_positions_(options, &cfg, path);
    settle_window_(options, &cfg, path);
    settle_mixer_(options, &cfg, path);
    settle_softcap_(options, &cfg, path);
    settle_additions_(options, &cfg, path);
    cfg.share = settle_share_layers_(options, cfg);
    cfg.initial = model_architecture(cfg.arch)->initial;
    cfg.dropout = options->optimizer.dropout, cfg.attention_dropout = options->optimizer.attention_dropout;
    settle_mark_fixed_(options, cfg.arch);
    settle_check_vocab_(options, data, path, insists);
    settle_check_sizes_(cfg);
    return cfg;
}

#endif // SETTLE_MODEL_IMPLEMENTATION

#endif
