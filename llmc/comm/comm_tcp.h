/*
comm_tcp.h -- comm.h over TCP, for ranks not started by MPI: by torchrun, by srun without PMI, or by
hand. Their bulk data move by NCCL.

A star: rank 0 listens, and every other rank keeps two connections to it. One is for messages, a few
hundred bytes per step. The other is silent until a rank ends: with an error, it sends its exit
status there, which rank 0 passes on; if it is killed, the system closes the connection. So the
death of a process is noticed within a second, and the death of a machine within 30 seconds, even
while nothing is read or written.

The address of rank 0 is known to all (--init tcp), or is in a file that rank 0 writes (--init fs),
with a key that the others must present, so that nobody joins through a file of an earlier run. A
rank of another job, with another number of ranks, or with a rank already taken, is refused by name.
Strangers are disconnected, and delay nobody: rank 0 listens to all connections at once, and a
complete hello must arrive within two seconds.

Why not over NCCL: messages are exchanged before the GPU is known, and while rank 0 works for hours
and the others wait; they would have to wait in the GPU's queue; and NCCL does not tell which rank
has died. A star costs rank 0 size^2 times the bytes of a message: 64 ranks, 500 bytes, 2 MB per
step. Start several hundred ranks by MPI.
*/
#ifndef LLMC_COMM_TCP_H
#define LLMC_COMM_TCP_H

#include <stdint.h>

#include "llmc/comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

#define COMM_TCP_MAGIC UINT64_C(0x31304e4941525450) // "PTRAIN01"

// First message of a rank on each of its connections.
typedef struct {
    uint64_t magic, key;
    char job[96], host[64];
    int32_t rank, size, pid;
    int32_t line; // 0: messages, 1: end
} CommTcpHello;

// Joins the ranks, within limit_s seconds. Sets engine, library and communicator.
void comm_tcp_open(Comm* c, const CommMeeting* meeting, double limit_s);

#ifdef __cplusplus
}
#endif

#ifdef COMM_TCP_IMPLEMENTATION

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <inttypes.h>
#include <math.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "llmc/base/check.h"
#include "llmc/base/clock.h"
#include "llmc/base/file.h"
#include "llmc/base/printable.h"
#include "llmc/comm/comm_socket.h"

enum {
    COMM_TCP_LINES_ = 2,     // messages, end
    COMM_TCP_HOSTS_ = 8,     // addresses in a file
    COMM_TCP_HELLO_S_ = 2,   // time for a complete hello, or to try again after a line was closed
    COMM_TCP_ANSWER_S_ = 20, // time for rank 0's answer; it may be paused
    COMM_TCP_NOTE_S_ = 10,   // time after which a rank reports whom it waits for
    // connections whose hellos rank 0 awaits at a time; of more, the oldest is closed
    COMM_TCP_CALLERS_ = 256,
    COMM_TCP_TRY_AGAIN_MS_ = 100,
    COMM_TCP_BACKLOG_ = 1024
};

// Connections to another rank: rank 0 has all of them, the others only rank 0's.
typedef struct {
    int lines[COMM_TCP_LINES_]; // sockets; -1: none
    int pid;
    char host[64];
    double closed_s; // time when a line was closed before all had joined; 0: it was not
} CommTcpPeer_;

// Connection whose hello rank 0 awaits.
typedef struct {
    int fd;
    size_t bytes; // bytes of the hello received
    double end_s; // deadline for the rest
    CommTcpHello hello;
} CommTcpCaller_;

// State behind c->communicator.
typedef struct {
    CommTcpPeer_* peers; // (size) by rank
    struct pollfd* ends; // (size) for the watchdog
    uint32_t number;     // messages so far
} CommTcp_;

// Rank 0's answer to a hello.
typedef enum { COMM_TCP_WELCOME_, COMM_TCP_OTHER_JOB_, COMM_TCP_REFUSED_ } CommTcpVerdict_;
typedef struct {
    uint64_t magic;
    int32_t verdict, pid;
    char host[64], words[384];
} CommTcpAnswer_;

// Header of a message.
typedef struct {
    uint32_t number, kind;
    uint64_t bytes;
} CommTcpHead_;

static inline CommTcp_* comm_tcp_(const Comm* c) { return (CommTcp_*)c->communicator; }

// ---- listening ----

