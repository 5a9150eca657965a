/*
generate.h -- generates text: continues prompts with a trained model.

    --prompt TEXT          prints one continuation on standard output, token by token
    --interactive          continues each line of standard input. The lines exit and quit end it;
                           `:temperature 0.5` sets an option from now on, : shows the options. With
                           --chat the lines are messages of one chat; /reset starts another
    --prompts FILE.jsonl   continues one prompt per line, {"prompt": "..."}. Writes the texts in the
                           same order, as lines {"prompt", "text", "tokens", "stop"}, to standard
                           output, or to --out-texts, which gets its name when it is complete

`stop` is "end" (of the document), "string" (one of --stop) or "tokens" (the limit of --tokens).
Texts are independent: prompt i has its own random numbers. Only text goes to standard output;
messages go to standard error.
*/
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include "llmc/model/model.h"
#include "llmc/run/run.h"

#ifdef __cplusplus
extern "C" {
#endif

// Checks the options, reads the prompts, and plans. Sets run->generate.
void generate_open(Run* run, Ranks ranks);

// Generates all texts that the options ask for. The model is open.
void generate_texts(Run* run, Model* model);

// Closes `g`, which may be NULL.
void generate_close(Generate* g);

#ifdef __cplusplus
}
#endif

#ifdef GENERATE_IMPLEMENTATION

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/base/byte_order_mark.h"
#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/enum_words.h"
#include "llmc/base/file.h"
#include "llmc/base/json.h"
#include "llmc/base/printable.h"
#include "llmc/base/rand.h"
#include "llmc/base/signals.h"
#include "llmc/base/terminal.h"
#include "llmc/generate/dialog.h"
#include "llmc/generate/generator.h"
#include "llmc/setup/options_values.h"
#include "llmc/plan/plan.h"
#include "llmc/setup/run_tokens.h"
#include "llmc/run/run_files.h"
#include "llmc/setup/resolve.h"
#include "llmc/setup/options.h"
#include "llmc/checkpoint/model_path.h"
#include "llmc/comm/comm.h"
#include "llmc/generate/text_stream.h"
#include "llmc/tokenizer/chat_format.h"
#include "llmc/tokenizer/chat_marks.h"
#include "llmc/tokenizer/model_card.h"
#include "llmc/log/text_wrap.h"

#define GENERATE_MAX_FILE_ ((size_t)1 << 32) // largest file of prompts

// A prompt of --prompts, and the text generated for it.
typedef struct {
    const char* text; // the prompt, in the text of the file
    size_t bytes;
    int *ids, count;
    Rand rng;
    int is_done;
    TextStream out;
    int made;
    GeneratorEnd end;
} GeneratePrompt_;

// Tokens of prompts and of texts, and the time that they took.
typedef struct {
    int64_t read, made;
    double read_s, made_s;
} GenerateSpeed_;

struct Generate {
    Run* run;
    Options options; // sampling options; lines of --interactive change some
    int V;           // tokens of the model
    GenerateSpeed_ speed;
    int64_t lines;   // lines of --interactive so far
    int *ids, count; // tokens of the prompt (T + 1)
    int is_chat;     // lines of --interactive are messages of `dialog`
    Dialog dialog;

    // --prompts
    char* file;               // text of the file
    GeneratePrompt_* prompts; // prompts that point into it
    int num_prompts;
    FILE* out; // file for the texts
    const char* out_name;
    FileWriter texts; // --out-texts, if given
};

// ---- texts ----

static Rand generate_random_(const Generate* g, int64_t prompt) {
    return rand_open(g->options.data.seed, rand_stream("texts") + (uint64_t)prompt);
}

// Ends the program if the logits are not finite: the model has diverged.
static void generate_check_(const Generate* g, const GeneratorSequence* sequence) {
    CHECK(sequence->end != GENERATOR_DIVERGED, "%s: the model's logits are not finite",
          g->options.model.path);
}

static void generate_begin_(Generate* g, int slot, const int* ids, int count, Rand* rng) {
    GeneratorSequence* sequence = &g->run->generator.sequences[slot];
    const double start_s = time_now_s();
    text_stream_begin(&sequence->stream);
    generator_begin(&g->run->generator, slot, ids, count, g->options.texts.tokens, rng);
    g->speed.read += count;
    g->speed.read_s += time_now_s() - start_s;
    generate_check_(g, sequence);
}

