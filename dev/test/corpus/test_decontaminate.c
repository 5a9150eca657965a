// test_decontaminate.c -- decontaminate.h and survey.h: which documents share 13 words with a test,
// against a plain comparison of words; surveys that are continued; the list of dropped documents.
#define DECONTAMINATE_IMPLEMENTATION
#define SURVEY_IMPLEMENTATION
#include "llmc/corpus/survey.h"
#include "dev/test/lib/test.h"

enum { DOCUMENTS = 40000, WORDS_EACH = 30, VOCABULARY = 26 };

static uint32_t random_number(uint64_t* state, uint32_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 33) % n);
}

// ---- contaminated texts ----

static uint32_t find(const TestTexts* tests, const char* text) {
    Words words = {.count = 0};
    words_split(&words, &tests->rules, text, strlen(text));
    const uint32_t found = test_texts_find(tests, &words);
    words_close(&words);
    return found;
}

#define TWELVE "one two three four five six seven eight nine ten eleven twelve"

TEST(kinds_of_files) {
    static const char task[] =
        "{\"ctx\":\"One, two three four five six seven\",\"endings\":[\"eight nine ten eleven twelve "
        "red\",\"eight nine ten eleven twelve blue\",\"a b c d e f\"],\"label\":1}\n",
                      lines[] = "{\"text\":\"" TWELVE " lines\"}\n{\"text\":\"" TWELVE "\"}\n",
                      plain[] = TWELVE " plain\n";
    char paths[800];
    TestTexts tests;
    snprintf(paths, sizeof(paths), "%s,%s,%s", test_write("task.jsonl", task, strlen(task)),
             test_write("lines.jsonl", lines, strlen(lines)), test_write("plain.txt", plain, strlen(plain)));
    test_texts_open(&tests, paths, "text");
    EXPECT(tests.num_files == 3 && tests.files[0].texts == 3 && tests.files[0].short_texts == 0 &&
               tests.files[1].texts == 2 && tests.files[1].short_texts == 1 && tests.files[2].texts == 1,
           "");
    static const struct {
        const char* text;
        int file; // -1: none
    } cases[] = {{"x " TWELVE " red y", 0},
                 {TWELVE "-- BLUE!", 0},
                 {TWELVE " lines", 1},
                 {TWELVE "\nPlain.", 2},
                 {TWELVE " green", -1},
                 {TWELVE " x plain", -1},
                 {"", -1},
                 {TWELVE, -1},
                 {"one two three four five six seven a b c d e f", 0}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const uint32_t found = find(&tests, cases[i].text);
        EXPECT(cases[i].file < 0 ? found == 0 : found && (int)tests.runs[found - 1].file == cases[i].file,
               "'%s': %u", cases[i].text, found);
    }
    const TestRun run = tests.runs[find(&tests, TWELVE " plain") - 1];
    EXPECT(run.bytes == strlen(TWELVE " plain") &&
               memcmp(tests.texts + run.text, TWELVE " plain", run.bytes) == 0,
           "");
    test_texts_close(&tests);
}

static void open_tests(const void* paths) {
    TestTexts tests;
    test_texts_open(&tests, (const char*)paths, "text");
}

TEST(refused_files) {
    const char* little = test_write("little.txt", TWELVE, strlen(TWELVE));
    const char* broken = test_write("broken.jsonl", "{\"ctx\":\"a\",\"endings\":[\"b\"],\"label\":0}\n", 39);
    EXPECT(test_dies(open_tests, little, EXIT_FAILURE, "little.txt: no text of 13 words or more"), "");
    EXPECT(test_dies(open_tests, broken, EXIT_FAILURE, "broken.jsonl:1: 1 to choose from, wanted at least 2"),
           "");
    EXPECT(test_dies(open_tests, "none.txt", EXIT_FAILURE, "none.txt: cannot open"), "");
    EXPECT(test_dies(open_tests, "a.bin", EXIT_FAILURE, "a.bin: token ids, wanted the text"), "");
    EXPECT(test_dies(open_tests, "", EXIT_FAILURE, "an empty name"), "");
}

// ---- surveys ----

// The texts of all documents: a few words, so that some have 13 in a row of a test.
static char (*make_corpus(void))[WORDS_EACH + 1] {
    char(*texts)[WORDS_EACH + 1] = (char(*)[WORDS_EACH + 1]) calloc(DOCUMENTS, WORDS_EACH + 1);
    uint64_t state = 5;
    for (int i = 0; i < DOCUMENTS; i++) {
        for (int j = 0; j < WORDS_EACH; j++) {
            texts[i][j] = (char)('a' + random_number(&state, VOCABULARY));
        }
        if (i % 10 == 7) {
            memcpy(texts[i], texts[random_number(&state, (uint32_t)i)], WORDS_EACH);
        }
    }
    return texts;
}

static const char* write_corpus(char (*texts)[WORDS_EACH + 1], int documents, const char* name) {
    const char* path = test_path(name);
    FILE* file = fopen(path, "w");
    for (int i = 0; i < documents; i++) {
        fprintf(file, "{\"n\":%d,\"text\":\"", i);
        for (int j = 0; j < WORDS_EACH; j++) {
            fprintf(file, "%c ", texts[i][j]);
        }
        fprintf(file, "\"}\n");
    }
    fclose(file);
    return path;
}

static void show_nothing(void* context, const TextBlock* block) { (void)context, (void)block; }
static void pass_nothing(void* context, int pass, int passes) { (void)context, (void)pass, (void)passes; }

