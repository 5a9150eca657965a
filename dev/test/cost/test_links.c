// test_links.c -- links.h: the time of collectives, in a machine and over machines.
#include "llmc/cost/links.h"

#include "dev/test/lib/test.h"

static const Links LINKS = {300e9, 42e9, 8};

// Returns the seconds without the start of the message.
static double bytes_s(double seconds, LinksGroup group) { return seconds - links_start_s(group); }

TEST(groups) {
    static const struct {
        int size, stride, near;
    } cases[] = {{8, 1, 8}, {2, 1, 2}, {16, 1, 8}, {4, 8, 1}, {4, 2, 4}, {32, 2, 4}, {8, 16, 1}, {3, 3, 2}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const LinksGroup group = links_group(&LINKS, cases[i].size, cases[i].stride);
        EXPECT(group.size == cases[i].size && group.near == cases[i].near, "%d processes, %d apart: %d near",
               cases[i].size, cases[i].stride, group.near);
    }
    EXPECT(links_machines(links_group(&LINKS, 32, 2)) == 8 && links_machines(links_group(&LINKS, 2, 1)) == 1,
           "machines");
}

TEST(in_a_machine) {
    const LinksGroup group = links_group(&LINKS, 8, 1);
    EXPECT_NEAR(bytes_s(links_gather_s(&LINKS, group, 300e9), group), 7.0 / 8, 1e-12, "a gather");
    EXPECT_NEAR(bytes_s(links_exchange_s(&LINKS, group, 300e9), group), 7.0 / 8, 1e-12, "an exchange");
    EXPECT_NEAR(bytes_s(links_send_s(&LINKS, group, 300e9), group), 1, 1e-12, "a message");
    EXPECT(links_gather_s(&LINKS, links_group(&LINKS, 1, 1), 1e9) == 0, "one process sends nothing");
}

// Bytes from the own machine do not pass the cards. In a gather those from others pass the cards of
// all processes of a machine, in an exchange only each process's own.
TEST(over_machines) {
    for (int stride = 1; stride <= 16; stride *= 2) {
        const LinksGroup group = links_group(&LINKS, 16, stride);
        const double cards = stride < 8 ? 8.0 / stride : 1, others = (16 - cards) / 16 * 1e12,
                     inside = 15.0 / 16 * 1e12 / 300e9;
        EXPECT_NEAR(bytes_s(links_gather_s(&LINKS, group, 1e12), group) /
                        fmax(inside, others / (cards * 42e9)),
                    1, 1e-12, "%.0f cards", cards);
        EXPECT_NEAR(bytes_s(links_exchange_s(&LINKS, group, 1e12), group) / (others / 42e9), 1, 1e-12,
                    "own cards, %d apart", stride);
        EXPECT_NEAR(bytes_s(links_send_s(&LINKS, group, 42e9), group), 1, 1e-12, "a message");
    }
    // 8 pieces of 1 GB from the other machine, or all through 8 cards
    const LinksGroup two = links_group(&LINKS, 16, 1);
    EXPECT_NEAR(bytes_s(links_exchange_s(&LINKS, two, 16e9), two), 8.0 / 42, 1e-12,
                "two machines: an exchange");
    EXPECT_NEAR(bytes_s(links_gather_s(&LINKS, two, 16e9), two), 15.0 / 300, 1e-12, "two machines: a gather");
    EXPECT(links_start_s(links_group(&LINKS, 16, 8)) > links_start_s(links_group(&LINKS, 16, 1)) &&
               links_start_s(links_group(&LINKS, 16, 1)) > links_start_s(links_group(&LINKS, 8, 1)),
           "more machines take longer to start");
}
