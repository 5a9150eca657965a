// test_options.c -- options.h: the table is consistent, the parser is strict, and printed options
// read back unchanged.
#define OPTIONS_IMPLEMENTATION

#include <inttypes.h>

#include "llmc/base/rand.h"
#include "llmc/setup/options.h"
#include "llmc/setup/options_values.h"
#include "llmc/optim/optimizer.h"
#include "llmc/optim/schedule.h"

#include "dev/test/lib/test.h"

#define BOTH_TRAINERS options_program(OPTION_CPU | OPTION_GPU) // a trainer that has every option

enum { ARGS_MAX = 2 * OPTION_ROWS_MAX };

// Words separated by '|' as an argv; program name first. Lives until the next call but three.
typedef struct {
    int argc;
    char* argv[ARGS_MAX];
    char text[16384];
} Args;

static const Args* args_of(const char* words) {
    static Args pool[4];
    static int next = 0;
    Args* args = &pool[next++ % 4];
    snprintf(args->text, sizeof(args->text), "prog|%s", words);
    args->argc = 0;
    for (char* at = args->text; at;) {
        args->argv[args->argc++] = strsep(&at, "|");
    }
    args->argc -= !*words; // no words at all, and not one empty word
    args->argv[args->argc] = NULL;
    return args;
}

static Options parsed(const char* words) {
    Options options;
    const Args* args = args_of(words);
    options_parse(&options, args->argc, (char**)args->argv, BOTH_TRAINERS);
    return options;
}

static void parse_body(const void* words) {
    parsed(words);
    _exit(77); // the command line was accepted
}

static int refused(const char* words, const char* wanted) {
    return test_dies(parse_body, words, EXIT_USAGE, wanted);
}

static int accepted(const char* words) { return test_dies(parse_body, words, 77, ""); }

static size_t type_bytes(OptionType type) {
    return type == OPTION_STRING                         ? sizeof(char*)
           : type == OPTION_LIST                         ? sizeof(OptionList)
           : type == OPTION_COUNT || type == OPTION_SEED ? 8
                                                         : 4;
}

static int is_number(const OptionRow* row) {
    return row->type == OPTION_INT || row->type == OPTION_COUNT || row->type == OPTION_FLOAT;
}

// The value of a row as text, in its own buffer: valid until the next call but three.
static const char* text_of(const Options* options, const OptionRow* row) {
    static char buffer[4][OPTION_TEXT_BYTES];
    static int next = 0;
    return option_text(options, row, buffer[next++ % 4]);
}

TEST(names) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* a = &OPTION_TABLE[i];
        EXPECT(*a->name && strlen(a->name) < OPTION_NAME_BYTES, "row %d", i);
        EXPECT(strspn(a->name, "abcdefghijklmnopqrstuvwxyz0123456789-") == strlen(a->name), "%s", a->name);
        EXPECT(strlen(a->alias) <= 2 && !strchr(a->alias, '-'), "%s", a->name);
        EXPECT(*a->help && *a->group, "%s", a->name);
        int new_group = i > 0 && strcmp(a->group, a[-1].group) != 0;
        for (int j = 0; j < i; j++) {
            const OptionRow* b = &OPTION_TABLE[j];
            EXPECT(strcmp(a->name, b->name) != 0, "%s twice", a->name);
            EXPECT(!*a->alias || strcmp(a->alias, b->alias) != 0, "%s and %s: -%s", a->name, b->name,
                   a->alias);
            EXPECT(!new_group || strcmp(a->group, b->group) != 0, "group %s is split by %s", a->group,
                   a->name);
        }
    }
}

// Rows and fields are in the same order, so a field without a row leaves a gap wider than alignment
// does.
// Returns true if a group of options, or what follows the groups, starts at this byte.
static int starts_group(size_t offset) {
#define START_(group) offsetof(Options, group)
    static const size_t starts[] = {START_(data),      START_(model),  START_(batch),   START_(teacher),
                                    START_(optimizer), START_(eval),   START_(samples), START_(tasks),
                                    START_(texts),     START_(output), START_(memory),  START_(ranks),
                                    START_(reports),   START_(config)};
#undef START_
    int starts_any = 0;
    for (size_t i = 0; i < sizeof(starts) / sizeof(starts[0]); i++) {
        starts_any |= starts[i] == offset;
    }
    return starts_any;
}

TEST(every_field_has_one_row) {
    size_t end = 0;
    for (int i = 0; i < OPTION_ROWS; i++) {
        const size_t bytes = type_bytes(OPTION_TABLE[i].type), align = bytes < 8 ? bytes : 8;
        const size_t begin = (end + align - 1) / align * align;
        const size_t of_group = (end + 7) / 8 * 8;
        EXPECT(OPTION_TABLE[i].offset == begin ||
                   (OPTION_TABLE[i].offset == of_group && starts_group(of_group)),
               "--%s is at %zu, wanted %zu", OPTION_TABLE[i].name, OPTION_TABLE[i].offset, begin);
        end = OPTION_TABLE[i].offset + bytes;
    }
    const size_t align = _Alignof(OptionsProgram);
    EXPECT((end + align - 1) / align * align == offsetof(Options, program), "the rows end at %zu", end);
}

