// A mock engine, Prefiller and Decoder at once: engine PORT INTERVAL_US SERVICE_US.
//
// As with vLLM, an answer tells where KV is kept only where its request asked that it be kept.
// A stream sends an event each INTERVAL_US, or all at once where that is 0; each carries the time at which it was sent
// as "t". Requests are served one after the other, SERVICE_US each, or at once where that is 0.
#include "common.h"

#define PHASES 8  // streams do not all send at the same moment

struct connection {
    int fd, tokens_left;
    struct bytes in, out;
    struct connection *next, *previous;  // in the ring of its phase
    struct connection *behind;           // in the queue
    bool queued, stream, keeps, gone;
};

static int poll_fd, pace_fd = -1, service_fd = -1;
static int64_t interval_us, service_us, service_due;
static struct connection rings[PHASES], *first, *last;

static const char NOT_FOUND[] = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
static const char KV[] =
    "\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
    "\"remote_block_ids\":[1,2,3,4,5,6,7,8],\"remote_engine_id\":\"prefiller\","
    "\"remote_request_id\":\"cmpl-1\",\"remote_host\":\"127.0.0.1\",\"remote_port\":5557,\"tp_size\":1}";
static const char NO_KV[] = "\"kv_transfer_params\":null";
static const char END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static const char ABOUT[] = "{\"status\":\"ok\",\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\"}]}";
static const char EVENT[] =
    "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\","
    "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s\"},\"finish_reason\":%s}],%s%s\"t\":%lld}\n\n";
static const char ANSWER[] =
    "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"m\",\"choices\":[{\"index\":0,"
    "\"message\":{\"role\":\"assistant\",\"content\":\" tok\"},\"finish_reason\":\"length\"}],"
    "\"usage\":{\"prompt_tokens\":10,\"total_tokens\":11,\"completion_tokens\":1},%s,\"t\":%lld}";

static void send_or_keep(struct connection *c, const char *data, int length) {
    int sent = c->out.length ? 0 : send(c->fd, data, length, MSG_NOSIGNAL);
    if (sent < 0) sent = 0;
    if (sent == length) return;
    append(&c->out, data + sent, length - sent);
    watch(poll_fd, EPOLL_CTL_MOD, c->fd, EPOLLIN | EPOLLOUT, c);
}

static void send_rest(struct connection *c) {
    int sent = send(c->fd, c->out.data, c->out.length, MSG_NOSIGNAL);
    if (sent > 0) drop(&c->out, sent);
    if (!c->out.length) watch(poll_fd, EPOLL_CTL_MOD, c->fd, EPOLLIN, c);
}

static void chunk(struct bytes *to, bool is_last) {
    char text[1024];
    int n = snprintf(text, sizeof text, EVENT, is_last ? "" : " tok", is_last ? "\"stop\"" : "null",
                     is_last ? NO_KV : "", is_last ? "," : "", (long long)now());
    to->length += sprintf(room(to, n + 16), "%x\r\n%s\r\n", n, text);
    if (is_last) append(to, END, sizeof END - 1);
}

static void whole(struct connection *c, const char *body) {
    char text[2048];
    static const char form[] =
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s";
    int n = snprintf(text, sizeof text, form, strlen(body), body);
    send_or_keep(c, text, n);
}

static void whole_answer(struct connection *c) {
    char text[1536];
    snprintf(text, sizeof text, ANSWER, c->keeps ? KV : NO_KV, (long long)now());
    whole(c, text);
}

static void next_chunk(struct connection *c) {
    static struct bytes part;
    part.length = 0;
    chunk(&part, --c->tokens_left == 0);
    send_or_keep(c, part.data, part.length);
}

static void leave_ring(struct connection *c) {
    if (!c->next) return;
    c->previous->next = c->next;
    c->next->previous = c->previous;
    c->next = c->previous = NULL;
}

static void stream(struct connection *c) {
    static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                               "transfer-encoding: chunked\r\n\r\n";
    static int streams;
    static struct bytes all;
    all.length = 0;
    append(&all, head, sizeof head - 1);
    if (!interval_us)
        while (c->tokens_left) chunk(&all, --c->tokens_left == 0);
    send_or_keep(c, all.data, all.length);
    if (!c->tokens_left) return;
    next_chunk(c);
    if (!c->tokens_left) return;
    struct connection *ring = &rings[streams++ % PHASES];
    c->next = ring->next, c->previous = ring;
    ring->next->previous = c, ring->next = c;
}

static void answer(struct connection *c) {
    if (c->stream) stream(c);
    else whole_answer(c);
}

// The first in the queue is served SERVICE_US after the one before it, however late that was noticed.
static void expect_service(int64_t since) {
    service_due = since + service_us * 1000;
    struct itimerspec at = {.it_value = {service_due / 1000000000, service_due % 1000000000}};
    timerfd_settime(service_fd, TFD_TIMER_ABSTIME, &at, NULL);
}

