// A client of many connections.
//
// With RATE 0 each connection asks again as soon as it is answered; otherwise RATE requests a second begin whether or
// not others are answered, on at most CONNECTIONS. Says "measuring" after WARM seconds, and tells what it measured in
// one line of JSON; times in it are microseconds. What is complete after DEADLINE_US is late. Each request is a session
// of its own.
#include "common.h"
#include <poll.h>

static const char USAGE[] =
    "client PORT CONNECTIONS RATE SECONDS WARM RAMP_US STREAM TOKENS BODY DEADLINE_US HEADERS\n";

struct connection {
    int fd, status, length;  // length: of the body, or -1 while not known
    struct bytes in;
    bool asked, in_body, chunked, told;
    int64_t began;
    struct connection *next;  // idle
};

struct samples {
    int64_t *values;
    int count, capacity;
};

static int port, poll_fd, opened, most, session_at;
static bool measuring, streams;
static int64_t deadline_ns, ok, late, refused, failed, unsent, events, sessions;
static double rate;
static struct bytes request;
static struct samples firsts, events_late;
static struct connection *idle;

static void note(struct samples *s, int64_t value) {
    if (!measuring) return;
    if (s->count == s->capacity) {
        s->capacity = s->capacity ? 2 * s->capacity : 65536;
        s->values = realloc(s->values, s->capacity * sizeof *s->values);
    }
    s->values[s->count++] = value;
}

static int ascending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static double us_at(struct samples *s, double share) {
    if (!s->count) return 0;
    int place = share * s->count;
    return s->values[place < s->count ? place : s->count - 1] / 1e3;
}

static void write_request(int body, int tokens, const char *headers) {
    char *filler = calloc(1, body + 1), session[] = "X-Session-ID: ";
    for (int i = 0; i < body; i++) filler[i] = "lorem ipsum dolor "[i % 18];
    char *json = malloc(body + 512), *head = malloc(strlen(headers) + 512);
    int json_length = sprintf(json, "{\"model\":\"m\",\"max_tokens\":%d,\"stream\":%s,"
                                    "\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}]}",
                              tokens, streams ? "true" : "false", filler);
    int head_length = sprintf(head, "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n%s"
                                    "Content-Type: application/json\r\n%s%012d\r\nContent-Length: %d\r\n\r\n",
                              port, headers, session, 0, json_length);
    append(&request, head, head_length);
    append(&request, json, json_length);
    session_at = (char *)memmem(request.data, head_length, session, strlen(session)) - request.data + strlen(session);
    free(filler), free(json), free(head);
}

static void dial(struct connection *c) {
    struct sockaddr_in address = loopback(port);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c->fd, (void *)&address, sizeof address)) perror("connect"), exit(1);
    undelayed(c->fd);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    watch(poll_fd, EPOLL_CTL_ADD, c->fd, EPOLLIN, c);
}

static void ask(struct connection *c, int64_t since) {
    char session[32];
    snprintf(session, sizeof session, "%012lld", (long long)++sessions);
    memcpy(request.data + session_at, session, 12);
    if (c->fd < 0) dial(c);
    c->began = since, c->status = 0, c->length = -1;
    c->asked = true, c->in_body = c->chunked = c->told = false;
    c->in.length = 0;
    for (int sent = 0, n; sent < request.length; sent += n > 0 ? n : 0) {
        n = send(c->fd, request.data + sent, request.length - sent, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) return;
        if (n < 0) poll(&(struct pollfd){.fd = c->fd, .events = POLLOUT}, 1, -1);
    }
}

static struct connection *another(void) {
    struct connection *c = idle;
    if (c) return idle = c->next, c;
    if (opened == most) return NULL;
    c = calloc(1, sizeof *c);
    c->fd = -1;
    opened++;
    return c;
}

static void rest(struct connection *c) {
    if (!rate) return ask(c, now());
    c->asked = false;
    c->next = idle, idle = c;
}

static void ended(struct connection *c) {
    if (c->status == 429 || c->status == 503) refused++;
    else if (c->status != 200) failed++;
    else if (now() - c->began > deadline_ns) late++;
    else ok++;
    rest(c);
}

static void tell(struct connection *c) {
    if (!c->told) note(&firsts, now() - c->began);
    c->told = true;
}

