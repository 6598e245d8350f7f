/* A load generator: keep-alive connections that each ask, wait for the whole answer, and ask again.
 *
 *     load PORT [connections=N] [seconds=S] [least=N] [requests=N] [warmup=N] [sequence=N]
 *          [first=N] [stream=1] [cycle=1] [samples=1] [grow=FILE] TEMPLATE...
 *
 * A template is a whole HTTP request. Its placeholders are filled in anew for each request:
 * "{{conn}}" the connection's number (from `first` on), "{{seqn}}" a number that no other request
 * has (from `sequence` on), "{{size}}" the size of the body. With `cycle` one connection sends the
 * templates in turn, else connection i sends template i. With `grow` a turn is put where the
 * template says "{{grow}}" after each answer: the file's text, with the last request's number for
 * "{{seqn}}" and the number that the answer held behind "no. " for "{{rply}}".
 *
 * The window opens once every connection has had `warmup` answers and closes after `seconds` (and at
 * least `least` answers), or when each connection has had `requests` more; with `requests` alone time
 * does not matter. "open" and "closed" are printed as that happens, so that whoever reads them can look at the clocks of the server; then one
 * line of JSON. Requests that began in the window are counted with their latency, those that also
 * ended in it for the throughput. Every answer must be a 200 that came whole, and a stream must end
 * with [DONE]. Times are in milliseconds.
 */
#define _GNU_SOURCE /* clock_gettime with -std=c11 */
#include "connections.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define HEAD_MAX 65536
#define KEPT_MAX 8192 /* of an answer's beginning, to read its number or to say what was wrong */
#define TAIL 32       /* of an answer's end */
#define SILENCE_MS 120000

struct template
{
    char *bytes;
    size_t size, body; /* of all, and where the body begins */
    struct marks connection, sequence, length;
    size_t grow; /* where turns are put; the size if nowhere */
    uint64_t *latency, *first_byte;
    size_t count, room;
};

/* One template as a connection sends it: its own bytes, with what has grown in them. */
struct request {
    char *bytes;
    size_t size, grown;
};

enum state { HEAD, BODY, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER };

struct connection {
    int fd;
    unsigned long number, answered;
    struct request *requests; /* one for each template */
    size_t now;               /* which of them is under way */
    unsigned long sequence;   /* its number */
    size_t sent;
    bool writing, idle, counted;
    uint64_t started, first_byte;
    enum state state;
    char head[HEAD_MAX + 1];
    size_t head_size;
    int status;
    bool chunked;
    size_t left; /* bytes of the body or of the chunk to come */
    char line[64];
    size_t line_size;
    char kept[KEPT_MAX + 1];
    size_t kept_size;
    char tail[TAIL + 1];
    size_t tail_size;
};

static struct {
    unsigned long port, connections, least, requests, warmup, sequence, first, stream, cycle, samples;
    double seconds;
    const char *grow;
} asked = {.connections = 1};

static struct template *templates;
static size_t template_count;
static char *turn;
static size_t turn_size;
static struct marks turn_sequence, turn_reply;
static int poller;
static unsigned long busy, warm, finished, errors, total;
static bool open_now, closed;
static uint64_t opened_at, closed_at;
static char first_error[512];

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000U + (uint64_t)time.tv_nsec;
}

static void say(const char *what)
{
    puts(what);
    fflush(stdout);
}

static void close_window(void)
{
    if (!closed) {
        closed = true;
        closed_at = now();
        say("closed");
    }
}

static void open_window(void)
{
    open_now = true;
    say("open");
    opened_at = now();
}

static struct template load_template(const char *path)
{
    struct template made = {0};
    made.bytes = read_file(path, &made.size);
    made.grow = made.size;
    char *place = find_bytes(made.bytes, made.size, "{{grow}}", MARK_SIZE);
    if (place != NULL) {
        made.grow = (size_t)(place - made.bytes);
        memmove(place, place + MARK_SIZE, made.size - made.grow - MARK_SIZE);
        made.size -= MARK_SIZE;
    }
    char *blank = find_bytes(made.bytes, made.size, "\r\n\r\n", 4);
    if (blank == NULL)
        die(path, "is no HTTP request");
    made.body = (size_t)(blank + 4 - made.bytes);
    made.connection = find_marks(made.bytes, made.size, "{{conn}}");
    made.sequence = find_marks(made.bytes, made.size, "{{seqn}}");
    made.length = find_marks(made.bytes, made.size, "{{size}}");
    return made;
}

static void watch(struct connection *connection, bool writing)
{
    if (writing != connection->writing) {
        struct epoll_event event = {.events = writing ? EPOLLOUT : EPOLLIN, .data.ptr = connection};
        epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event);
        connection->writing = writing;
    }
}

