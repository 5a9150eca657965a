// test_memory_limit.cu -- memory_limit.cuh: the communicators of a grid.
#define PRECISION_BF16
#include "llmc/plan/memory_limit.cuh"
#include "dev/test/lib/test.h"

static void expect_links(GridShape shape, int shards, int communicators, int peers) {
    const Ranks ranks = {grid_of(shape, 0), 2, shards, 8};
    const MemoryLinks links = memory_links(&ranks);
    EXPECT(links.communicators == communicators && links.peers == peers,
           "t %d c %d D %d P %d: %d communicators, %d peers; wanted %d, %d", shape.tensor, shape.context,
           shape.data, shape.pipeline, links.communicators, links.peers, communicators, peers);
}

// One communicator of all, which is also the one of a group of all, unless that has exchanges in
// layers beside those of the data group; one for each other group of several; two more for
// replicas. Middle stages have two neighbors.
TEST(communicators) {
    const GridShape alone = {1, 1, 1, 1, 1}, data = {1, 1, 8, 1, 1}, tensor = {8, 1, 1, 1, 1},
                    context = {1, 8, 1, 1, 1}, experts = {1, 1, 8, 1, 8}, two = {2, 1, 4, 1, 1},
                    three = {2, 2, 4, 1, 1}, all = {2, 2, 2, 4, 1};
    expect_links(alone, 1, 0, 0);
    expect_links(data, 8, 1, 7);
    expect_links(data, 4, 3, 3);
    expect_links(tensor, 1, 1, 7);
    expect_links(context, 8, 2, 7 + 7);
    expect_links(experts, 8, 2, 7 + 7);
    expect_links(two, 4, 3, 1 + 3);
    expect_links(three, 8, 4, 1 + 1 + 7);
    expect_links(all, 4, 5, 1 + 1 + 3 + 2);
}

// Several ranks whose micro-steps are graphs leave NCCL 256 MiB more.
TEST(reserve) {
    const GridShape one = {1, 1, 1, 1, 1}, two = {1, 1, 2, 1, 1};
    size_t usable[2][2]; // without graphs and with them, on one rank and on two
    for (int ranks = 1; ranks <= 2; ranks++) {
        for (int graph = 0; graph < 2; graph++) {
            Settled s;
            memset((void*)&s, 0, sizeof(s));
            s.options.plan = 1;
            s.options.plan_gpu = (char*)"H100";
            s.options.memory.graph = graph;
            s.ranks = Ranks{grid_of(ranks == 1 ? one : two, 0), 2, ranks, ranks};
            usable[graph][ranks - 1] = memory_usable_(&s);
        }
    }
    EXPECT(usable[0][0] > (size_t)70 << 30 && usable[0][1] == usable[0][0] && usable[1][0] == usable[0][0]);
    EXPECT(usable[0][1] - usable[1][1] == (size_t)256 << 20, "%zu", usable[0][1] - usable[1][1]);
}
