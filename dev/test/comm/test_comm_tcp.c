// test_comm_tcp.c -- ranks that meet by TCP: collectives, refused processes, and all ranks end when
// one does. Each rank is a child of this process, on loopback.
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/rand.h"
#include "llmc/comm/comm.h"
#include "llmc/comm/comm_tcp.h"

#include "dev/test/lib/test.h"

// One rank: its process, and the file with what it said.
typedef struct {
    pid_t pid;
    char said[PATH_MAX];
} Rank;

typedef void (*Body)(Comm* c);

static struct sockaddr_in loopback(int port) {
    struct sockaddr_in address;
    memset(&address, 0, sizeof(address));
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)port);
    return address;
}

// A socket that listens at *port; 0: at any, which it sets.
static int listen_at(int* port) {
    struct sockaddr_in address = loopback(*port);
    socklen_t size = sizeof(address);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT(bind(fd, (struct sockaddr*)&address, size) == 0 && listen(fd, 8) == 0);
    getsockname(fd, (struct sockaddr*)&address, &size);
    *port = ntohs(address.sin_port);
    return fd;
}

static CommMeeting meeting_at(int port, const char* job) {
    CommMeeting m = {"127.0.0.1", port, "", ""};
    snprintf(m.job, sizeof(m.job), "%s", job);
    return m;
}

// At a port where nobody listens. It stays bound, so that the system gives it to no other process,
// such as the same test of another build. Only Linux lets a rank listen there as well, because both
// sockets have SO_REUSEADDR.
static CommMeeting meeting_of(const char* job) {
    struct sockaddr_in address = loopback(0);
    socklen_t size = sizeof(address);
    const int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    EXPECT(bind(fd, (struct sockaddr*)&address, size) == 0, "%s", strerror(errno));
    getsockname(fd, (struct sockaddr*)&address, &size);
#ifndef __linux__
    close(fd);
#endif
    return meeting_at(ntohs(address.sin_port), job);
}

static CommMeeting meeting_in(const char* file, const char* job) {
    CommMeeting m = meeting_at(0, job);
    m.host[0] = '\0';
    snprintf(m.file, sizeof(m.file), "%s", file);
    return m;
}

// Starts a rank. It may take 10 timeouts to join.
static Rank start(int rank, int size, const CommMeeting* meeting, double timeout_s, Body body) {
    static int number = 0;
    char name[64];
    Rank r;
    snprintf(name, sizeof(name), "said_%d_%d", (int)getpid(), number++);
    file_path(r.said, "%s", test_path(name));
    fflush(stdout);
    r.pid = fork();
    if (r.pid == 0) {
        Comm c;
        const CommPlace place = {rank, size, -1, -1};
        test_failures_ = 0;
        EXPECT(freopen(r.said, "w", stderr));
        comm_expect(&c, place);
        comm_open(&c, place, meeting, timeout_s);
        comm_progress(&c, COMM_BACKWARD, 12, "reduce of block 7");
        body(&c);
        comm_close(&c);
        exit(test_failures_ > 0);
    }
    return r;
}