// Sockets on which rank 0 listens to the others.
typedef struct {
    struct pollfd polled[COMM_TCP_HOSTS_ + COMM_TCP_CALLERS_]; // listeners, then callers
    int num_listeners, num_callers;
    CommTcpCaller_ callers[COMM_TCP_CALLERS_]; // oldest first
} CommTcpDoor_;

// Listens on an address, or returns 0 with errno.
static int comm_tcp_listen_at_(CommTcpDoor_* door, const struct sockaddr* address, socklen_t size) {
    const int fd = socket(address->sa_family, SOCK_STREAM, 0), on = 1, off = 0;
    const int is_any = address->sa_family == AF_INET6 &&
                       IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6*)address)->sin6_addr);
    if (fd < 0) {
        return 0;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on,
               sizeof(on)); // allows the port of connections that an earlier run has closed
    if (address->sa_family == AF_INET6) {
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, is_any ? &off : &on, sizeof(on));
    }
    if (bind(fd, address, size) != 0 || listen(fd, COMM_TCP_BACKLOG_) != 0) {
        const int reason = errno;
        close(fd);
        errno = reason;
        return 0;
    }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK); // a caller may disconnect before it is accepted
    door->polled[door->num_listeners].fd = fd;
    door->polled[door->num_listeners++].events = POLLIN;
    return 1;
}

__attribute__((noreturn)) static void comm_tcp_cannot_listen_(int port) {
    CHECK(0, "rank 0 cannot listen at port %d: %s; --server HOST:PORT names another one", port,
          strerror(errno));
    abort();
}

// Listens on a port of all addresses of this machine, IPv6 and IPv4 if both exist; sets the port if
// it is 0.
static void comm_tcp_listen_everywhere_(CommTcpDoor_* door, int* port) {
    struct sockaddr_storage found;
    struct sockaddr_in6 six;
    struct sockaddr_in four;
    socklen_t size = sizeof(found);
    memset(&six, 0, sizeof(six));
    memset(&four, 0, sizeof(four));
    six.sin6_family = AF_INET6;
    four.sin_family = AF_INET;
    six.sin6_port = four.sin_port = htons((uint16_t)*port);
    if (!comm_tcp_listen_at_(door, (const struct sockaddr*)&six, sizeof(six)) &&
        (errno == EADDRINUSE || !comm_tcp_listen_at_(door, (const struct sockaddr*)&four, sizeof(four)))) {
        comm_tcp_cannot_listen_(*port);
    }
    getsockname(door->polled[0].fd, (struct sockaddr*)&found, &size);
    *port = ntohs(found.ss_family == AF_INET6 ? ((struct sockaddr_in6*)&found)->sin6_port
                                              : ((struct sockaddr_in*)&found)->sin_port);
}

static int comm_tcp_is_loopback_(const struct sockaddr* address) {
    return address->sa_family == AF_INET6
               ? IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6*)address)->sin6_addr)
               : ntohl(((const struct sockaddr_in*)address)->sin_addr.s_addr) >> 24 == 127;
}

// True if only this machine resolves the name to itself, as Debian's /etc/hosts does: the others
// know another address.
static int comm_tcp_is_own_name_(const struct addrinfo* found, const char* host) {
    struct in_addr four;
    struct in6_addr six;
    const int is_name = inet_pton(AF_INET, host, &four) != 1 && inet_pton(AF_INET6, host, &six) != 1;
    return is_name && strcmp(host, "localhost") != 0 && comm_tcp_is_loopback_(found->ai_addr);
}

// Listens on the addresses of a host, or on all of this machine if none of those is its own: a
// service's, or one in front of a NAT.
static void comm_tcp_listen_(CommTcpDoor_* door, CommMeeting* m) {
    struct addrinfo wanted, *found = NULL;
    char service[16];
    memset(&wanted, 0, sizeof(wanted));
    wanted.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof(service), "%d", m->port);
    if (*m->host && getaddrinfo(m->host, service, &wanted, &found) != 0) {
        found = NULL;
    }
    const int is_own_name = found && comm_tcp_is_own_name_(found, m->host);
    for (const struct addrinfo* at = found; at && !is_own_name && door->num_listeners < COMM_TCP_HOSTS_;
         at = at->ai_next) {
        if (!comm_tcp_listen_at_(door, at->ai_addr, at->ai_addrlen) && errno == EADDRINUSE) {
            comm_tcp_cannot_listen_(m->port);
        }
    }
    if (found) {
        freeaddrinfo(found);
    }
    if (door->num_listeners == 0) {
        comm_tcp_listen_everywhere_(door, &m->port);
    }
}

