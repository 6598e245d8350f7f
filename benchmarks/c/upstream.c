/* A provider that answers at once: what a proxy costs is all that is left to measure.
 *
 *     upstream JSON EVENTS EVENTS_WITH_USAGE
 *
 * The three files are bodies of answers: a chat completion, a stream of events, and the same with a
 * usage chunk (sent where the request asks for it). "{{rply}}" in them becomes the number of the
 * request, so that no two answers are equal. Prints the port it listens on, on 127.0.0.1. `GET` of
 * anything is answered with the number of completions so far. HTTP/1.1, keep-alive, one thread.
 */
#define _GNU_SOURCE /* accept4 */
#include "connections.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define HEAD_MAX 65536
#define BODY_MAX (256UL << 20)
#define LOOKED_AT 4096 /* a request's own fields stand before its messages or behind them */
#define EVENTS_AT_ONCE 256

struct answer {
    char *bytes;
    size_t size;
    struct marks replies;
};

struct client {
    int fd;
    char *in; /* the request: head and body */
    size_t room, have;
    size_t need; /* size of the whole request; 0 while its head is not complete */
    size_t head; /* size of the head */
    char *out;   /* what the socket would not take yet */
    size_t out_size, out_sent;
};

static struct answer json_answer, events_answer, usage_answer;
static unsigned long served;
static int poller;

/* Makes the bytes of a whole HTTP response. Events go in one chunk each, as providers send them. */
static struct answer make_answer(const char *path, bool events)
{
    size_t size;
    char *body = read_file(path, &size);
    char *bytes = grab(2 * size + 4096 + size / 2 * 16);
    size_t at;
    if (!events) {
        at = (size_t)sprintf(bytes,
                             "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                             "content-length: %zu\r\n\r\n",
                             size);
        memcpy(bytes + at, body, size);
        at += size;
    } else {
        at = (size_t)sprintf(bytes, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                                    "transfer-encoding: chunked\r\n\r\n");
        const char *from = body, *end;
        while ((end = strstr(from, "\n\n")) != NULL) {
            size_t length = (size_t)(end + 2 - from);
            at += (size_t)sprintf(bytes + at, "%zx\r\n", length);
            memcpy(bytes + at, from, length);
            at += length;
            memcpy(bytes + at, "\r\n", 2);
            at += 2;
            from = end + 2;
        }
        memcpy(bytes + at, "0\r\n\r\n", 5);
        at += 5;
    }
    free(body);
    return (struct answer){bytes, at, find_marks(bytes, at, "{{rply}}")};
}

static bool said(const struct client *client, const char *what)
{
    const char *body = client->in + client->head;
    size_t size = client->need - client->head, length = strlen(what);
    size_t start = size < LOOKED_AT ? size : LOOKED_AT;
    return find_bytes(body, start, what, length) != NULL ||
           find_bytes(body + size - start, start, what, length) != NULL;
}

static void leave(struct client *client)
{
    close(client->fd);
    free(client->in);
    free(client->out);
    free(client);
}

/* Sends what the socket takes and keeps the rest; false once the client has gone. */
static bool deliver(struct client *client, const char *bytes, size_t size)
{
    size_t sent = 0;
    while (sent < size) {
        ssize_t count = send(client->fd, bytes + sent, size - sent, MSG_NOSIGNAL);
        if (count >= 0) {
            sent += (size_t)count;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            break;
        } else if (errno != EINTR) {
            return false;
        }
    }
    if (sent < size) {
        client->out = grab(size - sent);
        client->out_size = size - sent;
        client->out_sent = 0;
        memcpy(client->out, bytes + sent, size - sent);
        struct epoll_event event = {.events = EPOLLOUT, .data.ptr = client};
        epoll_ctl(poller, EPOLL_CTL_MOD, client->fd, &event);
    }
    return true;
}

