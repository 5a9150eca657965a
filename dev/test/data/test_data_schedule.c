// test_data_schedule.c -- data_schedule.h: the file of a schedule, and the pieces of ramps.
#include "dev/test/lib/test.h"
#define DATA_SCHEDULE_IMPLEMENTATION

#include "llmc/base/rand.h"
#include "llmc/data/data_schedule.h"

static const char* const names[] = {"web", "books", "maths"};

static const char* write_schedule(const char* text) { return test_write("schedule.txt", text, strlen(text)); }

TEST(data_schedule) {
    DataSchedule d;
    data_schedule_read(&d,
                       write_schedule("# comment\n\n"
                                      "0 web 8 books 2 # more\n"
                                      "10k\tramp books 0.4 web 1.6\r\n"
                                      "12000 web 1 books 0 maths .5\n"
                                      "2.5B tokens maths 7"),
                       names, 3);
    EXPECT(d.count == 4 && d.sources == 3, "%d lines", d.count);
    EXPECT(d.line[0].weights[0] == 4 && d.line[0].weights[1] == 1 && d.line[0].weights[2] == 0, "lowest");
    EXPECT(d.line[1].from == 10000 && d.line[1].is_ramp && d.line[1].number == 4, "a ramp");
    EXPECT(d.line[1].weights[0] == 4 && d.line[1].weights[1] == 1, "in any order and scale");
    EXPECT(!d.line[2].is_ramp && d.line[2].weights[0] == 2 && d.line[2].weights[2] == 1, "decimals");
    EXPECT(d.line[3].from == 2500000000 && d.line[3].unit == SCHEDULE_TOKENS, "%lld",
           (long long)d.line[3].from);
    EXPECT(d.line[3].weights[2] == 1 && d.line[0].unit == SCHEDULE_STEPS, "one source");
    data_schedule_close(&d);
}

// ---- errors ----

static void read_it(const void* text) {
    DataSchedule d;
    data_schedule_read(&d, write_schedule((const char*)text), names, 3);
}

static void read_missing(const void* unused) {
    DataSchedule d;
    (void)unused;
    data_schedule_read(&d, test_path("none"), names, 3);
}

static void check_order(const void* unused) {
    DataSchedule d;
    (void)unused;
    data_schedule_read(&d, write_schedule("0 web 1 books 1\n# -\n10 web 1 maths 1\n5 web 1"), names, 3);
    d.line[1].first = 40;
    d.line[2].first = 20;
    data_schedule_check_order(&d);
}

static void many_lines(const void* unused) {
    char text[4096] = "";
    (void)unused;
    for (int i = 0; i < 65; i++) {
        sprintf(text + strlen(text), "%d web 1 books 1 maths 1\n", i);
    }
    read_it(text);
}