// ---- the file ----

// Contents of the file.
typedef struct {
    char hosts[COMM_TCP_HOSTS_][256]; // one of them reaches rank 0
    int num_hosts, port;
    uint64_t key;
} CommTcpPlace_;

// Prints this machine's name and addresses; the last one is the loopback, for a machine without a
// network.
static void comm_tcp_print_hosts_(FILE* file, const Comm* c) {
    struct ifaddrs *all = NULL, *at;
    char host[256];
    int count = 2;
    fprintf(file, "host %s\n", c->host);
    getifaddrs(&all);
    for (at = all; at && count < COMM_TCP_HOSTS_; at = at->ifa_next) {
        const int family = at->ifa_addr ? at->ifa_addr->sa_family : AF_UNSPEC;
        const socklen_t size = family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
        if ((family == AF_INET || family == AF_INET6) && !(at->ifa_flags & IFF_LOOPBACK) &&
            at->ifa_flags & IFF_UP &&
            getnameinfo(at->ifa_addr, size, host, sizeof(host), NULL, 0, NI_NUMERICHOST) == 0 &&
            !strchr(host, '%')) { // link-local address
            fprintf(file, "host %s\n", host);
            count++;
        }
    }
    fprintf(file, "host 127.0.0.1\n");
    if (all) {
        freeifaddrs(all);
    }
}

// Writes the address on which rank 0 listens.
static void comm_tcp_write_file_(const Comm* c, const CommMeeting* m, CommTcpPlace_ place) {
    char text[4096] = "", directory[PATH_MAX];
    FILE* file = fmemopen(text, sizeof(text), "w");
    CHECK(file, "%s: cannot be made", m->file);
    fprintf(file, "pretrain.c waits\njob %s\nkey %016" PRIx64 "\nport %d\n", m->job, place.key, place.port);
    comm_tcp_print_hosts_(file, c);
    fclose(file);
    file_directory_of(directory, m->file);
    file_make_directory(directory);
    file_write_text(m->file, text, strlen(text));
}

// Takes the line "NAME value" from *text; the value is empty if it is another line.
static void comm_tcp_line_(const char** text, const char* name, char* value, size_t room) {
    const size_t length = strlen(name), line = strcspn(*text, "\n");
    *value = '\0';
    if (strncmp(*text, name, length) == 0 && line >= length) {
        snprintf(value, room, "%.*s", (int)(line - length), *text + length);
        *text += line + ((*text)[line] == '\n');
    }
}

// Reads the file. Returns 0 with the reason if it has no address yet.
static int comm_tcp_read_file_(const CommMeeting* m, CommTcpPlace_* place, char reason[SOCKET_REASON]) {
    char error[ERROR_BYTES], job[sizeof(m->job)], key[32], port[16], *text, end;
    size_t bytes;
    if (!file_try_read(m->file, 8192, &text, &bytes, error)) {
        snprintf(reason, SOCKET_REASON, "%.300s", error);
        return 0;
    }
    const char* at = text;
    comm_tcp_line_(&at, "pretrain.c waits", key, sizeof(key));
    comm_tcp_line_(&at, "job ", job, sizeof(job));
    comm_tcp_line_(&at, "key ", key, sizeof(key));
    comm_tcp_line_(&at, "port ", port, sizeof(port));
    for (place->num_hosts = 0; place->num_hosts < COMM_TCP_HOSTS_; place->num_hosts++) {
        comm_tcp_line_(&at, "host ", place->hosts[place->num_hosts], sizeof(place->hosts[0]));
        if (!*place->hosts[place->num_hosts]) {
            break;
        }
    }
    free(text);
    if (sscanf(key, "%" SCNx64 "%c", &place->key, &end) != 1 ||
        sscanf(port, "%d%c", &place->port, &end) != 1 || place->port < 1 || place->port > 65535 ||
        place->num_hosts == 0) {
        snprintf(reason, SOCKET_REASON, "%.200s: does not say where rank 0 is", m->file);
        return 0;
    }
    if (strcmp(job, m->job) != 0) {
        snprintf(reason, SOCKET_REASON, "%.120s: of another job, '%.60s', wanted '%.60s'", m->file,
                 printable(job), m->job);
        return 0;
    }
    return 1;
}

// ---- joining: rank 0 ----

