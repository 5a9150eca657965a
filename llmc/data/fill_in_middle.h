/*
fill_in_middle.h -- documents rearranged so that a model learns to fill in their middle (Bavarian et
al., "Efficient training of language models to fill in the middle", 2022).

A piece is a document, or a part of one, in a row (packing.h). It is cut at two random places into a
prefix, a middle and a suffix, each possibly empty, and becomes

    PSM    PRE prefix SUF suffix MID middle
    SPM    PRE SUF suffix MID prefix middle        for a share of spm_rate of them

PRE, SUF and MID are special tokens that the tokenizer has for it. End-of-text at either end of the
piece stays there. The target of the last token of the middle is end-of-text, even if the row cuts
the document.

The paper cuts between characters. Data are tokens, so this cuts between tokens.

The share `rate` of the pieces is rearranged: which ones depends only on the seed and on the place
of a piece's first token in its source, so the rows of a run have the same lengths in every epoch.
Cuts and order are drawn again in each epoch. Nothing depends on batches or ranks.
*/
#ifndef LLMC_FILL_IN_MIDDLE_H
#define LLMC_FILL_IN_MIDDLE_H

#include <stddef.h>
#include <stdint.h>

#include "llmc/data/token_files.h"
#include "llmc/tokenizer/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    FIM_MARKS = 3,             // tokens that a rearranged piece gains
    FIM_LEAST = 2 + FIM_MARKS, // length of the shortest one, with marks
};

// All zeros: nothing is rearranged.
typedef struct {
    float rate, spm_rate;
    uint64_t seed;
    int prefix, suffix, middle; // the marks
} FillInMiddle;

// Names of the marks in a family of models: prefix, suffix, middle.
typedef struct {
    const char* of[FIM_MARKS];
} FimNames;

// Returns the names that new vocabularies get.
FimNames fim_names(void);

// Sets the marks to the tokenizer's, under any names known. Returns 0 if it has none.
int fim_find_marks(FillInMiddle* fim, const Tokenizer* tokenizer);

int fim_largest_mark(const FillInMiddle* fim);

// Returns true if the piece that starts at position `at` of its stream is rearranged.
int fim_chooses(const FillInMiddle* fim, uint64_t at);

// Sets out (n + FIM_MARKS) to the piece of n tokens from position `at`, rearranged.
void fim_fill(const FillInMiddle* fim, const TokenStream* stream, uint64_t at, size_t n, int eot,
              uint64_t epoch, int* out);

#ifdef __cplusplus
}
#endif

#ifdef FILL_IN_MIDDLE_IMPLEMENTATION

#include "llmc/base/rand.h"

// ---- marks ----

// clang-format off
static const FimNames FIM_NAMES_[] = {
    {{"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"}},    // Qwen
    {{"<fim_prefix>", "<fim_suffix>", "<fim_middle>"}},          // StarCoder
    {{"<fim-prefix>", "<fim-suffix>", "<fim-middle>"}},          // SantaCoder
    {{"▁<PRE>", "▁<SUF>", "▁<MID>"}},                            // Code Llama
    {{"<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"}},    // DeepSeek
    {{"<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"}}, // GLM
};
// clang-format on

FimNames fim_names(void) { return FIM_NAMES_[0]; }

int fim_find_marks(FillInMiddle* fim, const Tokenizer* tokenizer) {
    for (size_t i = 0; i < sizeof(FIM_NAMES_) / sizeof(FIM_NAMES_[0]); i++) {
        const char* const* names = FIM_NAMES_[i].of;
        fim->prefix = tokenizer_find_added(tokenizer, names[0]);
        fim->suffix = tokenizer_find_added(tokenizer, names[1]);
        fim->middle = tokenizer_find_added(tokenizer, names[2]);
        if (fim->prefix >= 0 && fim->suffix >= 0 && fim->middle >= 0) {
            return 1;
        }
    }
    return 0;
}

int fim_largest_mark(const FillInMiddle* fim) {
    const int largest = fim->prefix > fim->suffix ? fim->prefix : fim->suffix;
    return largest > fim->middle ? largest : fim->middle;
}

// ---- pieces ----

int fim_chooses(const FillInMiddle* fim, uint64_t at) {
    if (fim->rate <= 0) {
        return 0;
    }
    const RandBlock block = rand_block(fim->seed, rand_stream("fill in the middle"), at);
    return block.word[0] * 0x1p-32 < (double)fim->rate;
}

// Lengths of the parts of a piece, and their order.
typedef struct {
    size_t prefix, middle, suffix;
    int is_spm;
} FimCuts_;

// Cuts a piece of n tokens at two of its n + 1 places, which may be the same.
static FimCuts_ fim_cut_(const FillInMiddle* fim, uint64_t at, size_t n, uint64_t epoch) {
    Rand rng = rand_open(fim->seed, rand_stream("cuts around the middle") + epoch);
    rand_seek(&rng, 4 * at); // four words, of which this needs three
    const int is_spm = rand_uniform(&rng) < (double)fim->spm_rate;
    const size_t one = rand_below(&rng, (uint32_t)n + 1), other = rand_below(&rng, (uint32_t)n + 1);
    const size_t first = one < other ? one : other, second = one < other ? other : one;
    const FimCuts_ cuts = {first, second - first, n - second, is_spm};
    return cuts;
}

// Copies n tokens of the stream. Returns the end of the copy.
static int* fim_copy_(const TokenStream* stream, size_t at, size_t n, int* out) {
    if (n > 0) {
        tokens_fill(stream, at, n, out);
    }
    return out + n;
}

void fim_fill(const FillInMiddle* fim, const TokenStream* stream, uint64_t at, size_t n, int eot,
              uint64_t epoch, int* out) {
    const size_t start = (size_t)at, leads = tokens_at(stream, start) == eot,
                 trails = n > leads && tokens_at(stream, start + n - 1) == eot, begin = start + leads;
    const FimCuts_ cuts = fim_cut_(fim, at, n - leads - trails, epoch);
    const size_t middle = begin + cuts.prefix, suffix = middle + cuts.middle;
    if (leads) {
        *out++ = eot;
    }
    *out++ = fim->prefix;
    if (!cuts.is_spm) {
        out = fim_copy_(stream, begin, cuts.prefix, out);
    }
    *out++ = fim->suffix;
    out = fim_copy_(stream, suffix, cuts.suffix, out);
    *out++ = fim->middle;
    if (cuts.is_spm) {
        out = fim_copy_(stream, begin, cuts.prefix, out);
    }
    out = fim_copy_(stream, middle, cuts.middle, out);
    if (trails) {
        *out++ = eot;
    }
}

#endif // FILL_IN_MIDDLE_IMPLEMENTATION

#endif