static void transmit(struct connection *connection)
{
    struct request *request = &connection->requests[connection->now];
    while (connection->sent < request->size) {
        ssize_t count = send(connection->fd, request->bytes + connection->sent,
                             request->size - connection->sent, MSG_NOSIGNAL);
        if (count >= 0) {
            connection->sent += (size_t)count;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            watch(connection, true);
            return;
        } else if (errno != EINTR) {
            die("send", NULL);
        }
    }
    watch(connection, false);
}

static void fill(char *bytes, const struct marks *marks, const struct template *from, size_t grown,
                 unsigned long number, char filler)
{
    for (size_t i = 0; i < marks->count; i++)
        put_number(bytes + marks->at[i] + (marks->at[i] >= from->grow ? grown : 0), number, filler);
}

static void begin(struct connection *connection)
{
    bool enough = asked.requests > 0 && connection->answered >= asked.warmup + asked.requests;
    if (closed || enough) {
        connection->idle = true;
        busy--;
        return;
    }
    if (asked.cycle)
        connection->now = connection->answered % template_count;
    const struct template *from = &templates[connection->now];
    struct request *request = &connection->requests[connection->now];
    connection->sequence = asked.sequence++;
    fill(request->bytes, &from->sequence, from, request->grown, connection->sequence, '0');
    fill(request->bytes, &from->length, from, request->grown, request->size - from->body, ' ');
    connection->state = HEAD;
    connection->head_size = connection->kept_size = connection->tail_size = connection->sent = 0;
    connection->first_byte = 0;
    connection->counted = open_now && connection->answered >= asked.warmup;
    connection->started = now();
    transmit(connection);
}

static void fail(const struct connection *connection, const char *why)
{
    if (errors++ > 0)
        return;
    snprintf(first_error, sizeof first_error, "%s; status %d; %.300s", why, connection->status,
             connection->kept);
    for (char *letter = first_error; *letter != '\0'; letter++)
        if (*letter == '"' || *letter == '\\' || (unsigned char)*letter < ' ' || (unsigned char)*letter > '~')
            *letter = '\'';
}

static void record(struct connection *connection, uint64_t ended)
{
    struct template *of = &templates[connection->now];
    if (of->count == of->room) {
        of->room = of->room > 0 ? 2 * of->room : 4096;
        of->latency = realloc(of->latency, of->room * sizeof *of->latency);
        of->first_byte = realloc(of->first_byte, of->room * sizeof *of->first_byte);
        if (of->latency == NULL || of->first_byte == NULL)
            die("memory", NULL);
    }
    of->latency[of->count] = ended - connection->started;
    of->first_byte[of->count++] = connection->first_byte - connection->started;
}

static void add_turn(struct connection *connection)
{
    const struct template *from = &templates[connection->now];
    struct request *request = &connection->requests[connection->now];
    const char *place = strstr(connection->kept, "no. ");
    if (place == NULL || strlen(place) < 4 + MARK_SIZE) {
        fail(connection, "the answer holds no number");
        return;
    }
    char *at = request->bytes + from->grow + request->grown;
    memmove(at + turn_size, at, request->size - (size_t)(at - request->bytes));
    memcpy(at, turn, turn_size);
    for (size_t i = 0; i < turn_sequence.count; i++)
        put_number(at + turn_sequence.at[i], connection->sequence, '0');
    for (size_t i = 0; i < turn_reply.count; i++)
        memcpy(at + turn_reply.at[i], place + 4, MARK_SIZE);
    request->size += turn_size;
    request->grown += turn_size;
}

static void answered(struct connection *connection)
{
    uint64_t ended = now();
    connection->kept[connection->kept_size] = connection->tail[connection->tail_size] = '\0';
    size_t end = connection->tail_size;
    while (end > 0 && strchr("\r\n", connection->tail[end - 1]) != NULL)
        end--;
    connection->tail[end] = '\0';
    if (connection->status != 200)
        fail(connection, "not a 200");
    else if (asked.stream && (end < 12 || strcmp(connection->tail + end - 12, "data: [DONE]") != 0))
        fail(connection, "the stream did not end with [DONE]");
    else if (!asked.stream && (end == 0 || connection->tail[end - 1] != '}'))
        fail(connection, "the answer is no JSON object");
    else if (turn != NULL)
        add_turn(connection);
    connection->answered++;
    total++;
    if (connection->counted) {
        record(connection, ended);
        if (!closed)
            finished++;
    }
    if (!open_now && connection->answered == asked.warmup && ++warm == asked.connections)
        open_window();
    bool timed = asked.requests == 0 || asked.seconds > 0;
    if (open_now && !closed && timed && finished >= asked.least &&
        (double)(int64_t)(ended - opened_at) >= asked.seconds * 1e9)
        close_window();
    if (errors > 0)
        close_window();
    begin(connection);
}

