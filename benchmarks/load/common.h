// What the mock engine and the client share: time, growing buffers, sockets of this machine.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

struct bytes {
    char *data;
    int length, capacity;
};

static inline int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Room for `more` bytes and a closing zero.
static inline char *room(struct bytes *b, int more) {
    if (b->length + more >= b->capacity) {
        b->capacity = 2 * (b->length + more) + 4096;
        b->data = realloc(b->data, b->capacity);
    }
    return b->data + b->length;
}

static inline void append(struct bytes *b, const char *data, int length) {
    memcpy(room(b, length), data, length);
    b->length += length;
}

static inline void drop(struct bytes *b, int length) {
    memmove(b->data, b->data + length, b->length - length);
    b->length -= length;
}

// What there is to read, closed with a zero; false at the end of the connection.
static inline bool fill(int fd, struct bytes *b) {
    for (;;) {
        char *end = room(b, 65536);
        int got = recv(fd, end, 65536, 0);
        if (got <= 0) {
            end[0] = 0;
            return got < 0 && errno == EAGAIN;
        }
        b->length += got;
        b->data[b->length] = 0;
        if (got < 65536) return true;
    }
}

// The value of a header within a head of `length` bytes, or NULL.
static inline const char *header(const char *head, int length, const char *name) {
    for (const char *line = head; (line = memchr(line, '\n', head + length - line)) != NULL;)
        if (!strncasecmp(++line, name, strlen(name)) && line[strlen(name)] == ':') return line + strlen(name) + 1;
    return NULL;
}

static inline struct sockaddr_in loopback(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static inline void undelayed(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static inline void watch(int poll, int how, int fd, uint32_t events, void *who) {
    struct epoll_event event = {.events = events, .data.ptr = who};
    epoll_ctl(poll, how, fd, &event);
}