// An option that takes a path says what it reads or writes.
TEST(files) {
    static const char* const kinds[] = {"FILE", "DIR", "PATH", "RUNS"};
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        const int has_files = (row->flags & (OPTION_READS | OPTION_WRITES)) != 0;
        int takes_path = strcmp(row->name, "hellaswag") == 0; // a fixed one
        for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++) {
            takes_path |= row->type == OPTION_STRING && strstr(row->unit, kinds[k]) != NULL;
        }
        EXPECT(has_files == takes_path, "--%s %s: flags %x", row->name, row->unit, (unsigned)row->flags);
        EXPECT(has_files == (option_files(row) != FILES_NONE) && option_files(row) <= FILES_SCRATCH,
               "--%s: %d", row->name, (int)option_files(row));
        EXPECT(!(row->flags & OPTION_WRITES) || strstr(row->unit, "FILE") == NULL ||
                   option_files(row) == FILES_ONE,
               "--%s writes a file", row->name);
    }
}

// Each default is legal and in the form in which it is printed; each bound is legal, or not if it
// is open.
TEST(defaults_and_bounds) {
    Options options = parsed("");
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        const char* text = text_of(&options, row);
        EXPECT(strcmp(text, row->fallback) == 0, "--%s: %s printed as %s", row->name, row->fallback, text);
        EXPECT(!options_given(&options, row->name), "--%s", row->name);
        if (!is_number(row)) {
            const int of_numbers = MINUS_1_ | ABOVE_ | BELOW_ |
                                   (row->type == OPTION_CHOICE || row->type == OPTION_SWITCH ? 0 : AUTO_);
            EXPECT(row->min == 0 && row->max == 0 && !(row->flags & of_numbers), "--%s is no number",
                   row->name);
            continue;
        }
        char min[OPTION_TEXT_BYTES], max[OPTION_TEXT_BYTES], more[OPTION_TEXT_BYTES];
        EXPECT(row->min < row->max && row->min > OPTION_AUTO, "--%s: %g to %g", row->name, row->min,
               row->max);
        EXPECT(row->max <= (row->type == OPTION_INT ? INT32_MAX : 0x1p53), "--%s: %g", row->name, row->max);
        snprintf(min, sizeof(min), "%.0f", row->min);
        snprintf(max, sizeof(max), "%.0f", row->max);
        snprintf(more, sizeof(more), "%.0f", row->max + (row->type == OPTION_FLOAT ? row->max : 1));
        EXPECT(option_set(&options, row, min) == !(row->flags & ABOVE_), "--%s %s", row->name, min);
        EXPECT(option_set(&options, row, max) == !(row->flags & BELOW_), "--%s %s", row->name, max);
        EXPECT(!option_set(&options, row, more), "--%s %s", row->name, more);
        EXPECT(!option_set(&options, row, "-2"), "--%s -2", row->name);
        EXPECT(option_set(&options, row, "auto") == !!(row->flags & AUTO_), "--%s auto", row->name);
        EXPECT(option_set(&options, row, "-1") == !!(row->flags & MINUS_1_), "--%s -1", row->name);
    }
}

// The words of --schedule stand in the order of the enum that the trainer passes on.
TEST(schedule) {
    EXPECT(parsed("--schedule|cosine").optimizer.schedule == SCHEDULE_COSINE);
    EXPECT(parsed("--schedule|linear").optimizer.schedule == SCHEDULE_LINEAR);
    EXPECT(parsed("--schedule|constant").optimizer.schedule == SCHEDULE_CONSTANT);
    EXPECT(parsed("--schedule|wsd").optimizer.schedule == SCHEDULE_WSD);
}

TEST(values) {
    const Options o =
        parsed("--batch|8|-sl|2.5|--lr=6e-4|--steps|9000000000|--seed|18446744073709551615|"
               "--shuffle|off|-a|1|--export-dtype|bf16|--prompt|two words|--separator=|-nk|3|--plan");
    EXPECT(o.batch.size == 8 && o.batch.steps == 9000000000 && o.data.seed == UINT64_MAX &&
           o.output.keep == 3);
    EXPECT(o.optimizer.skip_loss_z == 2.5f && o.optimizer.lr == 6e-4f && o.output.export_dtype == 1);
    EXPECT(o.data.shuffle == 0 && o.output.overfit == 1 && o.plan == 1 && o.print_config == 0);
    EXPECT(strcmp(o.samples.prompt, "two words") == 0 && strcmp(o.data.separator, "") == 0);
    EXPECT(options_given(&o, "batch") && options_given(&o, "separator") && options_given(&o, "plan"));
    EXPECT(!options_given(&o, "seq-len") && o.batch.seq_len == OPTION_AUTO &&
           o.optimizer.warmup == OPTION_AUTO);
    EXPECT(o.optimizer.lr != OPTION_AUTO && parsed("").optimizer.lr == OPTION_AUTO);
    EXPECT(o.optimizer.beta1 == 0.9f && o.optimizer.eps == 1e-8f && o.optimizer.grad_clip == 1 &&
           o.optimizer.max_skips == 10);

    const Options p =
        parsed("-x|-1|-d|-1|-q|.5|-k=linear|-o|a=b|--val-data|-|--prompt=--batch|--tokenizer|-5");
    EXPECT(p.batch.steps == OPTION_AUTO && p.batch.total == OPTION_AUTO && p.optimizer.final_lr_frac == 0.5f);
    EXPECT(p.optimizer.schedule == 1 && strcmp(p.output.dir, "a=b") == 0 && strcmp(p.data.val, "-") == 0);
    EXPECT(strcmp(p.samples.prompt, "--batch") == 0 && strcmp(p.data.tokenizer, "-5") == 0);
}