// Decodes one token of each unfinished sequence.
static void generate_advance_(Generate* g) {
    Generator* generator = &g->run->generator;
    const double start_s = time_now_s();
    for (int s = 0; s < generator->model.slots; s++) {
        g->speed.made += generator->sequences[s].in_use && generator->sequences[s].end == STILL_GENERATING;
    }
    generator_advance(generator);
    g->speed.made_s += time_now_s() - start_s;
    for (int s = 0; s < generator->model.slots; s++) {
        generate_check_(g, &generator->sequences[s]);
    }
}

// Returns the file for notes, which rank 0 alone prints: stdout of the others is /dev/null.
static FILE* generate_notes_(const Generate* g) { return run_is_first(g->run) ? stderr : stdout; }

static void generate_print_speed_(const Generate* g) {
    const GenerateSpeed_* v = &g->speed;
    FILE* notes = generate_notes_(g);
    double peak_mib, beside_mib;
    fprintf(notes, "prompt: %lld tokens, %.1f tok/s", (long long)v->read, (double)v->read / v->read_s);
    if (v->made > 0) {
        fprintf(notes, "; text: %lld tokens, %.1f tok/s", (long long)v->made, (double)v->made / v->made_s);
    }
    g->run->trainer->memory(&peak_mib, &beside_mib);
    fprintf(notes, "; peak memory %.0f MiB\n", peak_mib);
}

// ---- one text at a time ----

static void generate_flush_(FILE* file, const char* name) {
    CHECK(fflush(file) == 0 && !ferror(file), "%s: cannot write: %s", name, strerror(errno));
}

// Prints `shown`, the visible part of a prompt, then its continuation token by token, and --suffix:
// with lines wrapped at words on a terminal, unchanged elsewhere.
static void generate_print_(Generate* g, const char* shown, const int* ids, int count, int64_t prompt) {
    const size_t columns = text_wrap_columns(stdout), unknown = isatty(STDOUT_FILENO) ? 80 : 0;
    GeneratorSequence* sequence = &g->run->generator.sequences[0];
    TextWrap wrap;
    text_wrap_begin(&wrap, stdout, columns ? columns : unknown, "");
    text_wrap_put(&wrap, shown, strlen(shown));
    Rand rng = generate_random_(g, prompt);
    generate_begin_(g, 0, ids, count, &rng);
    while (sequence->end == STILL_GENERATING) {
        text_stream_print(&sequence->stream, &wrap, TEXT_GOES_ON);
        generate_flush_(stdout, "standard output");
        generate_advance_(g);
    }
    text_stream_print(&sequence->stream, &wrap, TEXT_ENDS);
    text_wrap_put(&wrap, g->options.texts.suffix, strlen(g->options.texts.suffix));
    text_wrap_end(&wrap);
    fputc('\n', stdout);
    generate_flush_(stdout, "standard output");
    sequence->in_use = 0;
}

static void generate_one_(Generate* g) {
    generate_print_(g, g->options.samples.prompt, g->ids, g->count, 0);
    generate_print_speed_(g);
}

// ---- talking in turns ----

// Starts a chat if the options or the files of the model say so.
static void generate_open_chat_(Generate* g) {
    Options* o = &g->options;
    const Tokenizer* tokenizer = &g->run->data.tokenizer;
    const int can_chat = tokenizer->encoder != NULL, wants = o->texts.chat >= (int)CHAT_ON;
    if (wants && !can_chat) {
        die_usage("--chat on: the tokenizer cannot encode any text; wanted --chat off");
    }
    if (!o->texts.interactive || o->texts.chat == 0 || !can_chat) {
        return;
    }
    if (o->texts.chat >= (int)CHAT_CHATML) {
        chat_choose(tokenizer->bpe, (ChatWord)o->texts.chat);
    }
    if (o->texts.chat_date[0]) {
        run_data_date_chats(tokenizer->bpe, o->texts.chat_date);
    }
    const ModelCard* card = &tokenizer->bpe->card;
    dialog_open(&g->dialog, tokenizer->encoder, o->texts.system);
    g->is_chat = wants || card->chat_known != CHAT_UNKNOWN;
    if (!g->is_chat && card->chat_template && o->texts.chat == OPTION_AUTO) {
        fprintf(stderr,
                "note: the model has a chat_template whose format is not known; --chat chatml, or another "
                "format, talks in turns\n");
    }
    if (g->is_chat && g->dialog.marks.turn_end < 0) {
        if (o->texts.stop.count == OPTION_LIST_MAX) {
            die_usage("--stop is given %d times; wanted less: the marks of the chat are plain text, and one "
                      "more string ends an answer",
                      OPTION_LIST_MAX);
        }
        o->texts.stop.text[o->texts.stop.count++] = g->dialog.marks.ending;
    }
    if (!g->is_chat && o->texts.system[0]) {
        die_usage("--system is for chats, and %s has no chat_template.jinja; wanted --chat on as well",
                  o->model.path);
    }
}