static void keep(struct connection *connection, const char *bytes, size_t size)
{
    if (size == 0)
        return;
    if (connection->first_byte == 0)
        connection->first_byte = now();
    size_t room = KEPT_MAX - connection->kept_size;
    size_t taken = size < room ? size : room;
    memcpy(connection->kept + connection->kept_size, bytes, taken);
    connection->kept_size += taken;
    if (size >= TAIL) {
        memcpy(connection->tail, bytes + size - TAIL, TAIL);
        connection->tail_size = TAIL;
    } else {
        size_t stays = connection->tail_size + size > TAIL ? TAIL - size : connection->tail_size;
        memmove(connection->tail, connection->tail + connection->tail_size - stays, stays);
        memcpy(connection->tail + stays, bytes, size);
        connection->tail_size = stays + size;
    }
}

/* Collects a line; true once it is complete, without its end, behind a zero byte. */
static bool line_ended(struct connection *connection, char letter)
{
    if (letter != '\n') {
        if (connection->line_size + 1 < sizeof connection->line)
            connection->line[connection->line_size++] = letter;
        return false;
    }
    while (connection->line_size > 0 && connection->line[connection->line_size - 1] == '\r')
        connection->line_size--;
    connection->line[connection->line_size] = '\0';
    connection->line_size = 0;
    return true;
}

static void read_head(struct connection *connection)
{
    connection->head[connection->head_size] = '\0';
    if (sscanf(connection->head, "HTTP/1.1 %d", &connection->status) != 1)
        die("the answer is no HTTP", connection->head);
    const char *length = header_value(connection->head, "content-length");
    const char *coding = header_value(connection->head, "transfer-encoding");
    connection->chunked = coding != NULL && strncasecmp(coding, "chunked", 7) == 0;
    if (!connection->chunked && length == NULL)
        die("the answer has no length", connection->head);
    connection->state = connection->chunked ? CHUNK_SIZE : BODY;
    connection->left = connection->chunked ? 0 : strtoul(length, NULL, 10);
    connection->line_size = 0;
}

static size_t least_of(size_t one, size_t other)
{
    return one < other ? one : other;
}

/* Reads on in an answer; returns true once it is complete. */
static bool read_on(struct connection *connection, const char *bytes, size_t size)
{
    size_t at = 0;
    while (at < size) {
        size_t taken;
        switch (connection->state) {
        case HEAD:
            if (connection->head_size == HEAD_MAX)
                die("the answer", "has too long a head");
            connection->head[connection->head_size++] = bytes[at++];
            if (connection->head_size >= 4 &&
                memcmp(connection->head + connection->head_size - 4, "\r\n\r\n", 4) == 0) {
                read_head(connection);
                if (!connection->chunked && connection->left == 0)
                    return true;
            }
            break;
        case BODY:
        case CHUNK:
            taken = least_of(connection->left, size - at);
            keep(connection, bytes + at, taken);
            at += taken;
            connection->left -= taken;
            if (connection->left == 0) {
                if (connection->state == BODY)
                    return true;
                connection->state = CHUNK_END;
            }
            break;
        case CHUNK_SIZE:
            if (line_ended(connection, bytes[at++])) {
                connection->left = strtoul(connection->line, NULL, 16);
                connection->state = connection->left > 0 ? CHUNK : TRAILER;
            }
            break;
        case CHUNK_END:
            if (line_ended(connection, bytes[at++]))
                connection->state = CHUNK_SIZE;
            break;
        case TRAILER:
            if (line_ended(connection, bytes[at++]) && connection->line[0] == '\0')
                return true;
            break;
        }
    }
    return false;
}

static void receive(struct connection *connection)
{
    static char bytes[1 << 16];
    ssize_t count = recv(connection->fd, bytes, sizeof bytes, 0);
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    if (count <= 0)
        die("recv", count == 0 ? "the server closed a connection" : NULL);
    if (connection->idle)
        die("recv", "the server sent what nobody asked for");
    if (read_on(connection, bytes, (size_t)count))
        answered(connection);
}

static struct connection *join(unsigned long number)
{
    struct connection *made = grab(sizeof *made);
    made->number = asked.first + number;
    made->now = asked.cycle ? 0 : number % template_count;
    made->requests = grab(template_count * sizeof *made->requests);
    for (size_t i = 0; i < template_count; i++) {
        if (!asked.cycle && i != made->now)
            continue;
        const struct template *from = &templates[i];
        made->requests[i].bytes = grab(from->size + turn_size * (asked.warmup + asked.requests + 1));
        made->requests[i].size = from->size;
        memcpy(made->requests[i].bytes, from->bytes, from->size);
        fill(made->requests[i].bytes, &from->connection, from, 0, made->number, '0');
    }
    made->fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                  .sin_port = htons((uint16_t)asked.port)};
    if (made->fd < 0 || connect(made->fd, (struct sockaddr *)&address, sizeof address) != 0)
        die("connect", NULL);
    set_up_socket(made->fd);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = made};
    epoll_ctl(poller, EPOLL_CTL_ADD, made->fd, &event);
    return made;
}

