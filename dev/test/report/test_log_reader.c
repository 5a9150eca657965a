// test_log_reader.c -- log_reader.h: a run reads back as it was logged: each step once, unknown
// lines ignored, the last line only if it is complete. Damaged lines are skipped, with a warning
// that locates the first.
#define LOG_READER_IMPLEMENTATION

#include "llmc/report/log_reader.h"
#include "llmc/report/run_list.h"
#include "dev/test/lib/test.h"

#define TRAIN(step, loss)                                                                                    \
    "{\"kind\":\"train\",\"step\":" #step ",\"loss\":" #loss ",\"tokens\":" #step "00}\n"
#define VAL(step, loss) "{\"kind\":\"val\",\"step\":" #step ",\"loss\":" #loss "}\n"

static Record read_text(const char* text) {
    Record record;
    record_read(&record, test_write("run.jsonl", text, strlen(text)));
    return record;
}

TEST(numbers) {
    Record r = read_text(
        "{\"kind\":\"config\",\"options\":{\"lr\":0.1,\"shuffle\":true,\"batch\":null,\"out\":\"a b\"},"
        "\"device\":\"d\",\"floor\":0.5,\"mem_mb\":{\"weights\":2.5},\"host_mem_mb\":{\"m\":1},\"disk_mb\":{"
        "\"m\":7}}\n" TRAIN(1, 3) TRAIN(2, null) VAL(2, 2.5) "{\"kind\":\"new\",\"step\":{}}\n" TRAIN(3, 2)
            VAL(3, 2.75) "{\"kind\":\"sample\",\"step\":3,\"text\":\"a\\u0000b\"}\n{\"kind\":\"train\",\"st");
    EXPECT(r.num_steps == 3 && r.end == RECORD_UNFINISHED, "%zu", r.num_steps);
    EXPECT(isnan(r.steps[1].values[RECORD_LOSS]) && r.steps[2].values[RECORD_LOSS] == 2, "");
    EXPECT(isnan(r.steps[0].values[RECORD_POWER_W]), "");
    EXPECT(record_best(&r, RECORD_VALUE_LOSS)->step == 2 && record_last(&r, RECORD_VAL)->step == 3, "");
    EXPECT(record_place(&r, RECORD_TOKENS, 0) == 0 && record_place(&r, RECORD_TOKENS, 2) == 200, "");
    EXPECT(strcmp(record_option(&r, "shuffle"), "on") == 0 && strcmp(record_option(&r, "batch"), "auto") == 0,
           "");
    EXPECT(strcmp(record_option(&r, "lr"), "0.1") == 0 && strcmp(record_option(&r, "out"), "a b") == 0, "");
    EXPECT(!record_option(&r, "steps") && r.floor == 0.5 && strcmp(r.device, "d") == 0, "");
    EXPECT(r.num_memory == 3 && r.memory[0].mib == 2.5 && r.memory[0].place == RECORD_ON_DEVICE &&
               r.memory[1].place == RECORD_ON_HOST && r.memory[2].place == RECORD_ON_DISK &&
               r.memory[2].mib == 7,
           "");
    EXPECT(record_last(&r, RECORD_SAMPLE)->bytes == 3, "");
    record_close(&r);
}

// Losses of sources, of which a step may have any, and the last loads of experts.
TEST(parts) {
    Record r =
        read_text("{\"kind\":\"config\",\"options\":{},\"command\":\"./train 'a b'\"}\n"
                  "{\"kind\":\"train\",\"step\":1,\"loss\":1,\"source_loss\":{\"b\":2,\"a \\\"x\":null}}\n"
                  "{\"kind\":\"train\",\"step\":2,\"source_loss\":{\"a \\\"x\":3},\"loss\":1}\n" TRAIN(
                      3, 1) "{\"kind\":\"experts\",\"step\":2,\"load\":[[1,1],[2,0]]}\n"
                            "{\"kind\":\"experts\",\"step\":3,\"load\":[[1.5,0.5],[1,1]]}\n");
    EXPECT(r.num_steps == 3 && strcmp(r.command, "./train 'a b'") == 0, "%s", r.command);
    EXPECT(r.num_sources == 2 && strcmp(r.sources[0], "b") == 0 && strcmp(r.sources[1], "a \"x") == 0, "");
    EXPECT(record_source_loss(&r.steps[0], 0) == 2 && isnan(record_source_loss(&r.steps[0], 1)), "");
    EXPECT(isnan(record_source_loss(&r.steps[1], 0)) && record_source_loss(&r.steps[1], 1) == 3, "");
    EXPECT(isnan(record_source_loss(&r.steps[2], 0)), "");
    EXPECT(r.loads.step == 3 && r.loads.layers == 2 && r.loads.experts == 2 && r.loads.load[0] == 1.5, "");
    record_close(&r);
}