// Sets the prompt to the chat so far, and leaves room for an answer. Returns 0 with a note if the
// last message is too long.
static int generate_chat_prompt_(Generate* g) {
    const int T = g->options.batch.seq_len, starts = g->options.samples.start_token != 0;
    const int answer = g->options.texts.tokens < T / 4 ? g->options.texts.tokens : T / 4;
    int forgotten;
    g->ids[0] = run_data_eot(&g->run->data, g->V);
    const int count = dialog_prompt(&g->dialog, g->ids + starts, T - starts - answer, &forgotten);
    g->count = count + starts;
    if (forgotten > 0) {
        fprintf(stderr, "note: the context of %d tokens is full: forgot the oldest %d turn%s\n", T, forgotten,
                words_s(forgotten));
    }
    if (count == 0) {
        fprintf(stderr, "note: the message is too long for the context of %d tokens\n", T);
    }
    return count > 0;
}

// Answers a message.
static void generate_reply_(Generate* g, const char* line, size_t bytes) {
    const GenerateSpeed_ none = {0, 0, 0, 0};
    const TextStream* answer = &g->run->generator.sequences[0].stream;
    if (bytes == 0) {
        return;
    }
    dialog_add(&g->dialog, CHAT_USER, line, bytes);
    if (!generate_chat_prompt_(g)) {
        dialog_take_back(&g->dialog);
        return;
    }
    g->speed = none;
    generate_print_(g, "", g->ids, g->count, g->lines++);
    dialog_add(&g->dialog, CHAT_ASSISTANT, answer->bytes, answer->count);
    generate_print_speed_(g);
}

// ---- lines ----

// Continues a line of --interactive, which has no newline.
static void generate_answer_(Generate* g, const char* line, size_t bytes) {
    const GenerateSpeed_ none = {0, 0, 0, 0};
    char error[ERROR_BYTES];
    PromptIds prompt = {g->ids, g->options.batch.seq_len, 0};
    if (!run_data_try_prompt(&prompt, &g->run->data, &g->options, g->V, line, bytes, error)) {
        fprintf(stderr, "note: %s\n", error);
        return;
    }
    g->count = prompt.count;
    g->speed = none;
    generate_print_(g, "", g->ids, g->count, g->lines++);
    generate_print_speed_(g);
}

// Options that a line of --interactive may set.
static const char* const GENERATE_SETTINGS_[] = {"--temperature", "--top-k", "--top-p", "--tokens"};
enum { GENERATE_NUM_SETTINGS_ = sizeof(GENERATE_SETTINGS_) / sizeof(GENERATE_SETTINGS_[0]) };

static void generate_show_settings_(const Generate* g) {
    char value[OPTION_TEXT_BYTES];
    for (int i = 0; i < GENERATE_NUM_SETTINGS_; i++) {
        const OptionRow* row = option_find(GENERATE_SETTINGS_[i], strlen(GENERATE_SETTINGS_[i]));
        fprintf(stderr, "%s:%s %s", i ? "  " : "", row->name, option_text(&g->options, row, value));
    }
    fputs("  exit\n", stderr);
}

// Sets an option, as ":temperature 0.5" does; `line` is the part after the colon.
static void generate_set_(Generate* g, const char* line) {
    char name[OPTION_TEXT_BYTES], wanted[OPTION_TEXT_BYTES];
    const int length = (int)strcspn(line, " =");
    const char* value = line + length + strspn(line + length, " =");
    snprintf(name, sizeof(name), "--%.*s", length < 64 ? length : 64, line);
    for (int i = 0; i < GENERATE_NUM_SETTINGS_; i++) {
        if (strcmp(name, GENERATE_SETTINGS_[i]) != 0) {
            continue;
        }
        const OptionRow* row = option_find(name, strlen(name));
        if (!option_set(&g->options, row, value)) {
            fprintf(stderr, "note: :%s is '%s'; wanted %s\n", row->name,
                    printable_copy(name, sizeof(name), value), option_wanted(row, wanted));
        }
        break;
    }
    generate_show_settings_(g);
}

