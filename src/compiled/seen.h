/* What a call was made with, and whether it is made with that again: unisono.transports._seen. */
#ifndef UNISONO_SEEN_H
#define UNISONO_SEEN_H

#include "compiled.h"

/* Of DLPack 1, what is used here. */
typedef struct {
    void *data;
    int32_t device_type, device_id, ndim;
    uint32_t kind; /* a byte for the kind, one for the bits, two for the lanes */
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

enum { CPU = 1 };

static inline int64_t nbytes_of(const DLTensor *tensor)
{
    return ((const uint8_t *)&tensor->kind)[1] / 8;
}

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
int viewed(PyObject *tensor, DLTensor *now);
int prepare_seeing(void);

#endif