static void comm_tcp_answer_(const Comm* c, int fd, CommTcpVerdict_ verdict, const char* words) {
    CommTcpAnswer_ answer;
    memset(&answer, 0, sizeof(answer));
    answer.magic = COMM_TCP_MAGIC;
    answer.verdict = verdict;
    answer.pid = getpid();
    snprintf(answer.host, sizeof(answer.host), "%s", c->host);
    snprintf(answer.words, sizeof(answer.words), "%.383s", words);
    socket_write(fd, &answer, sizeof(answer));
}

// Judges a hello; sets words to the reason if it is refused. Its strings are terminated.
static CommTcpVerdict_ comm_tcp_judge_(const Comm* c, const CommTcpHello* hello, const CommMeeting* m,
                                       uint64_t key, char words[SOCKET_REASON]) {
    *words = '\0';
    if (strcmp(hello->job, m->job) != 0 || hello->key != key) {
        snprintf(words, SOCKET_REASON, "rank 0 on %s waits for another job, '%s'; this one is '%s'%s",
                 c->host, m->job, hello->job, hello->key != key ? ", with another key" : "");
        return COMM_TCP_OTHER_JOB_;
    }
    if (hello->size != c->size || hello->rank < 1 || hello->rank >= c->size || hello->line < 0 ||
        hello->line >= COMM_TCP_LINES_) {
        snprintf(words, SOCKET_REASON, "rank %d of %d (%s, pid %d) came to rank 0 of %d (%s, pid %d)",
                 hello->rank, hello->size, hello->host, hello->pid, c->size, c->host, (int)getpid());
        return COMM_TCP_REFUSED_;
    }
    const CommTcpPeer_* peer = &comm_tcp_(c)->peers[hello->rank];
    const int line = peer->lines[hello->line];
    if (line >= 0 && !socket_is_closed(line)) {
        snprintf(words, SOCKET_REASON, "rank %d is claimed by two processes: %s, pid %d, and %s, pid %d",
                 hello->rank, peer->host, peer->pid, hello->host, hello->pid);
        return COMM_TCP_REFUSED_;
    }
    return COMM_TCP_WELCOME_;
}

// Assigns the line to a rank; it replaces one that the rank has closed.
static void comm_tcp_let_in_(CommTcp_* t, int fd, const CommTcpHello* hello) {
    CommTcpPeer_* peer = &t->peers[hello->rank];
    if (peer->lines[hello->line] >= 0) {
        close(peer->lines[hello->line]);
    }
    fcntl(fd, F_SETFL, 0);
    peer->lines[hello->line] = fd;
    peer->pid = hello->pid;
    peer->closed_s = 0;
    memcpy(peer->host, hello->host, sizeof(peer->host));
}

// Answers a complete hello. Disconnects other jobs; a mistake of this job ends it. A rank that has
// closed the line says hello again.
static void comm_tcp_admit_(Comm* c, CommTcpCaller_* caller, const CommMeeting* m, uint64_t key) {
    CommTcpHello* hello = &caller->hello;
    char words[SOCKET_REASON];
    hello->job[sizeof(hello->job) - 1] = hello->host[sizeof(hello->host) - 1] = '\0';
    printable(hello->job);
    printable(hello->host);
    if (socket_is_closed(caller->fd)) {
        close(caller->fd);
        return;
    }
    const CommTcpVerdict_ verdict = comm_tcp_judge_(c, hello, m, key, words);
    comm_tcp_answer_(c, caller->fd, verdict, words);
    if (verdict == COMM_TCP_WELCOME_) {
        comm_tcp_let_in_(comm_tcp_(c), caller->fd, hello);
        return;
    }
    close(caller->fd);
    CHECK(verdict != COMM_TCP_REFUSED_, "%s", words);
}

// Takes a caller off the list.
static void comm_tcp_drop_(CommTcpDoor_* door, int i) {
    door->num_callers--;
    memmove(&door->callers[i], &door->callers[i + 1],
            (size_t)(door->num_callers - i) * sizeof(door->callers[0]));
}

static void comm_tcp_send_away_(CommTcpDoor_* door, int i) {
    close(door->callers[i].fd);
    comm_tcp_drop_(door, i);
}