// Steps that are done again replace the first ones, with what was said about them.
TEST(again) {
    Record r = read_text(TRAIN(1, 9) TRAIN(2, 8) VAL(2, 8) TRAIN(3, 7) TRAIN(2, 5) VAL(2, 5) TRAIN(3, 4));
    EXPECT(r.num_steps == 3 && r.steps[1].values[RECORD_LOSS] == 5, "%zu", r.num_steps);
    EXPECT(r.num_events == 1 && r.events[0].values[RECORD_VALUE_LOSS] == 5, "%zu", r.num_events);
    record_close(&r);
    r = read_text(TRAIN(1, 9) TRAIN(2, 8) TRAIN(
        3, 70) "{\"kind\":\"skip\",\"step\":3,\"reason\":\"z\"}\n"
               "{\"kind\":\"rollback\",\"step\":1,\"from\":3,\"reason\":\"r\"}\n" TRAIN(2, 7));
    EXPECT(r.num_steps == 2 && r.steps[1].values[RECORD_LOSS] == 7, "");
    EXPECT(r.num_events == 1 && r.events[0].kind == RECORD_ROLLBACK && r.events[0].values[RECORD_FROM] == 3,
           "");
    record_close(&r);
}

// A log that grows, is cut and written again to more bytes than before, and is replaced.
TEST(follow) {
    RecordFollower f;
    const char* one = TRAIN(1, 9) TRAIN(2, 8) "{\"kind\":\"tra";
    const char* path = test_write("follow.jsonl", one, strlen(one));
    record_follow(&f, path);
    EXPECT(f.record.num_steps == 2 && !record_follow_on(&f), "%zu", f.record.num_steps);
    const char* more = TRAIN(1, 9) TRAIN(2, 8) TRAIN(3, 7) VAL(3, 6);
    FILE* file = fopen(path, "r+");
    fputs(more, file);
    fflush(file);
    EXPECT(record_follow_on(&f) && f.record.num_steps == 3 && f.record.num_events == 1, "it grew");
    EXPECT(!record_follow_on(&f), "and no more");
    const char* again = TRAIN(1, 9) "{\"kind\":\"save\",\"step\":1,\"path\":\"\\udcff\"}\n" TRAIN(2, 5)
        TRAIN(3, 4) TRAIN(4, 3);
    EXPECT(ftruncate(fileno(file), 0) == 0 && fseek(file, 0, SEEK_SET) == 0, "");
    fputs(again, file);
    fclose(file);
    EXPECT(record_follow_on(&f) && f.record.num_steps == 4 && f.record.steps[1].values[RECORD_LOSS] == 5,
           "%zu", f.record.num_steps);
    EXPECT(record_last(&f.record, RECORD_SAVE)->step == 1 && f.record.num_damaged == 0, "");
    EXPECT(unlink(path) == 0 && !record_follow_on(&f), "a log that is away for a moment");
    test_write("follow.jsonl", more, strlen(more));
    EXPECT(record_follow_on(&f) && f.record.num_steps == 3 && !record_last(&f.record, RECORD_SAVE), "");
    record_follow_end(&f);
}

// A finished run that is started again does nothing: its speed stays, and its peak is that of all
// starts.
TEST(starts) {
    Record r =
        read_text(TRAIN(1, 9) "{\"kind\":\"summary\",\"tok_per_s\":500,\"samples_per_s\":5,\"peak_mb\":39}\n"
                              "{\"kind\":\"summary\",\"tok_per_s\":0,\"samples_per_s\":0,\"peak_mb\":21}\n");
    EXPECT(r.tok_per_s == 500 && r.peak_mib == 39, "%g tok/s, %g MiB", r.tok_per_s, r.peak_mib);
    record_close(&r);
}