// Waits for its end; returns the exit status, or 128 + signal.
static int ended(Rank r) {
    int status = 0;
    waitpid(r.pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Returns true if the rank ends with this status and has printed these words; "": nothing.
static int ends(Rank r, int wanted, const char* words) {
    char error[ERROR_BYTES], *said;
    size_t bytes;
    const int status = ended(r);
    if (!file_try_read(r.said, 65536, &said, &bytes, error)) {
        printf("%s\n", error);
        return 0;
    }
    const int ok = status == wanted && (*words ? strstr(said, words) != NULL : bytes == 0);
    if (!ok) {
        printf("exit status %d, wanted %d; '%s', wanted '%s'\n", status, wanted, said, words);
    }
    free(said);
    return ok;
}

// ---- messages ----

enum { MANY = 3 << 20 }; // more than sockets hold

static void body_messages(Comm* c) {
    int64_t word = c->rank == 0 ? 4711 : 0, all[8];
    char* many = (char*)check_alloc(MANY, 1, "many");
    comm_barrier(c);
    comm_broadcast(c, &word, sizeof(word));
    EXPECT(word == 4711, "%lld on rank %d", (long long)word, c->rank);
    for (int i = 0; i < 100; i++) {
        word = 10 * c->rank + i;
        comm_all_gather(c, all, &word, sizeof(word));
        for (int r = 0; r < c->size; r++) {
            EXPECT(all[r] == 10 * r + i, "%lld from rank %d", (long long)all[r], r);
        }
        EXPECT(comm_any(c, 1 << c->rank) == (1 << c->size) - 1);
        EXPECT(comm_any(c, 0) == 0);
    }
    const int last = c->size - 1;
    EXPECT(comm_sum(c, c->rank + 0.5) == last * c->size / 2.0 + 0.5 * c->size, "sum");
    EXPECT(comm_max(c, c->rank) == last && comm_max(c, -c->rank) == 0, "largest");
    EXPECT(comm_min(c, SIZE_MAX - (size_t)c->rank) == SIZE_MAX - (size_t)last, "smallest");
    EXPECT(comm_first(c, c->rank > 0 ? 10 * c->rank : 0) == 10 && comm_first(c, 0) == 0, "first");
    memset(many, c->rank == 0 ? 7 : 0, MANY);
    comm_broadcast(c, many, MANY);
    EXPECT(many[0] == 7 && many[MANY - 1] == 7);
    free(many);
    comm_all_gather(c, all, &word, 0);
    comm_agree(c, "the weather", 7, "sun");
    EXPECT(c->local_size == c->size && c->local_rank == c->rank && c->nodes == 1 &&
           strcmp(c->library, "TCP") == 0);
}

static void test_messages(CommMeeting meeting) {
    for (int size = 2; size <= 4; size++) {
        Rank ranks[4];
        for (int r = 0; r < size; r++) {
            ranks[r] = start(r, size, &meeting, 5, body_messages);
        }
        for (int r = 0; r < size; r++) {
            EXPECT(ends(ranks[r], 0, ""), "rank %d of %d, %s", r, size, meeting.file);
        }
    }
}

static void test_messages_tcp(void) { test_messages(meeting_of("job")); }

static void test_messages_fs(void) { test_messages(meeting_in(test_path("meeting.txt"), "")); }

static void body_nothing(Comm* c) { (void)c; }

// ---- who is refused ----

static void test_wrong_size(void) {
    const CommMeeting m = meeting_of("");
    const Rank zero = start(0, 2, &m, 5, body_nothing), one = start(1, 3, &m, 5, body_nothing);
    EXPECT(ends(zero, 1, "error: rank 1 of 3 ("));
    EXPECT(ends(one, 1, ") came to rank 0 of 2 ("));
}

static void test_twice(void) {
    const CommMeeting m = meeting_of("");
    const Rank zero = start(0, 3, &m, 5, body_nothing), one = start(1, 3, &m, 5, body_nothing);
    usleep(300000); // until it is there
    const Rank again = start(1, 3, &m, 5, body_nothing);
    EXPECT(ends(zero, 1, "rank 1 is claimed by two processes: "));
    EXPECT(ends(again, 1, "rank 1 is claimed by two processes: "));
    EXPECT(ended(one) == 1);
}

// It does not keep this one from its start.
static void test_other_job(void) {
    const CommMeeting m = meeting_of("srun 1.0");
    const CommMeeting other = meeting_at(m.port, "srun 2.0");
    const Rank zero = start(0, 2, &m, 5, body_nothing), stranger = start(1, 2, &other, 5, body_nothing);
    EXPECT(ends(stranger, 1, "waits for another job, 'srun 1.0'; this one is 'srun 2.0'"));
    const Rank one = start(1, 2, &m, 5, body_nothing);
    EXPECT(ends(zero, 0, "") && ends(one, 0, ""));
}

static void test_missing(void) {
    const CommMeeting m = meeting_of(""), nowhere = meeting_of("");
    const Rank zero = start(0, 4, &m, 0.08, body_nothing), two = start(2, 4, &m, 0.08, body_nothing),
               lost = start(1, 2, &nowhere, 0.04, body_nothing);
    EXPECT(ends(zero, 1, "these ranks have not joined rank 0 of 4, ") && ended(two) == 1);
    EXPECT(ends(lost, 1, "rank 1 has not found rank 0 within 0 s: 127.0.0.1:"));
}

static void test_port_in_use(void) {
    int port = 0;
    const int fd = listen_at(&port);
    const CommMeeting m = meeting_at(port, "");
    EXPECT(ends(start(0, 2, &m, 5, body_nothing), 1, "--server HOST:PORT names another one"));
    const Rank one = start(1, 2, &m, 0.02, body_nothing); // accepted by nobody
    usleep(100000);
    const int accepted = accept(fd, NULL, NULL);
    EXPECT(write(accepted, "220 smtp\n", 9) == 9);
    close(accepted);
    EXPECT(ends(one, 1, "the listener there "));
    close(fd);
}

// Files that earlier runs left: of nobody, of another job, with another key, and what is no such
// file at all.
static void test_stale_files(void) {
    const CommMeeting gone = meeting_of("");
    char text[512];
    const char* path = test_path("stale");
    const CommMeeting m = meeting_in(path, "srun 1.0");
    snprintf(text, sizeof(text),
             "pretrain.c waits\njob srun 1.0\nkey 0123456789abcdef\nport %d\nhost 127.0.0.1\n", gone.port);
    file_write_text(path, text, strlen(text));
    const Rank one = start(1, 2, &m, 5, body_nothing);
    EXPECT(ends(start(1, 2, &m, 0.02, body_nothing), 1, "127.0.0.1:"));
    const Rank zero = start(0, 2, &m, 5, body_nothing);
    EXPECT(ends(zero, 0, "") && ends(one, 0, ""));
    EXPECT(access(path, F_OK) != 0, "it is removed when all are there");

    snprintf(text, sizeof(text), "pretrain.c waits\njob srun 9.0\nkey 1\nport 7\nhost 127.0.0.1\n");
    file_write_text(path, text, strlen(text));
    EXPECT(ends(start(1, 2, &m, 0.02, body_nothing), 1, "of another job, 'srun 9.0', wanted 'srun 1.0'"));
    file_write_text(path, "hello\n", 6);
    EXPECT(ends(start(1, 2, &m, 0.02, body_nothing), 1, "does not say where rank 0 is"));
}

// The key of another run, at the port of this one.
static void test_wrong_key(void) {
    const CommMeeting m = meeting_in(test_path("right"), ""), other = meeting_in(test_path("wrong"), "");
    char error[ERROR_BYTES], *text, *key;
    size_t bytes;
    const Rank zero = start(0, 2, &m, 5, body_nothing);
    for (int ms = 0; ms < 5000 && access(m.file, F_OK) != 0; ms++) {
        usleep(1000);
    }
    EXPECT(file_try_read(m.file, 8192, &text, &bytes, error), "%s", error);
    key = strstr(text, "key ") + 4;
    key[0] = key[0] == '0' ? '1' : '0';
    file_write_text(other.file, text, bytes);
    free(text);
    EXPECT(ends(start(1, 2, &other, 0.02, body_nothing), 1, "with another key"));
    EXPECT(ends(start(1, 2, &m, 5, body_nothing), 0, "") && ends(zero, 0, ""));
}

// ---- hellos that are none ----

static int connect_to(int port) {
    const struct sockaddr_in address = loopback(port);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    for (int ms = 0; connect(fd, (const struct sockaddr*)&address, sizeof(address)) != 0; ms++) {
        EXPECT(ms < 5000, "port %d", port);
        usleep(1000);
    }
    return fd;
}

static void send_bytes(int fd, const void* data, size_t bytes) { send(fd, data, bytes, MSG_NOSIGNAL); }

// Strangers do not keep the ranks from each other.
static void test_strangers(void) {
    const CommMeeting m = meeting_of("");
    unsigned char bytes[512];
    int silent, fds[40];
    Rand rng = rand_open(1, 0);
    const Rank zero = start(0, 2, &m, 5, body_nothing);
    silent = connect_to(m.port);
    for (int i = 0; i < 40; i++) {
        for (size_t k = 0; k < sizeof(bytes); k++) {
            bytes[k] = (unsigned char)rand_u32(&rng);
        }
        fds[i] = connect_to(m.port);
        send_bytes(fds[i], bytes, rand_u32(&rng) % sizeof(bytes));
        shutdown(fds[i], SHUT_WR);
    }
    EXPECT(ends(start(1, 2, &m, 5, body_nothing), 0, "") && ends(zero, 0, ""));
    for (int i = 0; i < 40; i++) {
        close(fds[i]);
    }
    close(silent);
}

// A hello of rank 1 of 2.
static CommTcpHello hello_of(const char* host, int line) {
    CommTcpHello hello;
    memset(&hello, 0, sizeof(hello));
    hello.magic = COMM_TCP_MAGIC;
    snprintf(hello.host, sizeof(hello.host), "%s", host);
    hello.rank = 1;
    hello.size = 2;
    hello.pid = 4711;
    hello.line = line;
    return hello;
}

static int say_hello(int port, const char* host, int line) {
    const CommTcpHello hello = hello_of(host, line);
    const int fd = connect_to(port);
    send_bytes(fd, &hello, sizeof(hello));
    return fd;
}

// More connections that say nothing than rank 0 could hear one after the other before a rank gives
// up.
static void test_silent_strangers(void) {
    enum { SILENT = 40 };
    const CommMeeting m = meeting_of("");
    const Rank zero = start(0, 2, &m, 5, body_nothing);
    int fds[SILENT];
    for (int i = 0; i < SILENT; i++) {
        fds[i] = connect_to(m.port);
    }
    const double begin_s = time_now_s();
    EXPECT(ends(start(1, 2, &m, 5, body_nothing), 0, "") && ends(zero, 0, ""));
    EXPECT(time_now_s() < begin_s + 10, "%.1f s", time_now_s() - begin_s);
    for (int i = 0; i < SILENT; i++) {
        close(fds[i]);
    }
}

// A stranger whose hello comes byte by byte: all of it has to be there in time.
static void test_slow_hello(void) {
    const CommMeeting m = meeting_of("");
    const CommTcpHello hello = hello_of("slow", 0);
    const Rank zero = start(0, 2, &m, 5, body_nothing);
    const int fd = connect_to(m.port);
    size_t sent = 0;
    char byte;
    while (sent < sizeof(hello) && recv(fd, &byte, 1, MSG_DONTWAIT) != 0) {
        send_bytes(fd, (const char*)&hello + sent++, 1);
        usleep(200000);
    }
    EXPECT(sent < 40, "%zu bytes in %.1f s", sent, 0.2 * (double)sent);
    close(fd);
    EXPECT(ends(start(1, 2, &m, 5, body_nothing), 0, "") && ends(zero, 0, ""));
}

// Rank 0 is paused while a rank says hello, gives up and says it again; and a line is closed after
// rank 0 has taken it.
static void test_hello_again(void) {
    for (int is_paused = 0; is_paused < 2; is_paused++) {
        const CommMeeting m = meeting_of("");
        const Rank zero = start(0, 2, &m, 5, body_nothing);
        char answer[256];
        close(connect_to(m.port)); // it listens
        if (is_paused) {
            kill(zero.pid, SIGSTOP);
        }
        const int fd = say_hello(m.port, "gave_up", 0);
        EXPECT(is_paused || recv(fd, answer, sizeof(answer), 0) > 0);
        close(fd);
        const Rank one = start(1, 2, &m, 5, body_nothing);
        if (is_paused) {
            usleep(300000);
            kill(zero.pid, SIGCONT);
        }
        EXPECT(ends(zero, 0, "") && ends(one, 0, ""), "paused: %d", is_paused);
    }
}

// A rank that ends when it has joined and others have not: the others need not wait until their
// time is up.
static void test_end_before_all(void) {
    const CommMeeting m = meeting_of("");
    const Rank zero = start(0, 3, &m, 50, body_nothing), one = start(1, 3, &m, 50, body_nothing);
    const double begin_s = time_now_s();
    usleep(500000);
    kill(one.pid, SIGKILL);
    EXPECT(ends(zero, 1, "error: rank 1 of 3 (") && ended(one) == 128 + SIGKILL);
    EXPECT(time_now_s() < begin_s + 15, "%.1f s", time_now_s() - begin_s);
}

// Who pretends to be a rank may end the job, but not with success.
static void test_impostor(void) {
    const CommMeeting m = meeting_of("");
    const Rank zero = start(0, 2, &m, 5, body_nothing);
    const int messages = say_hello(m.port, "impostor", 0), end = say_hello(m.port, "impostor", 1);
    send_bytes(end, "", 1);
    EXPECT(ends(zero, 1, "error: rank 1 of 2 (impostor, pid 4711) has ended"));
    close(messages);
    close(end);
}

// Names and words of others do not reach the terminal as they are.
static void test_escapes(void) {
    int port = 0;
    const CommMeeting m = meeting_of("");
    const Rank zero = start(0, 3, &m, 5, body_nothing);
    const int fd = say_hello(m.port, "\x1b]0;mine\x07", 0), fake = listen_at(&port);
    EXPECT(ends(zero, 1, "rank 1 of 2 (?]0;mine?, pid 4711) came to rank 0 of 3"));
    close(fd);
    struct {
        uint64_t magic;
        int32_t verdict, pid;
        char host[64], words[384];
    } answer = {COMM_TCP_MAGIC, 2, 1, "", "\x1b[31mgo away"};
    const CommMeeting there = meeting_at(port, "");
    const Rank one = start(1, 2, &there, 5, body_nothing);
    const int accepted = accept(fake, NULL, NULL);
    send_bytes(accepted, &answer, sizeof(answer));
    EXPECT(ends(one, 1, "error: ?[31mgo away"));
    close(accepted);
    close(fake);
}

static int can_connect(const char* host, int port) {
    struct sockaddr_in address = loopback(port);
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    inet_pton(AF_INET, host, &address.sin_addr);
    const int can = connect(fd, (const struct sockaddr*)&address, sizeof(address)) == 0;
    close(fd);
    return can;
}

// Rank 0 listens at the address of --server alone; at all of them only if that is none of this
// machine's.
static void test_address(void) {
    const CommMeeting m = meeting_of("");
    CommMeeting elsewhere = meeting_of("");
    const Rank zero = start(0, 2, &m, 5, body_nothing);
    close(connect_to(m.port)); // it listens
    EXPECT(!can_connect("127.0.0.2", m.port), "another address of this machine");
    EXPECT(ends(start(1, 2, &m, 5, body_nothing), 0, "") && ends(zero, 0, ""));
    const CommMeeting here = meeting_at(elsewhere.port, "");
    snprintf(elsewhere.host, sizeof(elsewhere.host), "192.0.2.1"); // nobody's
    const Rank behind = start(0, 2, &elsewhere, 5, body_nothing);
    EXPECT(ends(start(1, 2, &here, 5, body_nothing), 0, "") && ends(behind, 0, ""));
}

// A hello of this job in which some bytes are others: rank 0 takes it, sends it away or ends with
// an error.
static void test_fuzzed_hellos(void) {
    enum { TIMES = 24 };
    Rank ranks[TIMES];
    int fds[TIMES];
    Rand rng = rand_open(2, 0);
    for (int i = 0; i < TIMES; i++) {
        const CommMeeting m = meeting_of("job");
        CommTcpHello hello;
        memset(&hello, 0, sizeof(hello));
        hello.magic = COMM_TCP_MAGIC;
        strcpy(hello.job, "job");
        hello.rank = 1;
        hello.size = 3;
        for (uint32_t k = 0; k < 1 + rand_u32(&rng) % 4; k++) { // not of the magic, nor of the key
            ((unsigned char*)&hello)[16 + rand_u32(&rng) % (sizeof(hello) - 16)] =
                (unsigned char)rand_u32(&rng);
        }
        if (i % 2) {
            hello.rank = (int32_t)rand_u32(&rng);
            memset(hello.host, 'x', sizeof(hello.host));
        }
        ranks[i] = start(0, 3, &m, 0.05, body_nothing);
        fds[i] = connect_to(m.port);
        send_bytes(fds[i], &hello, sizeof(hello));
    }
    for (int i = 0; i < TIMES; i++) {
        EXPECT(ends(ranks[i], 1, "error: "), "hello %d", i);
        close(fds[i]);
    }
}

// ---- the ends ----

static void body_kill(Comm* c) {
    if (c->rank == c->size - 1) {
        raise(SIGKILL);
    }
    comm_barrier(c);
}

static void body_kill_first(Comm* c) {
    if (c->rank == 0) {
        raise(SIGKILL);
    }
    comm_barrier(c);
}

static void body_exit(Comm* c) {
    if (c->rank == c->size - 1) {
        exit(EXIT_SUCCESS); // without comm_close
    }
    comm_barrier(c);
}

static void body_kill_after_save(Comm* c) {
    comm_saved(c, 10, "out/books");
    body_kill(c);
}

// The others wait for something else than a message.
static void body_fail(Comm* c) {
    if (c->rank == c->size - 1) {
        die_usage("disk full");
    }
    sleep(30);
}

static void body_all_fail(Comm* c) {
    (void)c;
    CHECK(0, "disk full");
}

static void body_mixed_up(Comm* c) {
    int64_t word = 1, all[8];
    if (c->rank == 1) {
        comm_any(c, 1);
    } else {
        comm_all_gather(c, all, &word, sizeof(word));
    }
}

// Three ranks of which one ends, with this status; the others say these words, or nothing.
static void test_end(Body body, const int status[3], const char* const words[3]) {
    const CommMeeting m = meeting_of("");
    Rank ranks[3];
    const double begin_s = time_now_s();
    for (int r = 0; r < 3; r++) {
        ranks[r] = start(r, 3, &m, 5, body);
    }
    for (int r = 0; r < 3; r++) {
        EXPECT(ends(ranks[r], status[r], words[r]), "rank %d, '%s'", r, words[r]);
    }
    EXPECT(time_now_s() < begin_s + 15, "%.1f s", time_now_s() - begin_s);
}

static const char GONE[] = ") has ended; rank 0 was in step 12, reduce of block 7\n";

static void test_kill(void) {
    test_end(body_kill, (const int[3]){1, 1, 128 + SIGKILL}, (const char* const[3]){GONE, "", ""});
}

static void test_kill_after_save(void) {
    const char* words = ", reduce of block 7; out/books has a checkpoint of step 10: --resume on continues\n";
    test_end(body_kill_after_save, (const int[3]){1, 1, 128 + SIGKILL},
             (const char* const[3]){words, "", ""});
}

static void test_kill_first(void) {
    test_end(body_kill_first, (const int[3]){128 + SIGKILL, 1, 1},
             (const char* const[3]){"", "error: rank 0 of 3 (", ") has ended; rank 2 was in step 12"});
}

static void test_exit(void) {
    test_end(body_exit, (const int[3]){1, 1, 1}, (const char* const[3]){GONE, "", ""});
}

static void test_fail(void) {
    test_end(body_fail, (const int[3]){2, 2, 2},
             (const char* const[3]){"", "", "error: disk full\n    on rank 2 of 3 ("});
}

static void test_all_fail(void) {
    test_end(body_all_fail, (const int[3]){1, 1, 1},
             (const char* const[3]){"error: disk full\n    on rank 0 of 3 (", "", ""});
}

static void test_mixed_up(void) {
    const char* words =
        "rank 1 sends message 2 of kind 3, 4 bytes, rank 0 wants message 2 of kind 2, 8 bytes";
    test_end(body_mixed_up, (const int[3]){1, 1, 1}, (const char* const[3]){words, "", ""});
}

// ---- all at the same time: they wait more than they work ----

static void (*const TESTS[])(void) = {
    test_messages_tcp,     test_messages_fs, test_wrong_size,    test_twice,
    test_other_job,        test_missing,     test_port_in_use,   test_stale_files,
    test_wrong_key,        test_strangers,   test_fuzzed_hellos, test_kill,
    test_silent_strangers, test_slow_hello,  test_hello_again,   test_end_before_all,
    test_impostor,         test_escapes,     test_address,       test_kill_first,
    test_kill_after_save,  test_exit,        test_fail,          test_all_fail,
    test_mixed_up,
};
enum { NUM_TESTS = sizeof(TESTS) / sizeof(TESTS[0]) };

TEST(comm_tcp) {
    pid_t children[NUM_TESTS];
    test_tmpdir(); // this process's, which removes it
    for (int i = 0; i < NUM_TESTS; i++) {
        children[i] = fork();
        if (children[i] == 0) {
            TESTS[i]();
            exit(test_failures_ > 0);
        }
    }
    for (int i = 0; i < NUM_TESTS; i++) {
        int status = 0;
        waitpid(children[i], &status, 0);
        EXPECT(status == 0, "test %d", i);
    }
}
