/* unisono.transports._mpi_window: what ranks of one host take from each other's memory, by the kernel's own copy.
 *
 * Each rank has a line of addresses, one for each other rank. It writes there what that one may read, then the words of a
 * sum; when all have done so, it reads, and gives the words of a second sum: when all have given those, all have read. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "meeting.h"

#include <errno.h>
#include <sys/uio.h>

enum { SHOW, TAKE, COPY };
/* A copy as long as this lets other threads run. */
enum { LONG = 1 << 16 };

/* What another rank may read, or what is read from it; or of what this rank copies from itself. */
typedef struct {
    int64_t kind, rank, address, nbytes;
    int64_t source; /* of a copy */
} Piece;

typedef struct {
    PyObject_HEAD
    Py_buffer memory, pids;
    PyObject *meeting;
} Window;

/* Where `rank` shows to `other` what it may read. */
static int64_t *shown(const Window *self, int64_t rank, int64_t other)
{
    return (int64_t *)self->memory.buf + rank * page_of(self->meeting)->size + other;
}

static int take(const Window *self, const Piece *piece, int64_t address)
{
    pid_t pid = ((const int32_t *)self->pids.buf)[piece->rank];
    for (int64_t done = 0; done < piece->nbytes;) {
        struct iovec here = {(char *)piece->address + done, (size_t)(piece->nbytes - done)};
        struct iovec there = {(char *)address + done, (size_t)(piece->nbytes - done)};
        ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (got <= 0)
            return got < 0 ? errno : EFAULT;
        done += got;
    }
    return 0;
}

/* All of one kind; an error number if it cannot be. */
static int go(const Window *self, const Piece *pieces, size_t count, int kind)
{
    int wrong = 0;
    int64_t rank = page_of(self->meeting)->rank;
    for (size_t n = 0; n < count && !wrong; n++) {
        const Piece *piece = &pieces[n];
        if (piece->kind != kind)
            continue;
        if (kind == SHOW) {
            *shown(self, rank, piece->rank) = piece->address;
            continue;
        }
        int64_t address = kind == TAKE ? *shown(self, piece->rank, rank) : 0;
        PyThreadState *thread = piece->nbytes >= LONG ? PyEval_SaveThread() : NULL;
        if (kind == COPY)
            memcpy((void *)piece->address, (void *)piece->source, (size_t)piece->nbytes);
        else
            wrong = take(self, piece, address);
        if (thread)
            PyEval_RestoreThread(thread);
    }
    return wrong;
}

/* pieces */
static PyObject *move(Window *self, PyObject *given)
{
    if (!PyBytes_Check(given) || PyBytes_GET_SIZE(given) % (Py_ssize_t)sizeof(Piece)) {
        PyErr_SetString(PyExc_TypeError, "move() takes pieces");
        return NULL;
    }
    const Piece *pieces = (const Piece *)PyBytes_AS_STRING(given);
    size_t count = (size_t)PyBytes_GET_SIZE(given) / sizeof(Piece);
    go(self, pieces, count, SHOW);
    if (meet((Meeting *)self->meeting) < 0)
        return NULL;
    go(self, pieces, count, COPY);
    int wrong = go(self, pieces, count, TAKE);
    /* If a rank was lost, the others say so here. */
    if (meet((Meeting *)self->meeting) < 0)
        return NULL;
    if (wrong) {
        errno = wrong;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

/* rank, address, bytes: whether they could be read from there */
static PyObject *reads(Window *self, PyObject *arguments)
{
    long long rank, address;
    Py_buffer into;
    if (!PyArg_ParseTuple(arguments, "LLw*", &rank, &address, &into))
        return NULL;
    Piece piece = {TAKE, rank, (int64_t)into.buf, into.len, 0};
    int wrong = rank >= 0 && rank < page_of(self->meeting)->size ? take(self, &piece, address) : EINVAL;
    PyBuffer_Release(&into);
    return PyBool_FromLong(!wrong);
}

/* memory, pids, meeting */
static PyObject *new(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"memory", "pids", "meeting", NULL};
    Py_buffer memory, pids;
    PyObject *meeting;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "w*y*O!", names, &memory, &pids, MeetingType, &meeting))
        return NULL;
    Py_ssize_t size = page_of(meeting)->size;
    Window *self = NULL;
    if (pids.len < 4 * size || memory.len < 8 * size * size || (uintptr_t)memory.buf % 8)
        PyErr_SetString(PyExc_ValueError, "a Window needs 8 bytes for each pair of ranks, and their processes");
    else
        self = (Window *)type->tp_alloc(type, 0);
    if (!self) {
        PyBuffer_Release(&memory);
        PyBuffer_Release(&pids);
        return NULL;
    }
    self->memory = memory;
    self->pids = pids;
    self->meeting = Py_NewRef(meeting);
    return (PyObject *)self;
}

static int each(Window *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->meeting);
    return 0;
}

static void dealloc(Window *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->meeting);
    PyBuffer_Release(&self->memory);
    PyBuffer_Release(&self->pids);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"move", (PyCFunction)move, METH_O, NULL},
    {"reads", (PyCFunction)reads, METH_VARARGS, NULL},
    {NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, new}, {Py_tp_methods, methods}, {Py_tp_traverse, each}, {Py_tp_dealloc, dealloc}, {0, NULL},
};
static PyType_Spec spec = {
    "unisono._compiled.Window", sizeof(Window), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

int add_window(PyObject *module)
{
    static PyTypeObject *type;
    return add_type(module, &spec, &type);
}
