#define _GNU_SOURCE /* memmem, strcasestr */
#include "connections.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

void die(const char *what, const char *detail)
{
    fprintf(stderr, "%s: %s\n", what, detail != NULL ? detail : strerror(errno));
    exit(1);
}

void *grab(size_t size)
{
    void *memory = calloc(1, size > 0 ? size : 1);
    if (memory == NULL)
        die("memory", NULL);
    return memory;
}

char *read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0)
        die(path, NULL);
    long length = ftell(file);
    if (length < 0)
        die(path, NULL);
    rewind(file);
    char *text = grab((size_t)length + 1);
    if (fread(text, 1, (size_t)length, file) != (size_t)length)
        die(path, "could not be read");
    fclose(file);
    *size = (size_t)length;
    return text;
}

char *find_bytes(const char *in, size_t size, const char *what, size_t length)
{
    return memmem(in, size, what, length);
}

struct marks find_marks(const char *text, size_t size, const char *mark)
{
    struct marks found = {NULL, 0};
    for (int pass = 0; pass < 2; pass++) {
        size_t count = 0;
        const char *from = text, *hit;
        while ((hit = find_bytes(from, size - (size_t)(from - text), mark, MARK_SIZE)) != NULL) {
            if (pass == 1)
                found.at[count] = (size_t)(hit - text);
            count++;
            from = hit + MARK_SIZE;
        }
        if (pass == 0)
            found.at = grab(count * sizeof *found.at);
        found.count = count;
    }
    return found;
}

void put_number(char *at, unsigned long number, char filler)
{
    for (int i = MARK_SIZE - 1; i >= 0; i--) {
        bool rest = number > 0 || i == MARK_SIZE - 1;
        at[i] = rest ? (char)('0' + number % 10) : filler;
        number /= 10;
    }
}

const char *header_value(const char *head, const char *name)
{
    size_t length = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line != NULL; line = strstr(line, "\r\n")) {
        line += 2;
        if (strncasecmp(line, name, length) == 0 && line[length] == ':') {
            line += length + 1;
            return line + strspn(line, " \t");
        }
    }
    return NULL;
}

void set_up_socket(int fd)
{
    int one = 1;
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0)
        die("fcntl", NULL);
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) != 0)
        die("TCP_NODELAY", NULL);
}