// Handles a line that is no prompt: it starts with a colon, or is exit, quit or, in a chat, /reset.
// Returns 0 for a prompt.
static int generate_obey_(Generate* g, const char* line, int* is_end) {
    const int is_reset = g->is_chat && strcmp(line, "/reset") == 0;
    *is_end = strcmp(line, "exit") == 0 || strcmp(line, "quit") == 0;
    if (line[0] == ':') {
        generate_set_(g, line + 1);
    }
    if (is_reset) {
        dialog_reset(&g->dialog);
        fputs("note: a new chat\n", stderr);
    }
    return *is_end || is_reset || line[0] == ':';
}

static void generate_interactive_(Generate* g) {
    const int is_terminal = isatty(STDIN_FILENO);
    char *line = NULL, error[ERROR_BYTES];
    size_t room = 0, mark = 0;
    for (int is_first = 1, is_end = 0; !is_end; is_first = 0, mark = 0) {
        fputs(is_terminal ? "> " : "", stderr);
        const size_t length = file_read_line(stdin, "standard input", &line, &room);
        if (length == 0) {
            break;
        }
        CHECK(!is_first || byte_order_mark("standard input", line, length, &mark, error), "%s", error);
        const size_t bytes = length - (line[length - 1] == '\n');
        line[bytes] = '\0'; // in place of the newline, or after the last byte
        if (!generate_obey_(g, line + mark, &is_end)) {
            (g->is_chat ? generate_reply_ : generate_answer_)(g, line + mark, bytes - mark);
        }
    }
    fputs(is_terminal ? "\n" : "", stderr);
    free(line);
}

// ---- the prompts of a file ----

// Reads the prompt of a line, {"prompt": "..."}; ignores other members.
static int generate_try_parse_(GeneratePrompt_* prompt, char* line, size_t bytes, const char* place,
                               char* error) {
    JsonReader r = json_reader(place, line, bytes, error);
    const char* key;
    size_t length;
    int more = 0, found = 0, ok = json_take(&r, '{');
    for (int n = 0; ok && (more = json_text_member(&r, n ? JSON_NEXT : JSON_FIRST, &key, &length)) > 0; n++) {
        const int is_prompt = length == strlen("prompt") && memcmp(key, "prompt", length) == 0;
        ok = is_prompt ? json_text(&r, &prompt->text, &prompt->bytes) : json_skip(&r);
        found += is_prompt;
    }
    if (!ok || more < 0 || !json_end(&r)) {
        return 0;
    }
    return found == 1 || error_set(error, place, "%s; wanted one {\"prompt\": \"...\"}",
                                   found ? "two prompts" : "no prompt");
}

// Encodes the prompt of a line, and appends it.
static void generate_add_(Generate* g, char* line, size_t bytes, int number) {
    char place[PATH_MAX + 32], error[ERROR_BYTES];
    const size_t so_far = (size_t)g->num_prompts;
    g->prompts = (GeneratePrompt_*)check_grow(g->prompts, so_far, sizeof(GeneratePrompt_), "prompts");
    GeneratePrompt_* p = &g->prompts[g->num_prompts];
    memset(p, 0, sizeof(*p));
    snprintf(place, sizeof(place), "%s:%d", g->options.texts.prompts, number);
    CHECK(generate_try_parse_(p, line, bytes, place, error), "%s", error);
    PromptIds prompt = {g->ids, g->options.batch.seq_len, 0};
    CHECK(run_data_try_prompt(&prompt, &g->run->data, &g->options, g->V, p->text, p->bytes, error), "%s: %s",
          place, error);
    p->count = prompt.count;
    p->ids = (int*)check_alloc((size_t)p->count, sizeof(int), "prompt");
    memcpy(p->ids, g->ids, (size_t)p->count * sizeof(int));
    p->rng = generate_random_(g, g->num_prompts++);
}

