/* What is kept of calls: unisono.transports._again. */
#ifndef UNISONO_REPEATS_H
#define UNISONO_REPEATS_H

#include "seen.h"

/* An entry is in one of the places of its set, which are neighbours in memory. */
enum { PLACES = 8, SETS = 256, ENTRIES = PLACES * SETS };

typedef struct {
    PyObject *name, *op, *root;
    void *target_at, *source_at;
    Seen target, source;
    uint64_t words[3], wanted[3];
    PyObject *said, *begin, *arguments;
    long divisor;
    int holders; /* the table, and who makes the call */
} Entry;

typedef struct {
    PyObject_HEAD
    PyObject *agreement, *comms, *lock;
    unsigned replaced;
    Entry *entries[ENTRIES];
} Repeats;

Entry *find(const Repeats *repeats, PyObject *const *given);
void drop(Entry *entry);
PyObject *remember(Repeats *repeats, PyObject *const *given, Py_ssize_t count);

#endif
