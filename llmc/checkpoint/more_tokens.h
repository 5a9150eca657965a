/*
more_tokens.h -- initial weights of tokens that a run's tokenizer adds to the model's own tokenizer.

    row of a token = mean of the rows of the tokens that spell it

The model's own tokenizer spells the text of the token. The token embedding gets such a row, and the
classifier if it has a matrix of its own. The blocks understand these rows at once; they would not
understand random ones. A token without text gets zeros.
*/
#ifndef LLMC_MORE_TOKENS_H
#define LLMC_MORE_TOKENS_H

#include "llmc/model/model.h"
#include "llmc/tokenizer/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    int V; // vocabulary of the model's files
    const Tokenizer* own;
    const Tokenizer* extended; // the run's; tokenizer_extends(extended, own)
} MoreTokens;

// Returns the configuration of the model's files.
ModelConfig more_tokens_config(const MoreTokens* more, ModelConfig cfg);

// Sets the rows of added tokens in the fp32 tensors of group g; all other rows are set. `rows` as
// in weights_read (initial_weights.h).
void more_tokens_set(const MoreTokens* more, const TensorRow* rows, int g, float* group);

#ifdef __cplusplus
}
#endif

#ifdef MORE_TOKENS_IMPLEMENTATION

#include <assert.h>
#include <stddef.h>
#include <stdlib.h>

#include "llmc/base/check.h"

ModelConfig more_tokens_config(const MoreTokens* more, ModelConfig cfg) {
    cfg.V = more->V;
    cfg.Vp = model_padded_vocab(cfg.V);
    return cfg;
}

// Returns the first token without a row of its own. The files may lack rows for special tokens that
// follow all others.
static int more_tokens_first_(const MoreTokens* more) {
    return more->own->vocab_size < more->V ? more->own->vocab_size : more->V;
}

// Sets row `id` to the mean of the rows `ids`.
static void more_tokens_mean_(float* tensor, size_t cols, int id, const int* ids, size_t count) {
    for (size_t c = 0; c < cols; c++) {
        double sum = 0;
        for (size_t i = 0; i < count; i++) {
            sum += (double)tensor[(size_t)ids[i] * cols + c];
        }
        tensor[(size_t)id * cols + c] = count > 0 ? (float)(sum / (double)count) : 0;
    }
}

static void more_tokens_set_tensor_(const MoreTokens* more, const TensorRow* row, float* tensor) {
    const int first = more_tokens_first_(more), longest = tokenizer_longest(more->extended);
    int* ids = (int*)check_alloc(tokenizer_most_ids(more->own, (size_t)longest), sizeof(int), "a new token");
    assert((size_t)more->extended->vocab_size <= row->rows);
    for (int id = first; id < more->extended->vocab_size; id++) {
        int length;
        const char* text = tokenizer_decode(more->extended, id, &length);
        const size_t count = tokenizer_encode_rest(more->own, text, (size_t)length, ids);
        more_tokens_mean_(tensor, row->cols, id, ids, count);
    }
    free(ids);
}

void more_tokens_set(const MoreTokens* more, const TensorRow* rows, int g, float* group) {
    for (int i = 0; i < MODEL_PARAMETER_ROWS; i++) {
        if (rows[i].init == INIT_VOCAB && rows[i].layers > 0 && tensor_is_in_group(&rows[i], g)) {
            more_tokens_set_tensor_(more, &rows[i], (float*)tensor_in_group(&rows[i], group));
        }
    }
}

#endif // MORE_TOKENS_IMPLEMENTATION

#endif