TEST(refuses_values) {
    static const char* const no_int[] = {"abc",  "1.5", "",      " 1",         "1 ",  "+1",
                                         "0x10", "1e3", "1_000", "512k",       "-",   "-2",
                                         "--",   "nan", "inf",   "2147483648", "AUTO"};
    static const char* const no_float[] = {"abc", "",    " 1",   "1 ",  "nan",   "inf",  "-inf", "0x1p-3",
                                           "1e",  "1,5", "1e39", "1e1", "1e-60", "-0.1", "1.5f", "-"};
    Options options = parsed("");
    const OptionRow *const batch = option_find("--batch", 7), *const frac = option_find("-q", 2);
    for (size_t i = 0; i < sizeof(no_int) / sizeof(no_int[0]); i++) {
        EXPECT(!option_set(&options, batch, no_int[i]), "'%s'", no_int[i]);
    }
    for (size_t i = 0; i < sizeof(no_float) / sizeof(no_float[0]); i++) {
        EXPECT(!option_set(&options, frac, no_float[i]), "'%s'", no_float[i]);
    }
    EXPECT(refused("--batch|0", "error: --batch 0: wanted 1 to 1048576 sequences"));
    EXPECT(refused("-b|abc", "--batch abc: wanted a whole number, 1 to 1048576 sequences, or auto"));
    EXPECT(refused("--batch=", "--batch '': wanted a whole number, 1 to"));
    EXPECT(refused("-x|-2", "--steps -2: wanted 0 to 1000000000000 updates, or auto"));
    EXPECT(refused("-d|99999999999999999999", "--total-batch 99999999999999999999: wanted"));
    EXPECT(refused("--seed|18446744073709551616", "--seed 18446744073709551616: wanted 0 to 1844674"));
    EXPECT(refused("--seed|-1", "--seed -1: ") && refused("--seed=", "--seed '': "));
    EXPECT(refused("--seed| 1", "--seed  1: "));
    EXPECT(refused("--lr|0", "--lr 0: wanted a number above 0 and at most 10"));
    EXPECT(
        refused("--beta2|0.99999999999", "--beta2 0.99999999999: wanted a number of at least 0 and below 1"));
    EXPECT(refused("--shuffle|yes", "--shuffle yes: wanted off|on") && refused("-a|2", "--overfit 2: "));
    EXPECT(refused("-q|-.5", "--final-lr-frac -.5: "));
    EXPECT(refused("--schedule|cos", "--schedule cos: wanted cosine|linear|constant|wsd"));
    EXPECT(refused("--schedule|1", "--schedule 1: wanted cosine"));
    EXPECT(refused("--batch|99999999999", "--batch 99999999999: wanted 1 to"));
    EXPECT(refused("--batch=-1", "--batch -1: wanted 1 to"));
    EXPECT(refused("--layers|1.5", "--layers 1.5: ") && refused("--eval-every=-1", "--eval-every -1: "));
    EXPECT(refused("--lr|nan", "--lr nan: ") && refused("--lr|-0.1", "--lr -0.1: wanted a number above 0"));
    EXPECT(refused("--beta2|1", "--beta2 1: wanted a number of at least 0 and below 1"));
}

TEST(refuses_arguments) {
    EXPECT(refused("--bacth|4", "error: unknown option --bacth; did you mean --batch? (--help lists all)"));
    EXPECT(refused("--bacth=4", "unknown option --bacth; did you mean --batch?"));
    EXPECT(refused("--sequence-len|4", "unknown option --sequence-len: use --seq-len, "));
    EXPECT(refused("-batch|4", "unknown option -batch; did you mean --batch?"));
    EXPECT(refused("--batch8", "unknown option --batch8; did you mean --batch?"));
    EXPECT(refused("-Z|4", "unknown option -Z (--help lists all)"));
    EXPECT(refused("--frobnicate", "unknown option --frobnicate (--help lists all)"));
    EXPECT(refused("--", "unknown option -- (") && refused("--=1", "unknown option -- ("));
    EXPECT(refused("-=1", "unknown option - ("));
    EXPECT(refused("--seq", "unknown option --seq"));
    EXPECT(refused("--batch", "--batch is missing its value; wanted 1 to 1048576 sequences"));
    EXPECT(refused("--out|--batch|4", "--out is missing its value"));
    EXPECT(refused("--plan=on", "--plan takes no value") && refused("--plan|on", "unexpected argument 'on'"));
    EXPECT(refused("4", "unexpected argument '4'") && refused("--batch|4|5", "unexpected argument '5'"));
    EXPECT(refused("-b|4||", "unexpected argument ''") && refused("-", "unexpected argument '-'"));
    EXPECT(refused("--help|--bacth", "--bacth") && refused("--batch|0|--version", "--batch 0: "));
    EXPECT(accepted("--batch|4") && accepted("") && accepted("--print-config"));
}

// A value that starts with a dash is a value where any text is one, but for the name of an option.
TEST(dashes) {
    EXPECT(strcmp(parsed("--separator|---").data.separator, "---") == 0 &&
           strcmp(parsed("--separator|--x").data.separator, "--x") == 0);
    EXPECT(strcmp(parsed("--steps|1|--prompt|-b").samples.prompt, "-b") == 0);
    EXPECT(strcmp(parsed("--model|./dir|--prompt|x|--stop|- ").texts.stop.text[0], "- ") == 0);
    EXPECT(refused("--separator|--lr|1",
                   "--separator is missing its value; wanted TEXT; --separator=--lr if --lr is the value"));
    EXPECT(refused("--separator|--lr=1", "--separator is missing its value"));
    EXPECT(strcmp(parsed("--separator=--lr").data.separator, "--lr") == 0);
    EXPECT(refused("--out|-x", "--out is missing its value; wanted DIR; --out=-x if -x is the value"));
    EXPECT(refused("--lr|-x", "--lr is missing its value; wanted a number above 0 and at most 10, or auto"));
}