// Accepts all new connections.
static void comm_tcp_accept_(CommTcpDoor_* door) {
    for (int i = 0; i < door->num_listeners; i++) {
        int fd;
        while ((fd = accept(door->polled[i].fd, NULL, NULL)) >= 0) {
            if (door->num_callers == COMM_TCP_CALLERS_) {
                comm_tcp_send_away_(door, 0);
            }
            CommTcpCaller_* caller = &door->callers[door->num_callers++];
            socket_set_up(fd);
            caller->fd = fd;
            caller->bytes = 0;
            caller->end_s = time_now_s() + COMM_TCP_HELLO_S_;
        }
        if ((errno == EMFILE || errno == ENFILE) && door->num_callers > 0) {
            comm_tcp_send_away_(door, 0);
        }
    }
}

// Reads as much of a hello as has arrived. Returns 1 if it is complete, 0 if bytes are missing, -1
// if it is invalid or late.
static int comm_tcp_hear_(CommTcpCaller_* caller) {
    const size_t magic = sizeof(caller->hello.magic);
    const ssize_t n = recv(caller->fd, (char*)&caller->hello + caller->bytes,
                           sizeof(caller->hello) - caller->bytes, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && !socket_is_early())) {
        return -1;
    }
    caller->bytes += n > 0 ? (size_t)n : 0;
    if (caller->bytes >= magic && caller->hello.magic != COMM_TCP_MAGIC) {
        return -1;
    }
    return caller->bytes == sizeof(caller->hello) ? 1 : time_now_s() > caller->end_s ? -1 : 0;
}

// Waits a moment for connections and data, and handles all of them.
static void comm_tcp_hear_all_(Comm* c, CommTcpDoor_* door, const CommMeeting* m, uint64_t key) {
    for (int i = 0; i < door->num_callers; i++) {
        const struct pollfd caller = {door->callers[i].fd, POLLIN, 0};
        door->polled[door->num_listeners + i] = caller;
    }
    poll(door->polled, (nfds_t)(door->num_listeners + door->num_callers), COMM_TCP_TRY_AGAIN_MS_);
    comm_tcp_accept_(door);
    for (int i = 0; i < door->num_callers;) {
        CommTcpCaller_ caller;
        const int heard = comm_tcp_hear_(&door->callers[i]);
        if (heard > 0) {
            caller = door->callers[i];
            comm_tcp_drop_(door, i);
            comm_tcp_admit_(c, &caller, m, key);
        } else if (heard < 0) {
            comm_tcp_send_away_(door, i);
        } else {
            i++;
        }
    }
}

// Looks for closed lines. A rank that has joined closes none while it lives; one that gave up
// waiting for an answer comes back at once.
static void comm_tcp_look_for_closed_(const Comm* c) {
    const double now_s = time_now_s();
    for (int r = 1; r < c->size; r++) {
        CommTcpPeer_* peer = &comm_tcp_(c)->peers[r];
        for (int line = 0; line < COMM_TCP_LINES_; line++) {
            if (peer->lines[line] >= 0 && socket_is_closed(peer->lines[line])) {
                close(peer->lines[line]);
                peer->lines[line] = -1;
                peer->closed_s = now_s;
            }
        }
        CHECK(peer->closed_s == 0 || now_s < peer->closed_s + COMM_TCP_HELLO_S_,
              "rank %d of %d (%s, pid %d) has ended before all others had joined rank 0", r, c->size,
              peer->host, peer->pid);
    }
}

// Sets words to " 2 3", the missing ranks. Returns 0 if none is missing.
static int comm_tcp_print_missing_(const Comm* c, char words[SOCKET_REASON]) {
    int used = 0;
    *words = '\0';
    for (int r = 1; r < c->size && used < SOCKET_REASON - 32; r++) {
        const int* lines = comm_tcp_(c)->peers[r].lines;
        if (lines[0] < 0 || lines[1] < 0) {
            used += snprintf(words + used, (size_t)(SOCKET_REASON - used), " %d", r);
        }
    }
    return used > 0;
}

// Waits for all other ranks. Reports missing ones soon, and again when the time is up.
static void comm_tcp_wait_(Comm* c, CommTcpDoor_* door, const CommMeeting* m, uint64_t key, double limit_s) {
    const double begin_s = time_now_s();
    char missing[SOCKET_REASON];
    for (int is_told = 0; comm_tcp_print_missing_(c, missing);) {
        const double waited_s = time_now_s() - begin_s;
        CHECK(waited_s <= limit_s, "these ranks have not joined rank 0 of %d, %s port %d, within %.0f s:%s",
              c->size, c->host, m->port, limit_s, missing);
        if (waited_s > COMM_TCP_NOTE_S_ && !is_told) {
            fprintf(stderr, "note: rank 0 of %d, %s port %d, waits for these ranks:%s\n", c->size, c->host,
                    m->port, missing);
            is_told = 1;
        }
        comm_tcp_hear_all_(c, door, m, key);
        comm_tcp_look_for_closed_(c);
    }
}

