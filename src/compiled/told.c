/* Two words, as unisono.transport.Ready.told: one that is written, and one that tells with which bits, or not to. */
#include "told.h"

static int word_of(PyObject *words, Py_ssize_t which, Py_buffer *word)
{
    PyObject *found = PySequence_GetItem(words, which);
    int done = found ? PyObject_GetBuffer(found, word, PyBUF_WRITABLE) : -1;
    Py_XDECREF(found);
    if (done == 0 && (word->len != sizeof(uint64_t) || (uintptr_t)word->buf % sizeof(uint64_t))) {
        PyErr_SetString(PyExc_ValueError, "told must be two words of 64 bits");
        return -1;
    }
    return done;
}

/* From a tuple of two, or None. */
int prepare_told(Told *told, PyObject *words)
{
    if (words == Py_None)
        return 0;
    return word_of(words, 0, &told->word) < 0 ? -1 : word_of(words, 1, &told->tag);
}

void release_told(Told *told)
{
    PyBuffer_Release(&told->word);
    PyBuffer_Release(&told->tag);
}

int is_asked(const Told *told)
{
    return told->tag.obj && *(const uint64_t *)told->tag.buf;
}

/* Before this all of it must be written, past the caches or not. */
void tell_ready(Told *told, int64_t nbytes)
{
    uint64_t tag = *(const uint64_t *)told->tag.buf;
    atomic_store_explicit((_Atomic uint64_t *)told->word.buf, tag + (uint64_t)nbytes, memory_order_release);
}
