/* unisono.transports._mpi_page.Page: sums over the ranks of one host, through a page of memory that they share.
 *
 * Each rank has two places, used in turn, of a cache line each. It writes its words there, and then the number of the
 * sum. Nobody comes to a sum before all have been through the one before the last, so two are enough. */
#include "compiled.h"

PyTypeObject *PageType;

enum { LINE = 64, WORDS = 3 };

typedef struct {
    _Atomic uint64_t number, words[WORDS];
} Place;

static Place *place(const Page *page, int rank, unsigned long long number)
{
    return (Place *)((char *)page->memory.buf + LINE * (2 * (size_t)rank + (number & 1)));
}

static void page_put(Page *page, const uint64_t words[3])
{
    Place *mine = place(page, page->rank, ++page->number);
    page->awaited = 1;
    for (int n = 0; n < WORDS; n++)
        atomic_store_explicit(&mine->words[n], words[n], memory_order_relaxed);
    atomic_store_explicit(&mine->number, page->number, memory_order_release);
}

/* Whether all ranks have put theirs, and then their sums. */
static int page_all(Page *page, uint64_t sums[3])
{
    memset(sums, 0, WORDS * sizeof *sums);
    for (int rank = 0; rank < page->size; rank++) {
        Place *other = place(page, rank, page->number);
        if (atomic_load_explicit(&other->number, memory_order_acquire) != page->number)
            return 0;
        for (int n = 0; n < WORDS; n++)
            sums[n] += atomic_load_explicit(&other->words[n], memory_order_relaxed);
    }
    page->awaited = 0;
    return 1;
}

/* Put this rank's words, and look for some time: whether all have put theirs, and the sums are these. */
int page_met(Page *page, const uint64_t words[3], const uint64_t wanted[3])
{
    uint64_t sums[WORDS];
    page_put(page, words);
    for (int look = 0; look < page->looks; look++) {
        if (page_all(page, sums))
            return !memcmp(sums, wanted, sizeof sums);
        relax();
    }
    return 0;
}

static int init(Page *self, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"memory", "words", "rank", "size", "looks", NULL};
    if (self->memory.obj) {
        PyErr_SetString(PyExc_RuntimeError, "a Page is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "w*w*iii", names, &self->memory, &self->words, &self->rank,
                                     &self->size, &self->looks))
        return -1;
    if (self->rank < 0 || self->rank >= self->size || self->memory.len < (Py_ssize_t)LINE * 2 * self->size ||
        self->words.len != WORDS * (Py_ssize_t)sizeof(uint64_t) || (uintptr_t)self->memory.buf % LINE) {
        PyErr_SetString(PyExc_ValueError, "a Page needs 128 bytes for each rank, and three words");
        PyBuffer_Release(&self->memory);
        PyBuffer_Release(&self->words);
        return -1;
    }
    return 0;
}

/* Whether there is memory; there is none before `__init__`, or where that failed. */
int page_made(const Page *page)
{
    if (!page->memory.obj)
        PyErr_SetString(PyExc_RuntimeError, "a Page without memory");
    return page->memory.obj != NULL;
}

static PyObject *start(Page *self, PyObject *unused)
{
    uint64_t words[WORDS];
    if (!page_made(self))
        return NULL;
    if (self->awaited) {
        /* Others may go on by that one, and would be met by nobody. */
        PyErr_SetString(PyExc_RuntimeError, "an error has ended the wait for the sum before this one");
        return NULL;
    }
    memcpy(words, self->words.buf, sizeof words);
    page_put(self, words);
    Py_RETURN_NONE;
}

static PyObject *test(Page *self, PyObject *unused)
{
    uint64_t sums[WORDS];
    if (!page_made(self))
        return NULL;
    if (!page_all(self, sums))
        Py_RETURN_FALSE;
    memcpy(self->words.buf, sums, sizeof sums);
    Py_RETURN_TRUE;
}

static void dealloc(Page *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->memory.obj)
        PyBuffer_Release(&self->memory);
    if (self->words.obj)
        PyBuffer_Release(&self->words);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"number", T_ULONGLONG, offsetof(Page, number), READONLY, NULL},
    {NULL},
};
static PyMethodDef methods[] = {
    {"start", (PyCFunction)start, METH_NOARGS, NULL},
    {"test", (PyCFunction)test, METH_NOARGS, NULL},
    {NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_init, init}, {Py_tp_members, members}, {Py_tp_methods, methods}, {Py_tp_dealloc, dealloc}, {0, NULL},
};
PyType_Spec page_spec = {"unisono._compiled.Page", sizeof(Page), 0, Py_TPFLAGS_DEFAULT, slots};
