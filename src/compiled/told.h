/* How much of some memory lies ready: unisono.transport.Ready.told. */
#ifndef UNISONO_TOLD_H
#define UNISONO_TOLD_H

#include "compiled.h"

typedef struct {
    Py_buffer word, tag; /* none where nobody asks */
} Told;

int prepare_told(Told *told, PyObject *words);
void release_told(Told *told);
int is_asked(const Told *told);
void tell_ready(Told *told, int64_t nbytes);

#endif
