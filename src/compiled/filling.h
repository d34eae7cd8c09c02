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
    long long waiting_bytes, chunk;
    char started, late, plain, past;
} Filling;

extern PyTypeObject *FillingType;

int prepare_copies(void);
int copied(PyObject *place, PyObject *gradient, int past);
int filling_arrived(Filling *self, Py_ssize_t slot);

#endif
