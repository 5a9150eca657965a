/*
comm_socket.h -- TCP connections between ranks: bytes that all arrive, or an error.
*/
#ifndef LLMC_COMM_SOCKET_H
#define LLMC_COMM_SOCKET_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SOCKET_REASON = 512, // longest reason
    SOCKET_CONNECT_S = 2 // time for a connection
};

// Sends small messages at once, and detects a dead machine within half a minute.
void socket_set_up(int fd);

// Returns true after a call that does not wait, if errno means that nothing has arrived yet.
int socket_is_early(void);

// Reads all bytes. Returns 0 if they did not all arrive.
int socket_read(int fd, void* data, size_t bytes);

// Reads all bytes within limit_s; else errno is ETIMEDOUT.
int socket_read_within(int fd, void* data, size_t bytes, double limit_s);

// Returns true if the other end has closed the connection. Unread bytes may remain.
int socket_is_closed(int fd);

// Writes all bytes. Returns 0 with errno if it cannot.
int socket_write(int fd, const void* data, size_t bytes);

// Returns a connection, or -1 with the reason.
int socket_connect(const char* host, int port, char reason[SOCKET_REASON]);

#ifdef __cplusplus
}
#endif

#ifdef COMM_SOCKET_IMPLEMENTATION

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "llmc/base/clock.h"

#ifndef MSG_NOSIGNAL // without it, only signals.h ignores SIGPIPE
#define MSG_NOSIGNAL 0
#endif

void socket_set_up(int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
#ifdef TCP_USER_TIMEOUT
    const int idle_s = 10, interval_s = 5, probes = 4, unread_ms = 30000;
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unread_ms, sizeof(unread_ms));
#endif
    fcntl(fd, F_SETFD, FD_CLOEXEC);
}

int socket_is_early(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

int socket_read(int fd, void* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = recv(fd, (char*)data + done, bytes - done, 0);
        if (n == 0 || (n < 0 && errno != EINTR)) {
            errno = n == 0 ? ECONNRESET : errno;
            return 0;
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return 1;
}

int socket_read_within(int fd, void* data, size_t bytes, double limit_s) {
    const double end_s = time_now_s() + limit_s;
    for (size_t done = 0; done < bytes;) {
        struct pollfd ready = {fd, POLLIN, 0};
        const double left_s = fmax(0, end_s - time_now_s());
        if (poll(&ready, 1, (int)ceil(1e3 * left_s)) == 0) {
            errno = ETIMEDOUT;
            return 0;
        }
        const ssize_t n = recv(fd, (char*)data + done, bytes - done, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && !socket_is_early())) {
            errno = n == 0 ? ECONNRESET : errno;
            return 0;
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return 1;
}

int socket_is_closed(int fd) {
    char byte;
    const ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n == 0 || (n < 0 && !socket_is_early());
}

int socket_write(int fd, const void* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = send(fd, (const char*)data + done, bytes - done, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR) {
            return 0;
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return 1;
}

// Connects within SOCKET_CONNECT_S, or returns -1 with errno.
static int socket_connect_to_(const struct addrinfo* address) {
    int fd = socket(address->ai_family, SOCK_STREAM, 0), error = 0;
    socklen_t size = sizeof(error);
    struct pollfd ready = {fd, POLLOUT, 0};
    if (fd < 0) {
        return -1;
    }
    fcntl(fd, F_SETFL, O_NONBLOCK);
    if (connect(fd, address->ai_addr, address->ai_addrlen) != 0 && errno != EINPROGRESS) {
        error = errno;
    } else if (poll(&ready, 1, 1000 * SOCKET_CONNECT_S) != 1) {
        error = ETIMEDOUT;
    } else {
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error) {
        close(fd);
        errno = error;
        return -1;
    }
    fcntl(fd, F_SETFL, 0);
    socket_set_up(fd);
    return fd;
}

int socket_connect(const char* host, int port, char reason[SOCKET_REASON]) {
    struct addrinfo wanted, *found = NULL;
    char service[16];
    int fd = -1;
    memset(&wanted, 0, sizeof(wanted));
    wanted.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof(service), "%d", port);
    const int failed = getaddrinfo(host, service, &wanted, &found);
    if (failed) {
        snprintf(reason, SOCKET_REASON, "%s: %s", host, gai_strerror(failed));
        return -1;
    }
    for (const struct addrinfo* at = found; at && fd < 0; at = at->ai_next) {
        fd = socket_connect_to_(at);
    }
    if (fd < 0) {
        snprintf(reason, SOCKET_REASON, "%s:%d: %s", host, port, strerror(errno));
    }
    freeaddrinfo(found);
    return fd;
}

#endif // COMM_SOCKET_IMPLEMENTATION

#endif