static bool flush(struct client *client)
{
    while (client->out_sent < client->out_size) {
        ssize_t count = send(client->fd, client->out + client->out_sent,
                             client->out_size - client->out_sent, MSG_NOSIGNAL);
        if (count < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
        client->out_sent += (size_t)count;
    }
    free(client->out);
    client->out = NULL;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = client};
    epoll_ctl(poller, EPOLL_CTL_MOD, client->fd, &event);
    return true;
}

static bool answer_request(struct client *client)
{
    if (strncmp(client->in, "POST ", 5) != 0) {
        char text[256], body[64];
        int length = sprintf(body, "{\"completions\": %lu}", served);
        int size = sprintf(text,
                           "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                           "content-length: %d\r\n\r\n%s",
                           length, body);
        return deliver(client, text, (size_t)size);
    }
    served++;
    struct answer *answer = &json_answer;
    if (said(client, "\"stream\":true"))
        answer = said(client, "\"include_usage\":true") ? &usage_answer : &events_answer;
    for (size_t i = 0; i < answer->replies.count; i++)
        put_number(answer->bytes + answer->replies.at[i], served, '0');
    return deliver(client, answer->bytes, answer->size);
}

static void make_room(struct client *client, size_t room)
{
    if (room > client->room) {
        client->in = realloc(client->in, room + 1);
        if (client->in == NULL)
            die("memory", NULL);
        client->room = room;
    }
}

/* Looks whether the head is complete; false if it is none that can be read. */
static bool read_head(struct client *client)
{
    char *end = find_bytes(client->in, client->have, "\r\n\r\n", 4);
    if (end == NULL)
        return client->have < HEAD_MAX;
    client->head = (size_t)(end + 4 - client->in);
    char behind = *end;
    *end = '\0';
    const char *length = header_value(client->in, "content-length");
    size_t body = length != NULL ? strtoul(length, NULL, 10) : 0;
    bool chunked = header_value(client->in, "transfer-encoding") != NULL;
    *end = behind;
    if (chunked || body > BODY_MAX) {
        static const char refusal[] = "HTTP/1.1 411 Length Required\r\ncontent-length: 0\r\n\r\n";
        deliver(client, refusal, sizeof refusal - 1);
        return false;
    }
    client->need = client->head + body;
    make_room(client, client->need > HEAD_MAX ? client->need : HEAD_MAX);
    return true;
}

static bool receive(struct client *client)
{
    ssize_t count = recv(client->fd, client->in + client->have, client->room - client->have, 0);
    if (count <= 0)
        return count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
    client->have += (size_t)count;
    client->in[client->have] = '\0';
    if (client->need == 0 && !read_head(client))
        return false;
    if (client->need == 0 || client->have < client->need)
        return true;
    bool whole = answer_request(client); /* nobody here sends a request before the last is answered */
    client->have = client->need = client->head = 0;
    return whole;
}

int main(int count, char **words)
{
    if (count != 4)
        die("usage", "upstream JSON EVENTS EVENTS_WITH_USAGE");
    signal(SIGPIPE, SIG_IGN);
    json_answer = make_answer(words[1], false);
    events_answer = make_answer(words[2], true);
    usage_answer = make_answer(words[3], true);

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, length) != 0 ||
        listen(listener, 1024) != 0 || getsockname(listener, (struct sockaddr *)&address, &length) != 0)
        die("listen", NULL);
    poller = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);

    for (;;) {
        struct epoll_event ready[EVENTS_AT_ONCE];
        int events = epoll_wait(poller, ready, EVENTS_AT_ONCE, -1);
        for (int i = 0; i < events; i++) {
            struct client *client = ready[i].data.ptr;
            if (client == NULL) {
                int fd;
                while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    set_up_socket(fd);
                    client = grab(sizeof *client);
                    client->fd = fd;
                    make_room(client, HEAD_MAX);
                    event = (struct epoll_event){.events = EPOLLIN, .data.ptr = client};
                    epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
                }
            } else if (ready[i].events & EPOLLOUT ? !flush(client) : !receive(client)) {
                leave(client);
            }
        }
    }
}
