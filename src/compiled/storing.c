/* unisono.transports: memory that one rank writes and others read.
 *
 * Lines that another rank has read are slow to write where its core shares no cache with this one: ten times as slow as
 * past the caches, straight to memory. Where the cores do share one, that way costs the readers more than it saves. Which it
 * is nobody tells, and it changes as ranks move from core to core. So each rank times its stores. */
#include "storing.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

PyTypeObject *StoringType;

/* Shorter ones are plain, and not timed. */
enum { TIMED = 1 << 12 };
/* By so much plain stores are slower where no cache is shared; and so seldom the way that seems slower is tried, once it was
 * tried at the 1st, 2nd, 4th, 8th ... */
enum { SLOWER = 3, SELDOM = 256 };
/* What takes as long as a copy of this lets other threads run. */
enum { LONG = 1 << 16 };
/* Of each row, so many bytes are summed before more are: they stay in the nearest cache. */
enum { BLOCK = 1 << 12 };

void store_past(char *to, const char *from, int64_t nbytes)
{
#ifdef __SSE2__
    int64_t ahead = -(uintptr_t)to & 15;
    if (ahead > nbytes)
        ahead = nbytes;
    memcpy(to, from, (size_t)ahead);
    to += ahead, from += ahead, nbytes -= ahead;
    for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    /* Before anything that tells others. */
    _mm_sfence();
#endif
    memcpy(to, from, (size_t)nbytes);
}

static int past_is_better(const Storing *storing)
{
    return storing->plain_s > SLOWER * storing->past_s;
}

void store(Storing *storing, char *to, const char *from, int64_t nbytes)
{
    if (nbytes < TIMED) {
        if (nbytes)
            memcpy(to, from, (size_t)nbytes);
        return;
    }
    unsigned count = ++storing->count;
    int seldom = !(count % SELDOM) || !(count & (count - 1)), past = past_is_better(storing) != seldom;
    double *kept = past ? &storing->past_s : &storing->plain_s, began = monotonic();
    if (past)
        store_past(to, from, nbytes);
    else
        memcpy(to, from, (size_t)nbytes);
    double each = (monotonic() - began) / (double)nbytes;
    /* A single one that is slow may have been interrupted. */
    *kept = *kept && each > 2 * *kept ? 2 * *kept : each;
}