static uint64_t comm_tcp_random_(void) {
    uint64_t key = 0;
    FILE* file = fopen("/dev/urandom", "rb");
    CHECK(file && fread(&key, sizeof(key), 1, file) == 1, "/dev/urandom: cannot be read");
    fclose(file);
    return key;
}

static void comm_tcp_gather_(Comm* c, const CommMeeting* meeting, double limit_s) {
    CommMeeting m = *meeting;
    CommTcpPlace_ place;
    CommTcpDoor_* door = (CommTcpDoor_*)check_alloc(1, sizeof(CommTcpDoor_), "connections");
    memset(&place, 0, sizeof(place));
    comm_tcp_listen_(door, &m);
    if (*m.file) {
        place.port = m.port;
        place.key = comm_tcp_random_();
        comm_tcp_write_file_(c, &m, place);
    }
    comm_tcp_wait_(c, door, &m, place.key, limit_s);
    if (*m.file) {
        unlink(m.file);
    }
    while (door->num_callers > 0) {
        comm_tcp_send_away_(door, 0);
    }
    for (int i = 0; i < door->num_listeners; i++) {
        close(door->polled[i].fd);
    }
    free(door);
}

// ---- joining: the others ----

static CommTcpHello comm_tcp_hello_(const Comm* c, const CommMeeting* m, uint64_t key, int line) {
    CommTcpHello hello;
    memset(&hello, 0, sizeof(hello));
    hello.magic = COMM_TCP_MAGIC;
    hello.key = key;
    snprintf(hello.job, sizeof(hello.job), "%s", m->job);
    snprintf(hello.host, sizeof(hello.host), "%s", c->host);
    hello.rank = c->rank;
    hello.size = c->size;
    hello.pid = getpid();
    hello.line = line;
    return hello;
}

// Says hello to the listener. Returns 1 if it is rank 0 and admits this rank; else 0 with the
// reason. Ends the program if another try cannot help.
static int comm_tcp_greet_(int fd, const CommMeeting* m, const CommTcpHello* hello, CommTcpAnswer_* answer,
                           double limit_s, char reason[SOCKET_REASON]) {
    errno = 0;
    if (!socket_write(fd, hello, sizeof(*hello)) ||
        !socket_read_within(fd, answer, sizeof(*answer), limit_s) || answer->magic != COMM_TCP_MAGIC) {
        snprintf(reason, SOCKET_REASON, "the listener there %s",
                 errno == ETIMEDOUT ? "does not answer" : "is not rank 0");
        return 0;
    }
    answer->words[sizeof(answer->words) - 1] = answer->host[sizeof(answer->host) - 1] = '\0';
    printable(answer->host);
    printable_copy(reason, SOCKET_REASON, answer->words);
    CHECK(answer->verdict != COMM_TCP_REFUSED_, "%s", reason);
    // one of its hosts may be another machine here
    CHECK(answer->verdict == COMM_TCP_WELCOME_ || *m->file, "%s", reason);
    return answer->verdict == COMM_TCP_WELCOME_;
}

// Connects a line, or returns -1 with the reason.
static int comm_tcp_try_(Comm* c, const CommMeeting* m, const CommTcpHello* hello, const char* host, int port,
                         double left_s, char reason[SOCKET_REASON]) {
    CommTcpPeer_* peer = comm_tcp_(c)->peers;
    CommTcpAnswer_ answer;
    char words[SOCKET_REASON];
    const int fd = socket_connect(host, port, reason);
    if (fd < 0) {
        return -1;
    }
    const double limit_s = fmax(0.1, fmin(left_s, COMM_TCP_ANSWER_S_));
    if (!comm_tcp_greet_(fd, m, hello, &answer, limit_s, words)) {
        snprintf(reason, SOCKET_REASON, "%.64s:%d: %.400s", host, port, words);
        close(fd);
        return -1;
    }
    peer->pid = answer.pid;
    memcpy(peer->host, answer.host, sizeof(peer->host));
    return fd;
}