static bool head_is_there(struct connection *c) {
    char *end = memmem(c->in.data, c->in.length, "\r\n\r\n", 4);
    if (!end) return false;
    int head = end - c->in.data + 4;
    const char *length = header(c->in.data, head, "content-length");
    const char *coding = header(c->in.data, head, "transfer-encoding");
    c->status = atoi(c->in.data + 9);
    c->length = length ? atoi(length) : -1;
    c->chunked = coding != NULL;
    drop(&c->in, head);
    c->in.data[c->in.length] = 0;
    return c->in_body = true;
}

static void count_events(struct connection *c) {
    int done = 0;
    for (char *end; (end = memmem(c->in.data + done, c->in.length - done, "\n\n", 2)) != NULL;) {
        char *sent = memmem(c->in.data + done, end - c->in.data - done, "\"t\":", 4);
        done = end - c->in.data + 2;
        if (!sent) continue;
        events++;
        tell(c);
        note(&events_late, now() - atoll(sent + 4));
    }
    if (done) drop(&c->in, done);
}

static void lost(struct connection *c) {
    close(c->fd);
    c->fd = -1;
    if (!c->asked) return;
    failed++;
    rest(c);
}

static void hear(struct connection *c) {
    bool open = fill(c->fd, &c->in);
    if (c->in_body || head_is_there(c)) {
        if (c->length < 0 && c->status == 200) count_events(c);
        bool closed = c->chunked && c->in.length >= 5 && !memcmp(c->in.data + c->in.length - 5, "0\r\n\r\n", 5);
        if (closed || (c->length >= 0 && c->in.length >= c->length)) {
            tell(c);
            if (open) return ended(c);
        }
    }
    if (!open) lost(c);
}

static void begin_due(int64_t *due, int64_t until) {
    for (; *due <= until; *due += 1e9 / rate) {
        struct connection *c = another();
        if (c) ask(c, *due);
        else unsent++;
    }
}

static void attend(int timeout) {
    static struct epoll_event ready[512];
    int n = epoll_wait(poll_fd, ready, 512, timeout);
    for (int i = 0; i < n; i++) hear(ready[i].data.ptr);
}

static void open_all(int ramp_us) {
    for (int i = 0; i < most; i++) {
        ask(another(), now());
        for (int64_t until = now() + ramp_us * 1000LL; now() < until;) attend(0);
    }
}

static void report(double seconds) {
    qsort(firsts.values, firsts.count, sizeof(int64_t), ascending);
    qsort(events_late.values, events_late.count, sizeof(int64_t), ascending);
    printf("{\"seconds\":%.3f,\"ok\":%lld,\"late\":%lld,\"refused\":%lld,\"failed\":%lld,"
           "\"unsent\":%lld,\"events\":%lld,\"first_p50\":%.0f,\"first_p99\":%.0f,"
           "\"event_p50\":%.0f,\"event_p99\":%.0f,\"connections\":%d}\n",
           seconds, (long long)ok, (long long)late, (long long)refused, (long long)failed, (long long)unsent,
           (long long)events, us_at(&firsts, .5), us_at(&firsts, .99), us_at(&events_late, .5),
           us_at(&events_late, .99), opened);
}

int main(int count, char **given) {
    if (count != 12) return fputs(USAGE, stderr), 2;
    port = atoi(given[1]), most = atoi(given[2]), rate = atof(given[3]);
    double seconds = atof(given[4]), warm = atof(given[5]);
    streams = atoi(given[7]);
    deadline_ns = atoll(given[10]) * 1000 ?: INT64_MAX;
    write_request(atoi(given[9]), atoi(given[8]), given[11]);
    poll_fd = epoll_create1(0);
    int64_t due = now();
    if (!rate) open_all(atoi(given[6]));
    int64_t from = now() + (int64_t)(warm * 1e9), until = from + (int64_t)(seconds * 1e9);
    for (int64_t t; (t = now()) < until;) {
        if (!measuring && t >= from) {
            measuring = true;
            ok = late = refused = failed = unsent = events = 0;
            puts("measuring"), fflush(stdout);
        }
        if (rate) begin_due(&due, t);
        attend(rate ? 1 : 20);
    }
    report((now() - from) / 1e9);
}