// Checks that the options in an advice exist.
static void advises_options(const char* advice, const char* names) {
    for (const char* at = advice; (at = strstr(at, "--")); at += 2) {
        const size_t length = strspn(at, "-abcdefghijklmnopqrstuvwxyz0123456789");
        EXPECT(option_find(at, length), "%.*s, advised for %s", (int)length, at, names);
    }
}

// Every row of synonyms names what this program does not have, and advises options that it has.
TEST(synonyms) {
    EXPECT(refused("--block_size|256", "unknown option --block_size: use --seq-len, "));
    EXPECT(refused("--Learning-Rate=1", "unknown option --Learning-Rate: use --lr"));
    EXPECT(refused("--resid-pdrop|0.1",
                   "unknown option --resid-pdrop: use --dropout, of the embeddings and of both branches"));
    EXPECT(refused("--no-shuffle", "unknown option --no-shuffle; did you mean --shuffle off?"));
    EXPECT(refused("--train_data|x", "unknown option --train_data; did you mean --train-data?"));
    EXPECT(refused("--foobar|1", "unknown option --foobar (--help lists all)"), "nothing is near");
    int rows = 0;
    for (const OptionSynonym* row = OPTION_SYNONYMS; row->names; row++, rows++) {
        for (const char* at = row->names; *at; at += strspn(at, " ")) {
            const size_t length = strcspn(at, " ");
            EXPECT(!option_named_(at, length, 0), "%.*s is an option", (int)length, at);
            EXPECT(option_synonym(OPTION_SYNONYMS, at, length) == row->advice, "%.*s twice", (int)length, at);
            at += length;
        }
        advises_options(row->advice, row->names);
    }
    EXPECT(rows > 40, "%d", rows);
}

// A variable of the shell that is not set must not start another run than was meant.
TEST(empty) {
    EXPECT(refused("--report|", "--report is empty; wanted RUNS, or no --report at all"));
    EXPECT(refused("--train-data=", "--train-data is empty") && refused("--out|", "--out is empty"));
    EXPECT(refused("--model|", "--model is empty") && refused("--freeze|", "--freeze is empty"));
    EXPECT(accepted("--prompt||--steps|1") && accepted("--separator|"), "texts");
    EXPECT(accepted("--resume|on|--out|x|--tasks|"), "takes back what a run would inherit");
    EXPECT(refused("--resume|on|--out|", "--out is empty"), "which is not inherited");
}

// Parses words and a file of this text, called "conf" in the test's directory.
static Options config_parsed(const char* words, const char* text) {
    char line[4096];
    FILE* file = fopen(test_path("conf"), "w");
    CHECK(file, "no file for --config");
    fputs(text, file);
    fclose(file);
    snprintf(line, sizeof(line), "%s|--config|%s", words, test_path("conf"));
    return parsed(*words ? line : line + 1);
}

static void config_body(const void* text) {
    config_parsed("--lr|0.5", (const char*)text);
    _exit(77);
}

static int config_refused(const char* text, const char* wanted) {
    test_tmpdir();
    return test_dies(config_body, text, EXIT_USAGE, wanted);
}

// A removed option is answered with advice, which names options that exist. Files of earlier
// versions may name it with a value that changed nothing.
TEST(removed) {
    EXPECT(refused("--products|bf16", "error: --products was removed: use --matmul"));
    EXPECT(refused("--Products=fp32", "error: --products was removed: use --matmul"));
    EXPECT(refused("--help|products", "--help products: --products was removed: use --matmul"));
    EXPECT(config_refused("\nproducts = bf16\n", "conf:2: --products was removed: use --matmul"));
    Options o = config_parsed("", "products = fp32\nbatch = 8\n");
    EXPECT(o.batch.size == 8 && !options_given(&o, "matmul"), "the former default");
    options_close(&o);
    const RemovedOption row = {"x", "auto||1", 0, ""};
    EXPECT(option_removed_is_unused(&row, "auto") && option_removed_is_unused(&row, "") &&
           option_removed_is_unused(&row, "1"));
    EXPECT(!option_removed_is_unused(&row, "aut") && !option_removed_is_unused(&row, "11"));
    for (const RemovedOption* removed = OPTION_REMOVED; removed->name; removed++) {
        EXPECT(!option_named_(removed->name, strlen(removed->name), 0), "%s is an option", removed->name);
        EXPECT(option_removed(removed->name, strlen(removed->name)) == removed, "%s twice", removed->name);
        advises_options(removed->advice, removed->name);
    }
}

