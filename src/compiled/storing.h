/* How ranks store what other ranks read, and sums of what they stored. */
#ifndef UNISONO_STORING_H
#define UNISONO_STORING_H

#include "compiled.h"

/* How fast one rank's stores are. */
typedef struct {
    PyObject_HEAD
    double plain_s, past_s; /* a byte; 0 before the first time */
    unsigned count;
} Storing;

extern PyTypeObject *StoringType;

void store_past(char *to, const char *from, int64_t nbytes);
void store(Storing *storing, char *to, const char *from, int64_t nbytes);
void sum_stored(const Storing *storing, const char *const *rows, int64_t count, char *into, char *shown, int64_t nbytes,
                int width);

#endif
