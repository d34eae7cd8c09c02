/* What a call was made with, and whether it is made with that again: unisono.transports._mpi_seen. */
#ifndef UNISONO_SEEN_H
#define UNISONO_SEEN_H

#include "compiled.h"

typedef struct {
    PyObject *reference, *dtype;
    void *address;
    int64_t count;
    uint32_t kind; /* DLPack's, of the elements */
    int viewed;    /* whether DLPack can tell of it */
    int several;   /* whether there are several dtypes of this kind */
} SeenTensor;

typedef struct {
    int listed;
    Py_ssize_t count; /* of tensors; none for None */
    SeenTensor one, *tensors;
} Seen;

int see(Seen *seen, PyObject *given);
int same(const Seen *seen, PyObject *given);
void unsee(Seen *seen);
int prepare_seeing(void);

#endif