TEST(config) {
    Options o = config_parsed("--lr|0.5|--steps=7",
                              "\xEF\xBB\xBF# a run\n\n batch = 8   # comment\r\nlr=1e-3\nout = a#b  c \n"
                              "prompt = \" x \\\"\\\\\\n# \" # that\nseparator =\nshuffle = off");
    EXPECT(o.batch.size == 8 && o.optimizer.lr == 0.5f && o.batch.steps == 7 && o.data.shuffle == 0,
           "the command line wins");
    EXPECT(strcmp(o.output.dir, "a#b  c") == 0 && strcmp(o.data.separator, "") == 0, "'%s'", o.output.dir);
    EXPECT(strcmp(o.samples.prompt, " x \"\\\n# ") == 0, "'%s'", o.samples.prompt);
    EXPECT(options_given(&o, "batch") && options_given(&o, "lr") && !options_given(&o, "seq-len"));
    options_close(&o);
    o = config_parsed("--model|./dir|--prompt|x|--stop|a", "stop = b\n");
    EXPECT(o.texts.stop.count == 1 && strcmp(o.texts.stop.text[0], "a") == 0, "the command line's list");
    options_close(&o);
    o = config_parsed("--model|./dir|--prompt|x", "stop = b\nstop = c\n");
    EXPECT(o.texts.stop.count == 2 && strcmp(o.texts.stop.text[1], "c") == 0);
    options_close(&o);
    EXPECT(config_refused("batch = 8\nbacth = 4\n", "conf:2: unknown option --bacth; did you mean --batch?"));
    EXPECT(config_refused("\n\nlearning_rate = 1\n", "conf:3: unknown option --learning_rate: use --lr"));
    EXPECT(config_refused("batch = x",
                          "conf:1: --batch x: wanted a whole number, 1 to 1048576 sequences, or auto"));
    EXPECT(config_refused("batch = 1\nbatch = 2", "conf:2: --batch is set twice in this file"));
    EXPECT(config_refused("batch 1", "conf:1: batch 1 is not a setting; wanted name = value"));
    EXPECT(config_refused("= 1", "conf:1: = 1 is not a setting"));
    EXPECT(config_refused("", "conf: no settings; wanted lines of name = value"));
    EXPECT(config_refused("# nothing\n\n", "conf: no settings; wanted lines of name = value"));
    EXPECT(config_refused("config = other", "conf:1: --config is for the command line, and not for a file"));
    EXPECT(config_refused("prompt = \"x", "conf:1: a value without its closing quote"));
    EXPECT(config_refused("prompt = \"x\" y", "conf:1: y stands behind the closing quote"));
    EXPECT(config_refused("prompt = \"\\q\"", "conf:1: \\q in a value"));
    EXPECT(config_refused("prompt = \"\\x1\"", "conf:1: \\x in a value"), "one digit");
    EXPECT(config_refused("prompt = \"\\x00\"", "conf:1: \\x in a value"), "the end of a text");
    EXPECT(config_refused("lr = 100", "conf:1: --lr 100: wanted a number above 0 and at most 10, or auto"),
           "also where the command line wins");
    EXPECT(test_dies(parse_body, "--config|/nowhere/conf", EXIT_FAILURE,
                     "/nowhere/conf: cannot read: No such file"));
}

static void errand_body(const void* words) {
    CHECK(freopen(test_path("stdout"), "w", stdout), "no file for stdout");
    parse_body(words);
}

// Returns the output of `words` on stdout before they end the program with status 0.
static const char* printed(const char* words) {
    static char text[1 << 16];
    test_tmpdir(); // here, so that the child uses it too
    EXPECT(test_dies(errand_body, words, EXIT_SUCCESS, ""), "%s", words);
    FILE* file = fopen(test_path("stdout"), "r");
    text[file ? fread(text, 1, sizeof(text) - 1, file) : 0] = '\0';
    if (file) {
        fclose(file);
    }
    return text;
}

TEST(help_and_version) {
    const char version[] = "prog " LLMC_VERSION ", Unicode " UNICODE_VERSION ", compiled by ";
    EXPECT(strncmp(printed("--version"), version, strlen(version)) == 0);
    const char* help = printed("-b|3|--help");
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        char name[40], wanted[OPTION_TEXT_BYTES];
        snprintf(name, sizeof(name), "\n  --%-14s", row->name);
        const char* line = strstr(help, name);
        EXPECT(line, "--%s is not in --help, or too long for its column", row->name);
        EXPECT(!line || strncmp(line + 24, row->alias, strlen(row->alias)) == 0, "--%s", row->name);
        if (line &&
            // the rest is on the next line
            strlen(option_wanted_briefly(row, wanted)) >= OPTION_WANTED_WIDTH) {
            for (line = strchr(line + 1, '\n'); line && line[-1] == '|';) {
                line = strchr(line + 1, '\n');
            }
        }
        EXPECT(strlen(row->fallback) <= 8, "--%s: %s", row->name, row->fallback);
        EXPECT(!line || strncmp(line + 1 + OPTION_HELP_COLUMN, row->help, 10) == 0, "--%s", row->name);
    }
    for (const char* line = help; *line; line += strcspn(line, "\n") + 1) {
        EXPECT(strcspn(line, "\n") <= 110, "%.*s", (int)strcspn(line, "\n"), line);
    }
}

TEST(help_on) {
    const char* help = printed("--help|batch");
    EXPECT(strncmp(help, "\nbatch ", 7) == 0 && strstr(help, "--seq-len ") && !strstr(help, "--lr "), "%s",
           help);
    static const char* const one[] = {"--help|lr", "--help|--lr", "--help=lr", "-b|1|--help|l"};
    for (size_t i = 0; i < sizeof(one) / sizeof(one[0]); i++) {
        help = printed(one[i]);
        EXPECT(strncmp(help, "\noptimizer ", 11) == 0 && strstr(help, "  --lr "), "%s: %s", one[i], help);
        EXPECT(!strstr(help, "  --warmup "), "%s: only this one", one[i]);
    }
    EXPECT(strstr(printed("--help|memory"), "  --recompute ") &&
           strstr(printed("--help|speed"), "  --recompute "));
    EXPECT(strstr(printed("--help|--batch|4"), "usage: ") && strstr(printed("-h|-b|4"), "usage: "),
           "all of it");
    EXPECT(refused("--help|foo", "--help foo: wanted an option, or a group: data, model, "));
}

