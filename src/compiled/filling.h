/* Which gradients of a bucket have come: unisono.gradients.filling. */
#ifndef UNISONO_FILLING_H
#define UNISONO_FILLING_H

#include "compiled.h"

typedef struct {
    PyObject_HEAD
    PyObject *parameters, *places;
    Py_buffer came, inside; /* of bytearrays, which cannot change their length then: a byte for each */
    Py_ssize_t count, missing, waiting;
    Py_ssize_t *slots; /* of those that wait to be taken */
    int64_t *nbytes;
    uintptr_t low, high; /* of the memory of all places */
    long long waiting_bytes, chunk;
    char started, late, plain, past;
} Filling;

static inline char *came(const Filling *self)
{
    return self->came.buf;
}

static inline char *inside(const Filling *self)
{
    return self->inside.buf;
}

extern PyTypeObject *FillingType;

int prepare_copies(void);
int copied(PyObject *place, PyObject *gradient, int past, uintptr_t low, uintptr_t high);
int filling_arrived(Filling *self, Py_ssize_t slot);

#endif