// Finds the address of rank 0, in the file or from the command line. Returns 0 with the reason if
// it is unknown.
static int comm_tcp_find_(const CommMeeting* m, CommTcpPlace_* place, char reason[SOCKET_REASON]) {
    if (*m->file) {
        return comm_tcp_read_file_(m, place, reason);
    }
    snprintf(place->hosts[0], sizeof(place->hosts[0]), "%s", m->host);
    place->num_hosts = 1;
    place->port = m->port;
    place->key = 0;
    return 1;
}

// Tries until the line is connected, or the time is up.
static int comm_tcp_join_line_(Comm* c, const CommMeeting* m, int line, double limit_s) {
    const double begin_s = time_now_s(), end_s = begin_s + limit_s;
    char reason[SOCKET_REASON];
    CommTcpPlace_ place;
    for (int is_told = c->rank > 1;;) { // one rank reports for all
        const int hosts = comm_tcp_find_(m, &place, reason) ? place.num_hosts : 0;
        for (int i = 0; i < hosts; i++) {
            const CommTcpHello hello = comm_tcp_hello_(c, m, place.key, line);
            const int fd =
                comm_tcp_try_(c, m, &hello, place.hosts[i], place.port, end_s - time_now_s(), reason);
            if (fd >= 0) {
                return fd;
            }
        }
        CHECK(time_now_s() < end_s, "rank %d has not found rank 0 within %.0f s: %s", c->rank, limit_s,
              reason);
        if (time_now_s() > begin_s + COMM_TCP_NOTE_S_ && !is_told) {
            fprintf(stderr, "note: rank %d of %d waits for rank 0: %s\n", c->rank, c->size, reason);
            is_told = 1;
        }
        usleep(1000 * COMM_TCP_TRY_AGAIN_MS_);
    }
}

// ---- messages ----

// Ends the program because another rank is gone. Waits first, because the watchdog knows the cause
// and ends the program better.
__attribute__((noreturn)) static void comm_tcp_lost_(const Comm* c, int rank) {
    const int reason = errno;
    const CommTcpPeer_* peer = &comm_tcp_(c)->peers[rank];
    sleep(COMM_TCP_HELLO_S_);
    CHECK(0, "the connection to rank %d of %d (%s, pid %d) is lost: %s", rank, c->size, peer->host, peer->pid,
          strerror(reason));
    abort();
}

typedef enum { COMM_TCP_BROADCAST_ = 1, COMM_TCP_ALL_GATHER_, COMM_TCP_ANY_ } CommTcpKind_;

static void comm_tcp_send_(const Comm* c, int to, CommTcpKind_ kind, const void* data, size_t bytes) {
    const int fd = comm_tcp_(c)->peers[to].lines[0];
    const CommTcpHead_ head = {comm_tcp_(c)->number, kind, bytes};
    if (!socket_write(fd, &head, sizeof(head)) || !socket_write(fd, data, bytes)) {
        comm_tcp_lost_(c, to);
    }
}

static void comm_tcp_receive_(const Comm* c, int from, CommTcpKind_ kind, void* data, size_t bytes) {
    const int fd = comm_tcp_(c)->peers[from].lines[0];
    const uint32_t number = comm_tcp_(c)->number;
    CommTcpHead_ head;
    if (!socket_read(fd, &head, sizeof(head))) {
        comm_tcp_lost_(c, from);
    }
    CHECK(head.number == number && head.kind == (uint32_t)kind && head.bytes == bytes,
          "rank %d sends message %u of kind %u, %zu bytes, rank %d wants message %u of kind %d, %zu bytes",
          from, head.number, head.kind, (size_t)head.bytes, c->rank, number, kind, bytes);
    if (!socket_read(fd, data, bytes)) {
        comm_tcp_lost_(c, from);
    }
}

// Sends rank 0's data to all.
static void comm_tcp_spread_(Comm* c, CommTcpKind_ kind, void* data, size_t bytes) {
    if (c->rank > 0) {
        comm_tcp_receive_(c, 0, kind, data, bytes);
    }
    for (int r = 1; c->rank == 0 && r < c->size; r++) {
        comm_tcp_send_(c, r, kind, data, bytes);
    }
}

static void comm_tcp_broadcast_(Comm* c, void* data, size_t bytes) {
    comm_tcp_(c)->number++;
    comm_tcp_spread_(c, COMM_TCP_BROADCAST_, data, bytes);
}