// Runs a script that calls `prog` once with some arguments, and sets args to what the shell made of
// them.
static void shell_args(Args* args, const char* command) {
    char line[512];
    const char* text = "prog() { printf 'prog\\0'; for a; do printf '%s\\0' \"$a\"; done; }\n";
    FILE* script = fopen(test_path("script"), "w");
    CHECK(script, "no script");
    fprintf(script, "%s%s\n", text, command);
    fclose(script);
    snprintf(line, sizeof(line), "bash %s", test_path("script")); // knows $'..'
    FILE* shell = popen(line, "r");
    CHECK(shell, "no shell");
    const size_t used = fread(args->text, 1, sizeof(args->text) - 1, shell);
    pclose(shell);
    args->argc = 0;
    for (size_t at = 0; at < used && args->argc < ARGS_MAX - 1; at += strlen(args->text + at) + 1) {
        args->argv[args->argc++] = args->text + at;
    }
    args->argv[args->argc] = NULL;
}

static char* banner_of(const Options* options, const char* program) {
    char* text = NULL;
    size_t bytes;
    FILE* file = open_memstream(&text, &bytes);
    options_print_banner(file, options, program);
    fclose(file);
    return text;
}

static char* config_of(const Options* options) {
    char* text = NULL;
    size_t bytes;
    FILE* file = open_memstream(&text, &bytes);
    options_print_config(file, options);
    fclose(file);
    return text;
}

// Expects the same value in every row (flags only if wanted), to the last bit.
static void expect_same(const Options* a, const Options* b, int flags, const char* command) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow* row = &OPTION_TABLE[i];
        const char *x = (const char*)a + row->offset, *y = (const char*)b + row->offset;
        const int same = row->type == OPTION_STRING ? strcmp(text_of(a, row), text_of(b, row)) == 0
                                                    : memcmp(x, y, type_bytes(row->type)) == 0;
        EXPECT(same || (row->type == OPTION_FLAG && !flags) || row->flags & OPTION_LINE,
               "--%s is %s, was %s, by %s", row->name, text_of(b, row), text_of(a, row), command);
    }
}

// Parses a command line with the shell's help; the strings of the result live until the next call
// but one.
static Options shell_parsed(const char* command) {
    static Args pool[2];
    static int next = 0;
    Args* args = &pool[next++ % 2];
    Options options;
    shell_args(args, command);
    for (int i = 1; i < args->argc; i++) {
        const int ends = strcmp(args->argv[i], "--help") == 0 || strcmp(args->argv[i], "--version") == 0;
        CHECK(!ends, "%s would end this test with success", args->argv[i]);
    }
    options_parse(&options, args->argc, args->argv, BOTH_TRAINERS);
    return options;
}

// A random legal value for a row, as text; strings are made of one letter that a shell might
// stumble on and of harmless ones.
static void random_value(Rand* rng, const OptionRow* row, char text[OPTION_TEXT_BYTES]) {
    static const char alphabet[] = " -='\"\\$`*?#~!&;|<>(){}[]%^@:,./\t\033\xC3\xA9\x80";
    const double u = rand_uniform(rng), value = row->min + (row->max - row->min) * u * u * u * u * u * u;
    const char letter = alphabet[rand_below(rng, sizeof(alphabet) - 1)];
    size_t length = 1 + rand_below(rng, 7); // nothing is no path
    switch (row->type) {
    case OPTION_STRING:
        text[length] = '\0';
        while (length-- > 0) {
            text[length] = rand_below(rng, 2) ? letter : "ab-/"[rand_below(rng, 4)];
        }
        break;
    case OPTION_SEED:
        snprintf(text, OPTION_TEXT_BYTES, "%" PRIu64, (uint64_t)rand_u32(rng) << 32 | rand_u32(rng));
        break;
    case OPTION_SWITCH:
        snprintf(text, OPTION_TEXT_BYTES, "%u", rand_below(rng, 2));
        break;
    case OPTION_CHOICE:
        snprintf(text, OPTION_TEXT_BYTES, "%.*s", (int)strcspn(row->unit, "|"), row->unit);
        break;
    case OPTION_FLAG:
        snprintf(text, OPTION_TEXT_BYTES, "off");
        break;
    default:
        snprintf(text, OPTION_TEXT_BYTES, row->type == OPTION_FLOAT ? "%.9g" : "%.0f", value);
        break;
    }
}

// A switch that has got a third word takes llm.c's 0 and 1 all the same.
TEST(switch_with_words) {
    EXPECT(parsed("-w|1").memory.master_weights == MASTER_WEIGHTS_ON &&
               parsed("-w|0").memory.master_weights == MASTER_WEIGHTS_OFF,
           "-w 1 and -w 0");
    EXPECT(parsed("--master-weights|24").memory.master_weights == MASTER_WEIGHTS_24, "24");
    EXPECT(refused("--master-weights|2", "wanted off|on|24"), "2 is no word");
}

// Bytes that a terminal could take for an order are printed as digits, and read back.
TEST(config_escapes) {
    Options o = config_parsed("", "text-field = \"\\x1b[31m\\xC3\\xa9\"\n");
    EXPECT(strcmp(o.data.text_field, "\033[31m\xC3\xA9") == 0, "'%s'", o.data.text_field);
    char* config = config_of(&o);
    EXPECT(strstr(config, "text-field = \"\\x1b[31m\xC3\xA9\"\n"), "%s", config);
    free(config);
    options_close(&o);
}