TEST(data_schedule_errors) {
    static const char* const bad[][2] = {
        {"", "schedule.txt: no line with weights"},
        {"# nothing\n", "schedule.txt: no line with weights"},
        {"5 web 1 books 1 maths 1", "schedule.txt:1: the first weights are from 5 on|wanted from 0 on"},
        {"x web 1", "schedule.txt:1: starts with x; wanted a number"},
        {"-1 web 1", "schedule.txt:1: starts with -1"},
        {"1.5 web 1", "schedule.txt:1: starts with 1.5"},
        {"0 web 1 books 1 maths 1\n1e4 web 1", "schedule.txt:2: starts with 1e4"},
        {"0 web 1 books 1 maths 1\n99999999T web 1", "schedule.txt:2: starts with 99999999T"},
        {"\n0 web 1 book 1", "schedule.txt:2: source book is not one of --train-data; wanted web"},
        {"0 web", "schedule.txt:1: weight of web is \"\""},
        {"0 web -1", "schedule.txt:1: weight of web is \"-1\""},
        {"0 web 1.0000001", "weight of web is \"1.0000001\"; wanted a decimal"},
        {"0 web 1 web 2", "schedule.txt:1: source web is named twice"},
        {"0 web 0 books 0", "schedule.txt:1: no source has a weight above 0"},
        {"0", "schedule.txt:1: no source has a weight above 0"},
        {"0 ramp web 1 books 1 maths 1", "schedule.txt:1: a ramp on the last line"},
        {"0 web 1\n9 books 1", "schedule.txt: no line gives source maths of --train-data a weight"},
        {"0 web 1 books 0.00001 maths 1", "schedule.txt:1: the weights repeat after 200001 sequences"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        EXPECT(test_dies(read_it, bad[i][0], 2, bad[i][1]), "%s", bad[i][0]);
    }
    EXPECT(test_dies(many_lines, NULL, 2, "schedule.txt:65: more than 64 lines"), "");
    EXPECT(test_dies(read_missing, NULL, 1, "none: cannot"), "");
    EXPECT(test_dies(check_order, NULL, 2, "schedule.txt:4: starts at sequence 20 of the run, line 3 at 40"),
           "");
}

// ---- ramps ----

// Returns the sequences of source s in a ramp of `length` sequences, up to `n` of them.
static double integral(const ScheduleLine* a, const ScheduleLine* b, int s, double n, double length) {
    double sum_a = 0, sum_b = 0;
    for (int i = 0; i < 3; i++) {
        sum_a += (double)a->weights[i];
        sum_b += (double)b->weights[i];
    }
    const double from = (double)a->weights[s] / sum_a, to = (double)b->weights[s] / sum_b;
    return from * n + (to - from) * n * n / (2 * length);
}

// Pieces follow each other, and after each of them every source has its part of the ramp: within
// one turn of those that are dealt, which are sequences, or 1/1024 of a longer piece.
static void test_ramp(Rand* rng, int64_t length) {
    ScheduleLine lines[2];
    DataSchedule d = {NULL, 3, 2, lines};
    size_t count;
    memset(lines, 0, sizeof(lines));
    lines[0].is_ramp = 1;
    lines[0].first = rand_below(rng, 1000) - 500;
    lines[1].first = lines[0].first + length;
    for (int s = 0; s < 3; s++) {
        lines[0].weights[s] = rand_below(rng, 100) * rand_below(rng, 2);
        lines[1].weights[s] = rand_below(rng, 100) * rand_below(rng, 2);
    }
    lines[0].weights[0]++;
    lines[1].weights[1]++;
    SchedulePiece* pieces = data_schedule_cut(&d, &count);
    double given[3] = {0};
    int64_t at = lines[0].first;
    EXPECT(count >= 2 && count <= 65 && pieces[count - 1].end == INT64_MAX, "%zu pieces", count);
    for (size_t k = 0; k + 1 < count; k++) {
        const double sequences = (double)(pieces[k].end - pieces[k].first);
        double sum = 0;
        EXPECT(pieces[k].first == at && pieces[k].end > at, "piece %zu of %zu", k, count);
        at = pieces[k].end;
        for (int s = 0; s < 3; s++) {
            sum += (double)pieces[k].weights[s];
        }
        EXPECT(sum <= SCHEDULE_QUANTA, "a cycle of %g", sum);
        for (int s = 0; s < 3; s++) {
            given[s] += sequences * (double)pieces[k].weights[s] / sum;
            const double wanted =
                integral(&lines[0], &lines[1], s, (double)(at - lines[0].first), (double)length);
            // the lengths of pieces differ by 1: what a turn stands for, by 1/1024 a piece
            EXPECT_NEAR(given[s], wanted,
                        fmax(1, sequences / SCHEDULE_QUANTA) + (double)SCHEDULE_PIECES / SCHEDULE_QUANTA,
                        "%lld, piece %zu, %d", (long long)length, k, s);
        }
    }
    EXPECT(at == lines[1].first, "the ramp ends at %lld", (long long)at);
    free(pieces);
}

TEST(data_schedule_ramps) {
    static const int64_t lengths[] = {1,    2,    31,   64,    65,      100,
                                      1000, 2048, 4097, 65536, 1000003, (int64_t)1 << 52};
    Rand rng = rand_open(5, 2);
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        for (int trial = 0; trial < 20; trial++) {
            test_ramp(&rng, lengths[i]);
        }
    }
}

TEST(data_schedule_print) {
    char text[512] = "";
    DataSchedule d;
    FILE* file = tmpfile();
    data_schedule_read(&d, write_schedule("0 web 3 books 1\n20000 ramp web 1\n2M tokens maths 1"), names, 3);
    data_schedule_print(file, &d, names);
    rewind(file);
    EXPECT(fread(text, 1, sizeof(text) - 1, file) > 0, "");
    EXPECT(strcmp(text, "mixture from step 0 on: web 75 %, books 25 %\n"
                        "mixture from step 20,000 on: web 100 %, then linearly to:\n"
                        "mixture from token 2,000,000 on: maths 100 %\n") == 0,
           "%s", text);
    data_schedule_close(&d);
    fclose(file);
}