// Reads the file of --prompts.
static void generate_read_(Generate* g) {
    const Options* o = &g->options;
    char error[ERROR_BYTES];
    size_t bytes;
    int number = 1;
    CHECK(byte_order_text(o->texts.prompts, GENERATE_MAX_FILE_, &g->file, &bytes, error), "%s", error);
    for (size_t at = 0; at < bytes; number++) {
        const size_t length = strcspn(g->file + at, "\n");
        if (strspn(g->file + at, " \t\r") < length) {
            generate_add_(g, g->file + at, length, number);
        }
        at += length + 1;
    }
    CHECK(g->num_prompts > 0, "%s: no prompts", o->texts.prompts);
}

// Opens the file for the texts, after all checks.
static void generate_open_out_(Generate* g) {
    const char* path = g->options.texts.out;
    g->out = stdout;
    g->out_name = "standard output";
    if (path[0] && run_is_first(g->run)) {
        file_open(&g->texts, path);
        g->out = g->texts.file;
        g->out_name = path;
    }
}

static void generate_write_(FILE* file, const GeneratePrompt_* p) {
    static const char* const ends[] = {"", "end", "string", "tokens"}; // words of GeneratorEnd
    fputs("{\"prompt\":", file);
    json_print_string(file, p->text, p->bytes);
    fputs(",\"text\":", file);
    json_print_string(file, p->out.bytes, p->out.count);
    fprintf(file, ",\"tokens\":%d,\"stop\":\"%s\"}\n", p->made, ends[p->end]);
}

// Moves a finished text out of its slot.
static void generate_take_(GeneratePrompt_* prompt, GeneratorSequence* sequence) {
    prompt->is_done = 1;
    prompt->made = sequence->generated;
    prompt->end = sequence->end;
    text_stream_add(&prompt->out, sequence->stream.bytes, sequence->stream.count);
    sequence->in_use = 0;
}

// Prints the progress: at most five times a second on a terminal, else every half minute.
static void generate_progress_(const Generate* g, int done, int count, double* last_s) {
    const int is_terminal = terminal_rewrites(STDERR_FILENO);
    const double now_s = time_now_s();
    if (now_s - *last_s > (is_terminal ? 0.2 : 30)) {
        fprintf(generate_notes_(g), "%s%d of %d texts%s", is_terminal ? "\r" : "", done, count,
                is_terminal ? "" : "\n");
        *last_s = now_s;
    }
}

// Puts new prompts into the slots of finished texts, until all slots are busy or no prompt is left.
// Returns true if any slot is busy.
static int generate_fill_(Generate* g, int* next, int* of_slot) {
    int busy = 0;
    for (int s = 0; s < g->run->generator.model.slots; s++) {
        GeneratorSequence* sequence = &g->run->generator.sequences[s];
        for (;;) {
            if (sequence->in_use && sequence->end != STILL_GENERATING) {
                generate_take_(&g->prompts[of_slot[s]], sequence);
            }
            if (sequence->in_use || *next == g->num_prompts) {
                break;
            }
            of_slot[s] = (*next)++;
            GeneratePrompt_* p = &g->prompts[of_slot[s]];
            generate_begin_(g, s, p->ids, p->count, &p->rng);
        }
        busy |= sequence->in_use;
    }
    return busy;
}

static void generate_all_(Generate* g) {
    int* of_slot = (int*)check_alloc((size_t)g->run->generator.model.slots, sizeof(int), "texts");
    int next = 0, written = 0, busy;
    double last_s = time_now_s();
    generate_open_out_(g);
    do {
        busy = generate_fill_(g, &next, of_slot);
        for (; written < g->num_prompts && g->prompts[written].is_done; written++) {
            generate_write_(g->out, &g->prompts[written]);
            text_stream_close(&g->prompts[written].out);
            free(g->prompts[written].ids);
            generate_flush_(g->out, g->out_name);
        }
        generate_progress_(g, written, g->num_prompts, &last_s);
        if (busy) {
            generate_advance_(g);
        }
    } while (busy);
    fputs(terminal_rewrites(STDERR_FILENO) ? "\r" : "", generate_notes_(g));
    generate_print_speed_(g);
    if (g->texts.file) {
        file_commit(&g->texts);
    }
    free(of_slot);
}

// ---- the whole ----