TEST(round_trip) {
    static char values[OPTION_ROWS_MAX][OPTION_TEXT_BYTES];
    Rand rng = rand_open(1, 0);
    for (int trial = 0; trial < 40; trial++) {
        Options options = parsed(trial % 2 ? "--plan|--print-config" : "--schedule|wsd");
        for (int i = 0; i < OPTION_ROWS; i++) {
            // --prompt may make another kind of command of it
            const OptionRow* row = &OPTION_TABLE[i];
            if (option_counts(&options, row) && strcmp(row->name, "prompt") != 0 &&
                rand_below(&rng, 40) < (unsigned)trial) {
                random_value(&rng, &OPTION_TABLE[i], values[i]);
                option_set(&options, &OPTION_TABLE[i], values[i]);
            }
        }
        char *banner = banner_of(&options, "prog"), *config = config_of(&options);
        const Options from_banner = shell_parsed(banner);
        Options from_config = config_parsed("", config);
        expect_same(&options, &from_banner, 1, banner);
        expect_same(&options, &from_config, 0, config);
        options_close(&from_config);
        free(banner);
        free(config);
    }
}

TEST(banner) {
    Options options = parsed("-b|8|--lr|0.0006|--grad-clip|1|--prompt|it's\nhere|--tokenizer=-x");
    options.optimizer.warmup = 700; // as the trainer resolves it
    char* banner = banner_of(&options, "./a b");
    EXPECT(strcmp(banner,
                  "'./a b' --tokenizer=-x --batch 8 --lr 0.0006 --warmup 700 --prompt 'it'\\''s\nhere'\n") ==
               0,
           "%s", banner);
    free(banner);
    options = parsed("--text-field|it's\033[31m\\");
    banner = banner_of(&options, "prog");
    EXPECT(strcmp(banner, "prog --text-field $'it\\'s\\033[31m\\\\'\n") == 0, "%s", banner);
    free(banner);
    options = parsed("");
    banner = banner_of(&options, "prog");
    EXPECT(strcmp(banner, "prog\n") == 0, "%s", banner);
    free(banner);
    for (int i = 0; i < OPTION_ROWS; i++) {
        if (is_number(&OPTION_TABLE[i])) {
            option_set(&options, &OPTION_TABLE[i], "3");
        }
    }
    banner = banner_of(&options, "prog");
    EXPECT(strstr(banner, " \\\n    --"));
    for (const char* line = banner; *line; line += strcspn(line, "\n") + 1) {
        EXPECT(strcspn(line, "\n") <= 100, "%.*s", (int)strcspn(line, "\n"), line);
    }
    free(banner);
}

static char* recipe_of(const Options* options) {
    char* text = NULL;
    size_t bytes;
    FILE* file = open_memstream(&text, &bytes);
    options_print_recipe(file, options);
    fclose(file);
    return text;
}

static void expect_recipe(const char* words, const char* wanted) {
    const Options options = parsed(words);
    char* recipe = recipe_of(&options);
    EXPECT(strcmp(recipe, wanted) == 0, "%s: %s, wanted %s", words, recipe, wanted);
    free(recipe);
}

// A model with a recipe changes the defaults of options. The banner names even those that are given
// back their usual value.
TEST(recipe) {
    Options options = parsed("--model|speedrun|--lr|0.5|--beta1|0.9");
    EXPECT(options.optimizer.name == OPTIMIZER_MUON && options.batch.steps == 3500 &&
               options.batch.total == 524288 && options.optimizer.matrix_lr == 0.025f &&
               options.optimizer.schedule == SCHEDULE_WSD && options.optimizer.decay_steps == 2450 &&
               options.optimizer.decay_shape == DECAY_LINEAR && options.optimizer.eps == 1e-10f,
           "the recipe's");
    EXPECT(options.optimizer.lr == 0.5f && options.optimizer.beta1 == 0.9f, "lr %g, beta1 %g",
           options.optimizer.lr, options.optimizer.beta1);
    EXPECT(!options_given(&options, "optimizer") && options_given(&options, "lr"), "given");
    char* banner = banner_of(&options, "prog");
    EXPECT(strstr(banner, "--optimizer muon") && strstr(banner, "--beta1 0.9"), "%s", banner);
    free(banner);

    options = parsed("--model|speedrun|--epochs|2");
    EXPECT(options.batch.steps == OPTION_AUTO && options.optimizer.name == OPTIMIZER_MUON, "%lld steps",
           (long long)options.batch.steps);
    options = parsed("--model|nanochat:d12");
    EXPECT(options.batch.steps == OPTION_AUTO && options.optimizer.name == OPTIMIZER_ADAMW, "no recipe");

    expect_recipe("--model|nanochat:d12|--optimizer|muon", "");
    expect_recipe("--model|speedrun|--steps|5|--lr|0.1|--weight-decay|0|--beta1|0.9|--vector-lr-scale|1|"
                  "--matrix-weight-decay|0|--eps|1e-8",
                  "recipe: --total-batch 524288 --optimizer muon --schedule wsd --decay-steps 2450 "
                  "--decay-shape linear "
                  "--embedding-lr-scale 175 --matrix-lr 0.025\n");
}

static void expect_json_string(const char* text, size_t length, const char* wanted) {
    char* json = NULL;
    size_t bytes;
    FILE* file = open_memstream(&json, &bytes);
    json_print_string(file, text, length);
    fclose(file);
    EXPECT(strcmp(json, wanted) == 0, "%s, wanted %s", json, wanted);
    free(json);
}

#define EXPECT_JSON(text, wanted) expect_json_string(text, sizeof(text) - 1, wanted)