#define PEAK(step, mfu, peak)                                                                                \
    "{\"kind\":\"train\",\"step\":" #step ",\"loss\":1,\"mfu\":" #mfu ",\"peak\":" #peak "}\n"

// Shares of a peak that turned out too low become those of the right one, but not across starts:
// that may be another machine.
TEST(peaks) {
    static const double wanted[] = {0.25, 0.5, 0.3, 0.2, 0.4, 0.8};
    Record r = read_text("{\"kind\":\"config\"}\n" PEAK(1, 1, 2e9) VAL(1, 2) PEAK(2, 1, 4e9) PEAK(3, 0.3, 8e9)
                             VAL(3, 2) "{\"kind\":\"config\"}\n" VAL(3, 2) PEAK(4, 0.4, 1e9) PEAK(5, 0.4, 2e9)
                                 TRAIN(6, 1));
    r.steps[5].values[RECORD_MFU] = wanted[5]; // of an older log
    for (int i = 0; i < 6; i++) {
        EXPECT_NEAR(r.steps[i].values[RECORD_MFU], wanted[i], 1e-12, "step %d", i + 1);
    }
    record_close(&r);
}

static void body_read(const void* text) {
    Record r = read_text((const char*)text);
    record_close(&r);
}

// Damaged lines are left out whole: a start that is torn leaves the options of the one before.
static void body_damaged(const void* unused) {
    (void)unused;
    static const char text[] = "{\"kind\":\"config\",\"options\":{\"lr\":0.1},\"device\":\"d\"}\n" TRAIN(
        1, 4) "\0\0\0\0\0\n" //
              "{\"kind\":\"train\",\"step\":2,\"lo" TRAIN(2, 3) TRAIN(2, "x") TRAIN(0, 1) "[1]\n{}\n\n" VAL(
                  -1, 2) "{\"kind\":\"config\",\"options\":{\"lr\":0.2},\"dev\n{\"kind\":\"summary\",\"tok_"
                         "per_s\":7\n" TRAIN(3, 2);
    Record r;
    record_read(&r, test_write("damaged.jsonl", text, sizeof(text) - 1));
    EXPECT(r.num_damaged == 10, "%zu", r.num_damaged);
    EXPECT(r.num_steps == 2 && r.steps[1].step == 3 && r.steps[1].values[RECORD_LOSS] == 2, "%zu",
           r.num_steps);
    EXPECT(strcmp(record_option(&r, "lr"), "0.1") == 0 && strcmp(r.device, "d") == 0, "%s", r.device);
    EXPECT(r.num_events == 1 && r.end == RECORD_UNFINISHED && isnan(r.tok_per_s), "%zu", r.num_events);
    record_close(&r);
    fflush(stdout);
    exit(test_failures_);
}

static void body_warning(const void* text) {
    body_read(text);
    exit(0);
}

TEST(refused) {
    EXPECT(test_dies(body_warning, TRAIN(1, 2) TRAIN(2, "x"), 0,
                     "warning: |run.jsonl: byte |found '\"'|(line 2 of the log); skipped 1 damaged line\n"),
           "");
    EXPECT(test_dies(body_warning, TRAIN(1, 2) "{}\n[\n", 0, "its kind|line 2|skipped 2 damaged lines\n"),
           "");
    EXPECT(test_dies(body_read, "{\"kind\":\"train\",\"step\":0}\n", 1, "a step from 1|line 1"), "");
    EXPECT(test_dies(body_read, "[1]\n", 1, "found '[', wanted '{'"), "");
    EXPECT(test_dies(body_read, VAL(0, 2), 1, "no update is logged yet"), "");
}

TEST(split) {
    static char paths[RECORD_RUNS][PATH_MAX];
    EXPECT(record_split(paths, "a,b\\,c,d", "report") == 3, "");
    EXPECT(strcmp(paths[0], "a") == 0 && strcmp(paths[1], "b,c") == 0 && strcmp(paths[2], "d") == 0, "%s",
           paths[1]);
}

TEST(damaged_lines) { EXPECT(test_dies(body_damaged, NULL, 0, "skipped 10 damaged lines"), ""); }
