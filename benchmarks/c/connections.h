/* What the load generator and the fake upstream share: sockets that do not block, files, numbers. */
#ifndef BENCH_CONNECTIONS_H
#define BENCH_CONNECTIONS_H

#include <stdbool.h>
#include <stddef.h>

#define MARK_SIZE 8 /* every placeholder is this long, and so is what takes its place */

/* A text and where its placeholders stand. */
struct marks {
    size_t *at;
    size_t count;
};

/* Ends the program with a message: nothing here can go on after a mistake. */
void die(const char *what, const char *detail) __attribute__((noreturn));

/* Returns the whole file with a zero byte behind it, and its size. */
char *read_file(const char *path, size_t *size);

/* Finds every occurrence of an eight-character placeholder. */
struct marks find_marks(const char *text, size_t size, const char *mark);

/* Writes `number` over a placeholder, in eight characters, filled up from the left. */
void put_number(char *at, unsigned long number, char filler);

/* Returns the value of a header of an HTTP head (which ends with a zero byte), or NULL. */
const char *header_value(const char *head, const char *name);

/* Returns where `what` begins in the bytes, or NULL. */
char *find_bytes(const char *in, size_t size, const char *what, size_t length);

void set_up_socket(int fd);

void *grab(size_t size);

#endif