static void comm_tcp_all_gather_(Comm* c, void* all, const void* mine, size_t bytes) {
    comm_tcp_(c)->number++;
    if (c->rank > 0) {
        comm_tcp_send_(c, 0, COMM_TCP_ALL_GATHER_, mine, bytes);
    } else {
        memcpy(all, mine, bytes);
    }
    for (int r = 1; c->rank == 0 && r < c->size; r++) {
        comm_tcp_receive_(c, r, COMM_TCP_ALL_GATHER_, (char*)all + (size_t)r * bytes, bytes);
    }
    comm_tcp_spread_(c, COMM_TCP_ALL_GATHER_, all, (size_t)c->size * bytes);
}

static int comm_tcp_any_(Comm* c, int mine) {
    int any = mine, theirs;
    comm_tcp_(c)->number++;
    if (c->rank > 0) {
        comm_tcp_send_(c, 0, COMM_TCP_ANY_, &mine, sizeof(mine));
    }
    for (int r = 1; c->rank == 0 && r < c->size; r++) {
        comm_tcp_receive_(c, r, COMM_TCP_ANY_, &theirs, sizeof(theirs));
        any |= theirs;
    }
    comm_tcp_spread_(c, COMM_TCP_ANY_, &any, sizeof(any));
    return any;
}

// ---- the end ----

// Finds the first rank whose end is noticed.
static int comm_tcp_ended_(const Comm* c, CommEnded* other) {
    const CommTcp_* t = comm_tcp_(c);
    unsigned char status;
    if (poll(t->ends, (nfds_t)c->size, 0) <= 0) {
        return 0;
    }
    for (int r = 0; r < c->size; r++) {
        if (t->ends[r].fd >= 0 && t->ends[r].revents) {
            const ssize_t n = recv(t->ends[r].fd, &status, 1, MSG_DONTWAIT);
            const CommEnded ended = {r, n == 1 ? status : -1, t->peers[r].pid, ""};
            *other = ended;
            memcpy(other->host, t->peers[r].host, sizeof(other->host));
            return 1;
        }
    }
    return 0;
}

static void comm_tcp_abort_(const Comm* c, int status) {
    const unsigned char byte = (unsigned char)status;
    for (int r = 0; r < c->size; r++) {
        const int fd = comm_tcp_(c)->peers[r].lines[1];
        if (fd >= 0) {
            send(fd, &byte, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
    }
}

static void comm_tcp_close_(Comm* c) {
    CommTcp_* t = comm_tcp_(c);
    for (int r = 0; r < c->size; r++) {
        for (int line = 0; line < COMM_TCP_LINES_; line++) {
            if (t->peers[r].lines[line] >= 0) {
                close(t->peers[r].lines[line]);
            }
        }
    }
    free(t->peers);
    free(t->ends);
    free(t);
}

// ---- opening ----

static CommTcp_* comm_tcp_alloc_(int size) {
    CommTcp_* t = (CommTcp_*)check_alloc(1, sizeof(CommTcp_), "connections");
    t->peers = (CommTcpPeer_*)check_alloc((size_t)size, sizeof(CommTcpPeer_), "connections");
    t->ends = (struct pollfd*)check_alloc((size_t)size, sizeof(struct pollfd), "connections");
    for (int r = 0; r < size; r++) {
        t->peers[r].lines[0] = t->peers[r].lines[1] = -1;
    }
    return t;
}

void comm_tcp_open(Comm* c, const CommMeeting* meeting, double limit_s) {
    static const CommEngine engine = {comm_tcp_broadcast_, comm_tcp_all_gather_, comm_tcp_any_,
                                      comm_tcp_ended_,     comm_tcp_abort_,      comm_tcp_close_};
    CommTcp_* t = comm_tcp_alloc_(c->size);
    c->communicator = t;
    if (c->rank == 0) {
        comm_tcp_gather_(c, meeting, limit_s);
    }
    for (int line = 0; c->rank > 0 && line < COMM_TCP_LINES_; line++) {
        t->peers[0].lines[line] = comm_tcp_join_line_(c, meeting, line, limit_s);
    }
    for (int r = 0; r < c->size; r++) {
        t->ends[r].fd = t->peers[r].lines[1]; // poll ignores negative ones
        t->ends[r].events = POLLIN;
    }
    snprintf(c->library, sizeof(c->library), "TCP");
    comm_set_engine(c, &engine);
}

#endif // COMM_TCP_IMPLEMENTATION

#endif