static void run_survey(Survey* survey, const SurveySettings* settings, const Filters* filters,
                       const char* input, int threads, uint64_t bytes) {
    const TextOptions options = {TEXT_BY_NAME, "text", "", 5000, filters, 1};
    Documents source;
    survey_open(survey, settings, test_path("a.survey"));
    documents_open(&source, &options, &input, 1);
    EXPECT(survey_run(survey, &source, threads, UINT64_MAX, show_nothing, NULL), "%s", source.error);
    documents_close(&source);
    survey_decide(survey, bytes, pass_nothing, NULL);
}

// True if two documents share 13 letters in a row.
static int shares_words(const char* a, const char* b) {
    for (int i = 0; i + 13 <= WORDS_EACH; i++) {
        char run[14] = "";
        memcpy(run, a + i, 13);
        if (strstr(b, run)) {
            return 1;
        }
    }
    return 0;
}

// Documents are dropped as a plain loop says: those that share words with one of the tests, and
// those whose text an earlier document has that is not dropped for this; n < 1000 are filtered.
TEST(survey) {
    enum { FILTERED = 1000, TESTS = 20 };
    char(*texts)[WORDS_EACH + 1] = make_corpus();
    char error[ERROR_BYTES];
    const char *input = write_corpus(texts, DOCUMENTS, "survey.jsonl"),
               *test = write_corpus(texts + 5000, TESTS, "test.jsonl");
    Filters filters = {.count = 0};
    TestTexts tests;
    Survey survey;
    EXPECT(filters_add(&filters, "n >= 1000", error), "");
    test_texts_open(&tests, test, "text");
    const SurveySettings settings = {DEDUP_EXACT, &tests, 1};
    run_survey(&survey, &settings, &filters, input, 2, (uint64_t)12 << 20);
    EXPECT(survey.documents == DOCUMENTS - FILTERED && survey.num_chunks == 3 &&
               survey.next.failed == FILTERED,
           "");
    uint64_t contaminated = 0, duplicates = 0;
    for (int i = FILTERED; i < DOCUMENTS; i++) {
        int is_contaminated = 0, is_duplicate = 0;
        for (int j = 0; j < TESTS; j++) {
            is_contaminated |= shares_words(texts[5000 + j], texts[i]);
        }
        for (int j = i % 10 == 7 ? FILTERED : i; j < i && !is_contaminated; j++) {
            is_duplicate |= strcmp(texts[i], texts[j]) == 0;
        }
        EXPECT(survey_is_dropped_(&survey, (uint64_t)(i - FILTERED)) == (is_contaminated || is_duplicate),
               "document %d", i);
        contaminated += (uint64_t)is_contaminated;
        duplicates += (uint64_t)is_duplicate;
    }
    EXPECT(contaminated >= TESTS && survey.contaminated == contaminated && survey.shared[0] == contaminated,
           "");
    EXPECT(duplicates > 1000 && survey.duplicates == duplicates, "%llu", (unsigned long long)duplicates);
    survey_close(&survey);
    test_texts_close(&tests);
    filters_close(&filters);
    free(texts);
    remove(test_path("a.survey"));
}

static TestFile list_of(const Survey* survey, const char* input, const Filters* filters) {
    FILE* file = fopen(test_path("list"), "w");
    survey_list(survey, file, &input, filters);
    fclose(file);
    return test_read(test_path("list"));
}

static int same_list(TestFile a, TestFile b) {
    return a.bytes == b.bytes && memcmp(a.data, b.data, a.bytes) == 0;
}

// The file is cut anywhere, or damaged: the survey continues with the same result. So it does with
// other threads and other memory.
TEST(continued) {
    char(*texts)[WORDS_EACH + 1] = make_corpus();
    char error[ERROR_BYTES];
    char input[256], path[256]; // test_path reuses its memory
    strcpy(input, write_corpus(texts, DOCUMENTS, "survey.jsonl"));
    strcpy(path, test_path("a.survey"));
    Filters filters = {.count = 0};
    Survey survey;
    EXPECT(filters_add(&filters, "n != 16400", error) && filters_add(&filters, "n != 16383", error), "");
    const SurveySettings settings = {DEDUP_NEAR, NULL, 1};
    run_survey(&survey, &settings, &filters, input, 1, 1 << 30);
    const TestFile wanted = list_of(&survey, input, &filters);
    const uint64_t bytes = survey.bytes, second = survey.chunks[1].at;
    EXPECT(
        survey.duplicates > 1000 &&
            strstr((char*)wanted.data, "\"document\":16384,\"reason\":\"filter\",\"filter\":\"n != 16383\""),
        "");
    survey_close(&survey);
    const uint64_t cuts[] = {0, 5, second - 1, second, second + 1, second + 100000, bytes - 1, bytes};
#ifdef __SANITIZE_THREAD__
    enum { STEP = 5 }; // the threads are the same for each
#else
    enum { STEP = 1 };
#endif
    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i += STEP) {
        EXPECT(truncate(path, (off_t)cuts[i]) == 0, "");
        run_survey(&survey, &settings, &filters, input, 1 + (int)i % 3, i % 2 ? (uint64_t)11 << 20 : 1 << 30);
        const TestFile got = list_of(&survey, input, &filters);
        EXPECT(survey.bytes == bytes && same_list(got, wanted), "cut at %llu", (unsigned long long)cuts[i]);
        free(got.data);
        survey_close(&survey);
    }
    FILE* file = fopen(path, "r+");
    fseek(file, (long)second + 5000, SEEK_SET);
    fputc('?', file);
    fclose(file);
    survey_open(&survey, &settings, path);
    EXPECT(survey.num_chunks == 1 && survey.next.number == SURVEY_CHUNK &&
               survey.next.document == SURVEY_CHUNK + 1 && survey.next.failed == 1 && !survey.is_complete,
           "%zu chunks", survey.num_chunks);
    survey_close(&survey);
    filters_close(&filters);
    free(wanted.data);
    free(texts);
}