/* The sum of some rows in their order, two at a time, from one place on. */
#define SUM(name, real)                                                                                            \
    typedef real name##_lane __attribute__((vector_size(16), aligned(sizeof(real)), may_alias));                   \
    typedef real name##_one __attribute__((may_alias));                                                            \
    static void name(const char *const *rows, int64_t count, int64_t at, int64_t nbytes, char *sum)                \
    {                                                                                                              \
        const char *low = rows[0] + at;                                                                            \
        for (int64_t row = 1; row < count; row++, low = sum) {                                                     \
            const char *high = rows[row] + at;                                                                     \
            int64_t n = 0;                                                                                         \
            for (; n + 16 <= nbytes; n += 16)                                                                      \
                *(name##_lane *)(sum + n) = *(const name##_lane *)(low + n) + *(const name##_lane *)(high + n);    \
            for (; n < nbytes; n += (int64_t)sizeof(real))                                                         \
                *(name##_one *)(sum + n) = *(const name##_one *)(low + n) + *(const name##_one *)(high + n);       \
        }                                                                                                          \
    }

SUM(floats, float)
SUM(doubles, double)

/* Of two rows or more, in their order, to one place of this rank's own and to one that others read; either may be NULL, and
 * may be one of the rows. */
void sum_stored(const Storing *storing, const char *const *rows, int64_t count, char *into, char *shown, int64_t nbytes,
                int width)
{
    char block[BLOCK] __attribute__((aligned(64)));
    int past = past_is_better(storing);
    for (int64_t at = 0; at < nbytes; at += BLOCK) {
        int64_t length = nbytes - at < BLOCK ? nbytes - at : BLOCK;
        (width == sizeof(float) ? floats : doubles)(rows, count, at, length, block);
        if (into)
            memcpy(into + at, block, (size_t)length);
        if (shown && past)
            store_past(shown + at, block, length);
        else if (shown)
            memcpy(shown + at, block, (size_t)length);
    }
}

/* to, from, bytes */
static PyObject *store_here(Storing *self, PyObject *arguments)
{
    unsigned long long to, from;
    long long nbytes;
    if (!PyArg_ParseTuple(arguments, "KKL", &to, &from, &nbytes))
        return NULL;
    if (nbytes < 0) {
        PyErr_SetString(PyExc_ValueError, "store() takes two addresses, and how many bytes");
        return NULL;
    }
    PyThreadState *thread = nbytes >= LONG ? PyEval_SaveThread() : NULL;
    store(self, (char *)(uintptr_t)to, (const char *)(uintptr_t)from, nbytes);
    if (thread)
        PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

/* a tuple of addresses, address or 0, address or 0, bytes of each, bytes of an element */
static PyObject *sum_here(Storing *self, PyObject *arguments)
{
    PyObject *given;
    unsigned long long into, shown;
    long long nbytes, width;
    if (!PyArg_ParseTuple(arguments, "O!KKLL", &PyTuple_Type, &given, &into, &shown, &nbytes, &width))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(given);
    if (count < 2 || (width != 4 && width != 8) || nbytes < 0 || nbytes % width) {
        PyErr_SetString(PyExc_ValueError, "sum() takes two rows of floats or doubles, or more");
        return NULL;
    }
    const char **rows = PyMem_Calloc((size_t)count, sizeof *rows);
    if (!rows)
        return PyErr_NoMemory();
    for (Py_ssize_t n = 0; n < count; n++)
        rows[n] = (const char *)(uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(given, n));
    if (!PyErr_Occurred()) {
        PyThreadState *thread = count * nbytes >= LONG ? PyEval_SaveThread() : NULL;
        sum_stored(self, rows, count, (char *)(uintptr_t)into, (char *)(uintptr_t)shown, nbytes, (int)width);
        if (thread)
            PyEval_RestoreThread(thread);
    }
    PyMem_Free(rows);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* To an address, from one, so many bytes. */
typedef struct {
    int64_t to, from, nbytes;
} Piece;

/* pieces, as bytes */
static PyObject *move(Storing *self, PyObject *given, int laid)
{
    if (!PyBytes_Check(given) || PyBytes_GET_SIZE(given) % (Py_ssize_t)sizeof(Piece)) {
        PyErr_SetString(PyExc_TypeError, "pieces are three numbers each");
        return NULL;
    }
    const Piece *pieces = (const Piece *)PyBytes_AS_STRING(given);
    size_t count = (size_t)PyBytes_GET_SIZE(given) / sizeof(Piece);
    int64_t nbytes = 0;
    for (size_t n = 0; n < count; n++)
        nbytes += pieces[n].nbytes;
    PyThreadState *thread = nbytes >= LONG ? PyEval_SaveThread() : NULL;
    for (size_t n = 0; n < count; n++) {
        char *to = (char *)pieces[n].to;
        const char *from = (const char *)pieces[n].from;
        if (laid)
            store(self, to, from, pieces[n].nbytes);
        else if (pieces[n].nbytes)
            memmove(to, from, (size_t)pieces[n].nbytes);
    }
    if (thread)
        PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

/* For others to read. */
static PyObject *lay(Storing *self, PyObject *pieces)
{
    return move(self, pieces, 1);
}

/* What others laid. */
static PyObject *take(Storing *self, PyObject *pieces)
{
    return move(self, pieces, 0);
}

static PyMemberDef members[] = {
    {"plain_s", T_DOUBLE, offsetof(Storing, plain_s), 0, NULL},
    {"past_s", T_DOUBLE, offsetof(Storing, past_s), 0, NULL},
    {"count", T_UINT, offsetof(Storing, count), 0, NULL},
    {NULL},
};
static PyMethodDef methods[] = {
    {"store", (PyCFunction)store_here, METH_VARARGS, NULL},
    {"sum", (PyCFunction)sum_here, METH_VARARGS, NULL},
    {"lay", (PyCFunction)lay, METH_O, NULL},
    {"take", (PyCFunction)take, METH_O, NULL},
    {NULL},
};
static PyType_Slot slots[] = {{Py_tp_members, members}, {Py_tp_methods, methods}, {0, NULL}};
static PyType_Spec spec = {"unisono._compiled.Storing", sizeof(Storing), 0, Py_TPFLAGS_DEFAULT, slots};

int add_storing(PyObject *module)
{
    return add_type(module, &spec, &StoringType);
}