static void generate_check_options_(const Options* o, const Comm* comm) {
    const int ways = o->texts.interactive + options_given(o, "prompts") + options_given(o, "prompt");
    if (comm->size > 1 && o->ranks.tensor == 1) {
        die_usage("%d processes: text is generated by one", comm->size);
    }
    if (comm->size > 1 && o->texts.interactive) {
        die_usage("--interactive on, %d processes; wanted one: only one of them reads the lines", comm->size);
    }
    if (ways != 1) {
        die_usage("--prompt, --interactive, --prompts: wanted only one of them");
    }
    if (options_given(o, "suffix") && !options_given(o, "prompt")) {
        die_usage("--suffix needs --prompt TEXT, the text before the middle");
    }
    if (!o->model.path[0]) {
        die_usage(
            o->texts.interactive ? "--interactive needs a trained model: --model DIR"
            : o->texts.prompts[0]
                ? "--prompts needs a trained model: --model DIR"
                : "--prompt needs a trained model: --model DIR; for samples of a training run, add --steps "
                  "or --out");
    }
    if (options_model_size(o)) {
        const int is_published = strncmp(o->model.path, "gpt2", 4) == 0 && !strchr(o->model.path, ':');
        die_usage(
            is_published
                ? "--model %s is a size, not a trained model; scripts/get_data.sh %s fetches it into data/%s"
                : "--model %s is a size, not a trained model; wanted a directory or a file",
            o->model.path, o->model.path, o->model.path);
    }
    if (!o->texts.interactive && (o->texts.chat >= (int)CHAT_ON || o->texts.system[0])) {
        die_usage("--%s%s is for --interactive", o->texts.chat >= (int)CHAT_ON ? "chat " : "system",
                  o->texts.chat >= (int)CHAT_ON ? chat_word(o->texts.chat) : "");
    }
    if (o->texts.chat == 0 && o->texts.system[0]) {
        die_usage("--system is for chats; wanted no --chat off");
    }
    if (o->texts.out[0] && !o->texts.prompts[0]) {
        die_usage("--out-texts %s is for the texts of --prompts", o->texts.out);
    }
}

// Decides the settings and reads the prompts: everything that can still be refused.
static void generate_setup_(Generate* g, Ranks ranks) {
    Run* run = g->run;
    run->model_path = model_path_find(run->given, run->newest);
    run->adapter_path = model_path_of_adapter(run->given, run->newest_adapter);
    run_check_outputs(run, run->given);
    const SettleInput input = {.ranks = ranks,
                               .dtype = run->trainer->dtype,
                               .model_path = run->model_path,
                               .found = setup_read_model(run->model_path),
                               .adapter_path = run->adapter_path};
    const Settled s = settle(&run->data, run->given, &input);
    g->options = s.options;
    g->V = s.cfg.V;
    const Options* o = &g->options;
    run_agree_on_files(run, o);
    g->ids = (int*)check_alloc((size_t)o->batch.seq_len + 1, sizeof(int), "prompt");
    if (o->texts.prompts[0]) {
        generate_read_(g);
    } else {
        g->count = (options_given(o, "suffix") ? run_data_infill : run_data_prompt)(g->ids, o->batch.seq_len,
                                                                                    &run->data, o, g->V);
    }
    generate_open_chat_(g);
    run_decide(run, &s);
}

void generate_open(Run* run, Ranks ranks) {
    Generate* g = (Generate*)check_alloc(1, sizeof(Generate), "generation");
    signals_release();
    generate_check_options_(run->given, &run->comm);
    run->generate = g;
    g->run = run;
    generate_setup_(g, ranks);
    fprintf(generate_notes_(g), "%s\n", run->model_path);
    plan_print_memory(generate_notes_(g), run->settled, &run->plan.model.memory);
    if (g->is_chat) {
        fprintf(stderr, "chat: %s%s; /reset starts another\n", g->dialog.marks.format.layout->name,
                g->dialog.marks.is_text ? ", its marks as plain text" : "");
    }
}

void generate_texts(Run* run, Model* model) {
    const Options* o = run->given;
    Generate* g = run->generate;
    run_set_model(run, model);
    run_load(run, NULL, NULL);
    run_open_generator(run, model, &g->options);
    if (g->is_chat) {
        run->generator.turn_end = g->dialog.marks.turn_end;
    }
    if (o->texts.interactive) {
        generate_interactive_(g);
    } else if (o->texts.prompts[0]) {
        generate_all_(g);
    } else {
        generate_one_(g);
    }
    generator_close(&run->generator);
}

void generate_close(Generate* g) {
    if (g) {
        dialog_close(&g->dialog);
        free(g->prompts);
        free(g->file);
        free(g->ids);
        free(g);
    }
}

#endif // GENERATE_IMPLEMENTATION

#endif