static void queue(struct connection *c) {
    c->queued = true, c->behind = NULL;
    if (first) last->behind = c;
    else first = c;
    last = c;
    if (first == c) expect_service(now());
}

static void release(struct connection *c) {
    close(c->fd);
    free(c->in.data), free(c->out.data), free(c);
}

static int number(const char *body, const char *key, int otherwise) {
    const char *at = strstr(body, key);
    return at ? atoi(at + strlen(key)) : otherwise;
}

static void generate(struct connection *c, const char *body) {
    const char *key = strstr(body, "\"stream\":");
    c->stream = key && key[9 + (key[9] == ' ')] == 't';
    c->keeps = strstr(body, "\"do_remote_decode\":true") != NULL;
    c->tokens_left = number(body, "\"max_tokens\":", number(body, "\"max_completion_tokens\":", 16));
    if (c->tokens_left < 1) c->tokens_left = 1;
    if (service_us) queue(c);
    else answer(c);
}

// Requests that are complete, each when the one before it is answered.
static void serve(struct connection *c) {
    char *end;
    while (!c->next && !c->queued && (end = memmem(c->in.data, c->in.length, "\r\n\r\n", 4)) != NULL) {
        int head = end - c->in.data + 4;
        const char *length = header(c->in.data, head, "content-length");
        int body = length ? atoi(length) : 0;
        if (c->in.length < head + body) return;
        char kept = c->in.data[head + body];
        c->in.data[head + body] = 0;
        bool generates = !strncmp(c->in.data, "POST", 4) && memmem(c->in.data, head, "completions", 11);
        if (generates) generate(c, c->in.data + head);
        else if (memmem(c->in.data, head, "/contract", 9)) send_or_keep(c, NOT_FOUND, sizeof NOT_FOUND - 1);
        else whole(c, ABOUT);
        c->in.data[head + body] = kept;
        drop(&c->in, head + body);
    }
}

static void serve_first(void) {
    struct connection *c = first;
    first = c->behind;
    c->queued = false;
    if (first) expect_service(service_due);
    if (c->gone) return release(c);
    answer(c);
    serve(c);
}

static void pace(void) {
    static int phase;
    struct connection *ring = &rings[phase++ % PHASES];
    for (struct connection *c = ring->next, *next; c != ring; c = next) {
        next = c->next;
        if (c->tokens_left == 1) leave_ring(c);
        next_chunk(c);
        if (!c->tokens_left) serve(c);
    }
}

static void accept_all(int listener) {
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        struct connection *c = calloc(1, sizeof *c);
        c->fd = fd;
        undelayed(fd);
        watch(poll_fd, EPOLL_CTL_ADD, fd, EPOLLIN, c);
    }
}

static void attend(struct connection *c, uint32_t events) {
    if (events & EPOLLOUT) send_rest(c);
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    if (fill(c->fd, &c->in)) return serve(c);
    leave_ring(c);
    if (!c->queued) return release(c);
    c->gone = true;
    epoll_ctl(poll_fd, EPOLL_CTL_DEL, c->fd, NULL);
}

static int timer(int64_t us) {
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct timespec every = {us / 1000000, us % 1000000 * 1000};
    struct itimerspec times = {every, every};
    if (us) timerfd_settime(fd, 0, &times, NULL);
    watch(poll_fd, EPOLL_CTL_ADD, fd, EPOLLIN, (void *)(intptr_t)fd);
    return fd;
}

int main(int count, char **arguments) {
    if (count != 4) return fprintf(stderr, "engine PORT INTERVAL_US SERVICE_US\n"), 2;
    interval_us = atoll(arguments[2]), service_us = atoll(arguments[3]);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = loopback(atoi(arguments[1]));
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 4096)) return perror("listen"), 1;
    poll_fd = epoll_create1(0);
    watch(poll_fd, EPOLL_CTL_ADD, listener, EPOLLIN, NULL);
    for (int i = 0; i < PHASES; i++) rings[i].next = rings[i].previous = &rings[i];
    if (interval_us) pace_fd = timer(interval_us / PHASES);
    if (service_us) service_fd = timer(0);
    struct epoll_event events[512];
    for (uint64_t ticks;;) {
        int n = epoll_wait(poll_fd, events, 512, -1);
        for (int i = 0; i < n; i++) {
            void *who = events[i].data.ptr;
            if (!who) accept_all(listener);
            else if (who == (void *)(intptr_t)pace_fd) {
                if (read(pace_fd, &ticks, 8) == 8)
                    while (ticks--) pace();
            } else if (who == (void *)(intptr_t)service_fd) {
                if (read(service_fd, &ticks, 8) == 8 && first) serve_first();
            } else attend(who, events[i].events);
        }
    }
}
