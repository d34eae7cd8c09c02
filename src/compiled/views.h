/* Where the elements of a tensor lie, by DLPack's table of C functions, where torch offers it. */
#ifndef UNISONO_VIEWS_H
#define UNISONO_VIEWS_H

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

int viewed(PyObject *tensor, DLTensor *now);

#endif