static int by_size(const void *one, const void *other)
{
    uint64_t left = *(const uint64_t *)one, right = *(const uint64_t *)other;
    return (left > right) - (left < right);
}

static void print_times(const char *name, uint64_t *times, size_t count)
{
    printf("\"%s\": ", name);
    if (count == 0) {
        printf("null");
        return;
    }
    qsort(times, count, sizeof *times, by_size);
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += (double)times[i];
    printf("{\"mean\": %.4f, \"p50\": %.4f, \"p90\": %.4f, \"p99\": %.4f, \"max\": %.4f}",
           sum / (double)count / 1e6, (double)times[(count - 1) / 2] / 1e6,
           (double)times[(count - 1) * 9 / 10] / 1e6, (double)times[(count - 1) * 99 / 100] / 1e6,
           (double)times[count - 1] / 1e6);
}

static void report(void)
{
    printf("{\"seconds\": %.6f, \"finished\": %lu, \"total\": %lu, \"sequence\": %lu, \"errors\": %lu, "
           "\"first_error\": \"%s\", \"templates\": [",
           open_now ? (double)(closed_at - opened_at) / 1e9 : 0.0, finished, total, asked.sequence, errors,
           first_error);
    for (size_t i = 0; i < template_count; i++) {
        struct template *of = &templates[i];
        printf("%s{\"requests\": %zu, ", i > 0 ? ", " : "", of->count);
        if (asked.samples) {
            printf("\"samples\": [");
            for (size_t k = 0; k < of->count; k++)
                printf("%s%.4f", k > 0 ? ", " : "", (double)of->latency[k] / 1e6);
            printf("], ");
        }
        print_times("latency", of->latency, of->count);
        printf(", ");
        print_times("first_byte", of->first_byte, of->count);
        printf("}");
    }
    say("]}");
}

static void read_words(int count, char **words)
{
    static const struct {
        const char *name;
        unsigned long *value;
    } numbers[] = {{"connections", &asked.connections}, {"least", &asked.least},
                   {"requests", &asked.requests},       {"warmup", &asked.warmup},
                   {"sequence", &asked.sequence},       {"first", &asked.first},
                   {"stream", &asked.stream},           {"cycle", &asked.cycle},
                   {"samples", &asked.samples}};
    if (count < 3)
        die("usage", "load PORT [name=value]... TEMPLATE...");
    asked.port = strtoul(words[1], NULL, 10);
    templates = grab((size_t)count * sizeof *templates);
    for (int i = 2; i < count; i++) {
        char *equals = strchr(words[i], '=');
        if (equals == NULL) {
            templates[template_count++] = load_template(words[i]);
            continue;
        }
        *equals = '\0';
        bool known = false;
        for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++) {
            if (strcmp(words[i], numbers[k].name) == 0) {
                *numbers[k].value = strtoul(equals + 1, NULL, 10);
                known = true;
            }
        }
        if (strcmp(words[i], "seconds") == 0)
            asked.seconds = strtod(equals + 1, NULL);
        else if (strcmp(words[i], "grow") == 0)
            asked.grow = equals + 1;
        else if (!known)
            die(words[i], "is no setting");
    }
    if (template_count == 0 || asked.connections == 0)
        die("usage", "name a template and at least one connection");
    if (asked.grow != NULL && asked.requests == 0)
        die("grow", "needs requests=N, so that it ends");
}

int main(int count, char **words)
{
    read_words(count, words);
    signal(SIGPIPE, SIG_IGN);
    if (asked.grow != NULL) {
        turn = read_file(asked.grow, &turn_size);
        turn_sequence = find_marks(turn, turn_size, "{{seqn}}");
        turn_reply = find_marks(turn, turn_size, "{{rply}}");
    }
    poller = epoll_create1(0);
    struct connection **all = grab(asked.connections * sizeof *all);
    for (unsigned long i = 0; i < asked.connections; i++)
        all[i] = join(i);
    busy = asked.connections;
    if (asked.warmup == 0)
        open_window();
    for (unsigned long i = 0; i < asked.connections; i++)
        begin(all[i]);
    while (busy > 0) {
        struct epoll_event ready[256];
        int events = epoll_wait(poller, ready, 256, SILENCE_MS);
        if (events == 0)
            die("silence", "no answer for two minutes");
        for (int i = 0; i < events; i++) {
            struct connection *connection = ready[i].data.ptr;
            if (ready[i].events & EPOLLOUT)
                transmit(connection);
            else
                receive(connection);
        }
    }
    close_window();
    report();
    return 0;
}