TEST(json_string) {
    EXPECT_JSON("", "\"\"");
    EXPECT_JSON("a/b \x7F", "\"a/b \x7F\"");
    EXPECT_JSON("\"\\\b\f\n\r\t", "\"\\\"\\\\\\b\\f\\n\\r\\t\"");
    EXPECT_JSON("\0\x01\x1F", "\"\\u0000\\u0001\\u001f\"");
    EXPECT_JSON("\xC2\x80\xDF\xBF\xE0\xA0\x80\xED\x9F\xBF\xEE\x80\x80\xF0\x90\x80\x80\xF4\x8F\xBF\xBF",
                "\"\xC2\x80\xDF\xBF\xE0\xA0\x80\xED\x9F\xBF\xEE\x80\x80\xF0\x90\x80\x80\xF4\x8F\xBF\xBF\"");
    EXPECT_JSON("\x80 \xBF \xFF", "\"\\ufffd \\ufffd \\ufffd\"");
    EXPECT_JSON("\xC1\xBF", "\"\\ufffd\\ufffd\"");            // longer than need be
    EXPECT_JSON("\xE0\x9F\xBF", "\"\\ufffd\\ufffd\\ufffd\""); // the same
    EXPECT_JSON("\xF0\x8F\xBF\xBF", "\"\\ufffd\\ufffd\\ufffd\\ufffd\"");
    EXPECT_JSON("\xED\xA0\x80", "\"\\ufffd\\ufffd\\ufffd\"");            // a surrogate
    EXPECT_JSON("\xF4\x90\x80\x80", "\"\\ufffd\\ufffd\\ufffd\\ufffd\""); // U+110000
    EXPECT_JSON("\xFC\x80\x80\x80", "\"\\ufffd\\ufffd\\ufffd\\ufffd\"");
    EXPECT_JSON("\xF8\x88\x80\x80\x80", "\"\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\"");
    EXPECT_JSON("\xE2\x82", "\"\\ufffd\\ufffd\""); // cut off
    EXPECT_JSON("\xE2\x82x", "\"\\ufffd\\ufffdx\"");
    expect_json_string("\xE2\x82\xAC", 2, "\"\\ufffd\\ufffd\""); // never reads past the length
}

TEST(json) {
    const Options options =
        parsed("-b|8|--lr|1e-5|--seed|18446744073709551615|--shuffle|off|--prompt|a\"b\n|-k|wsd|-r|2");
    char* json = NULL;
    size_t bytes;
    FILE* file = open_memstream(&json, &bytes);
    options_print_json(file, &options);
    fclose(file);
    EXPECT(strncmp(json, "{\"train-data\":\"\",\"data-schedule\":\"\",", 36) == 0, "%s", json);
    EXPECT(json[bytes - 1] == '}' && !strchr(json, '\n'), "%s", json);
    static const char* const members[] = {",\"batch\":8,",
                                          ",\"seq-len\":null,",
                                          ",\"lr\":1e-05,",
                                          ",\"seed\":18446744073709551615,",
                                          ",\"shuffle\":false,",
                                          ",\"overfit\":false",
                                          ",\"schedule\":\"wsd\"",
                                          ",\"recompute\":2,",
                                          ",\"prompt\":\"a\\\"b\\n\","};
    for (size_t i = 0; i < sizeof(members) / sizeof(members[0]); i++) {
        EXPECT(strstr(json, members[i]), "%s is not in %s", members[i], json);
    }
    for (int i = 0; i < OPTION_ROWS; i++) {
        char key[OPTION_NAME_BYTES + 4];
        snprintf(key, sizeof(key), "\"%s\":", OPTION_TABLE[i].name);
        const int is_left_out = OPTION_TABLE[i].type == OPTION_FLAG || OPTION_TABLE[i].flags & OPTION_LINE ||
                                !option_counts(&options, &OPTION_TABLE[i]);
        EXPECT((strstr(json, key) == NULL) == is_left_out, "%s", key);
    }
    free(json);
}

// Options decide if the program generates text, and which other options it then refuses.
TEST(decode) {
    EXPECT(parsed("--model|./dir|--prompt|x").generates && parsed("--interactive|--model|./dir").generates);
    EXPECT(parsed("--prompts|x.jsonl").generates, "the rest is refused later");
    EXPECT(parsed("--prompt|x").generates && parsed("--model|d12|--prompt|x|--top-k|3").generates,
           "a prompt alone does not train; generate.h names the mistake");
    EXPECT(!parsed("--prompt|x|--layers|1").generates && !parsed("--model|d12|--prompt|x|--lr|1").generates,
           "nothing is trained yet");
    EXPECT(!parsed("--model|./dir|--prompt|x|--steps|0").generates, "samples of a run");
    EXPECT(!parsed("--model|./dir|--prompt|x|--train-data|x.txt|--lr|1").generates, "samples of a run");
    EXPECT(!parsed("").generates && !parsed("--model|./dir").generates);
    EXPECT(refused("--model|./dir|--prompt|x|--lr|1", "--lr is for training"));
    EXPECT(refused("--interactive|--train-data|x.txt", "--train-data is for training"));
    EXPECT(refused("--tokens|5", "--tokens is for generating text"));
    EXPECT(refused("--steps|5|--stop|x", "--stop is for generating text"));
    EXPECT(refused("--model|./dir|--prompt|x|--stop|", "--stop '': wanted TEXT"));
    const Options o = parsed("--model|./dir|--prompt|x|--stop|a|--stop=b c|--tokens|7|--seed|3|--top-k|5");
    EXPECT(o.texts.stop.count == 2 && strcmp(o.texts.stop.text[0], "a") == 0 &&
           strcmp(o.texts.stop.text[1], "b c") == 0);
    EXPECT(o.texts.tokens == 7 && o.data.seed == 3 && o.samples.top_k == 5);
}
