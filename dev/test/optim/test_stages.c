// test_batch_schedule.c -- batch_schedule.h: texts, and stages against a plain loop.
#include "llmc/optim/stages.h"
#include "dev/test/lib/test.h"

static void test_texts(void) {
    static const char* const bad[] = {"",
                                      "0",
                                      "0:",
                                      "0:8,",
                                      "1:8",
                                      "0:0",
                                      "0:8,0:9",
                                      "0:8,5:8",
                                      "0:9,5:8",
                                      "0:8,5:9,4:10",
                                      "0:8 ,5:9",
                                      "0:-8",
                                      "0:8,5",
                                      "a:8",
                                      "0:8;5:9",
                                      "0:1099511627776",
                                      "0:99999999999999999999",
                                      "0:1,1:2,2:3,3:4,4:5,5:6,6:7,7:8,8:9"};
    Stages b;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        EXPECT(!stages_parse(&b, bad[i]), "'%s'", bad[i]);
    }
    EXPECT(stages_parse(&b, "0:131072,2000:262144") && b.count == 2 && b.stage[0].step == 0 &&
               b.stage[0].value == 131072 && b.stage[1].step == 2000 && b.stage[1].value == 262144,
           "two stages");
    EXPECT(stages_parse(&b, "0:1,1:2,2:3,3:4,4:5,5:6,6:7,7:8") && b.count == STAGES_MOST, "eight");
    EXPECT(stages_parse(&b, "0:1099511627775") && b.count == 1, "one");
}

static void test_sums(const Stages* b) {
    int64_t tokens = 0, size = 0;
    for (int64_t step = 0; step < 40; step++) {
        for (int i = 0; i < b->count; i++) {
            size = b->stage[i].step == step ? b->stage[i].value : size;
        }
        EXPECT(stages_at(b, step) == size, "step %d: %d", (int)step, (int)size);
        EXPECT(stages_sum(b, step) == (double)tokens, "before step %d", (int)step);
        for (int64_t more = 0; more < size; more++) {
            EXPECT(stages_steps(b, (double)(tokens + more)) == (double)step, "steps of %d tokens",
                   (int)(tokens + more));
        }
        tokens += size;
    }
    EXPECT(stages_last(b) == size, "the last one");
}

TEST(batch_schedule) {
    Stages b = stages_constant(7);
    test_texts();
    test_sums(&b);
    EXPECT(stages_parse(&b, "0:3,1:5,10:6,33:20"), "parse");
    test_sums(&b);
}
