/* unisono.transports._mpi_stages.Stages: what ranks of one host add up in memory that they share.
 *
 * Each rank has two stages there, used in turn, into which it lays its part of a tile but for its own share. When all
 * have, each sums its share, and when all have, it copies the others'. Who comes to the next tile has read this one's. */
#include "meeting.h"
#include "storing.h"

/* A sum over all ranks, in place: for one rank alone, or (-1) for all. */
typedef struct {
    int64_t address, nbytes, width, root;
} Sum;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    PyObject *meeting;
    Storing *storing;
    int64_t nbytes, tiles; /* of a stage; how many there were */
    const char **rows;
} Stages;

static char *stage(const Stages *self, int64_t rank)
{
    return (char *)self->memory.buf + self->nbytes * (2 * rank + (self->tiles & 1));
}

/* One of two ranks sums alone what is for it alone: nobody waits a second time. */
static int alone(const Stages *self, const Sum *sum)
{
    return sum->root >= 0 && page_of(self->meeting)->size == 2;
}

/* Where a rank's share of a tile begins. */
static int64_t edge(const Stages *self, const Sum *sum, int64_t rank, int64_t nbytes)
{
    int64_t size = page_of(self->meeting)->size;
    if (alone(self, sum))
        return rank <= sum->root ? 0 : nbytes;
    return rank == size ? nbytes : (nbytes * rank / size) & ~(int64_t)63;
}

static void take_shares(const Stages *self, const Sum *sum, char *tile, int64_t nbytes)
{
    for (int64_t other = 0; other < page_of(self->meeting)->size; other++) {
        int64_t from = edge(self, sum, other, nbytes), to = edge(self, sum, other + 1, nbytes);
        if (other != page_of(self->meeting)->rank)
            memcpy(tile + from, stage(self, other) + from, (size_t)(to - from));
    }
}

static int sum_tile(Stages *self, const Sum *sum, char *tile, int64_t nbytes)
{
    int64_t rank = page_of(self->meeting)->rank, size = page_of(self->meeting)->size;
    int64_t low = edge(self, sum, rank, nbytes), high = edge(self, sum, rank + 1, nbytes);
    int gets = sum->root < 0 || sum->root == rank;
    self->tiles++;
    PyThreadState *thread = PyEval_SaveThread();
    store(self->storing, stage(self, rank), tile, low);
    store(self->storing, stage(self, rank) + high, tile + high, nbytes - high);
    PyEval_RestoreThread(thread);
    if (meet((Meeting *)self->meeting) < 0)
        return -1;
    thread = PyEval_SaveThread();
    for (int64_t other = 0; other < size; other++)
        self->rows[other] = other == rank ? tile + low : stage(self, other) + low;
    sum_stored(self->storing, self->rows, size, gets ? tile + low : NULL, alone(self, sum) ? NULL : stage(self, rank) + low,
               high - low, (int)sum->width);
    PyEval_RestoreThread(thread);
    if (alone(self, sum))
        return 0;
    if (meet((Meeting *)self->meeting) < 0)
        return -1;
    if (gets) {
        thread = PyEval_SaveThread();
        take_shares(self, sum, tile, nbytes);
        PyEval_RestoreThread(thread);
    }
    return 0;
}

/* a sum, as bytes */
static PyObject *add(Stages *self, PyObject *given)
{
    const Sum *sum = PyBytes_Check(given) ? (const Sum *)PyBytes_AS_STRING(given) : NULL;
    if (!sum || PyBytes_GET_SIZE(given) != (Py_ssize_t)sizeof *sum || (sum->width != 4 && sum->width != 8) || sum->nbytes < 0 ||
        sum->nbytes % sum->width || sum->root < -1 || sum->root >= page_of(self->meeting)->size) {
        PyErr_SetString(PyExc_ValueError, "add() takes an address, how many bytes there are of floats or doubles, and a root");
        return NULL;
    }
    for (int64_t at = 0; at < sum->nbytes; at += self->nbytes) {
        int64_t rest = sum->nbytes - at;
        if (sum_tile(self, sum, (char *)sum->address + at, rest < self->nbytes ? rest : self->nbytes) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

/* memory, meeting, storing */
static PyObject *new(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"memory", "meeting", "storing", NULL};
    Py_buffer memory;
    PyObject *meeting, *storing;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "w*O!O!", names, &memory, MeetingType, &meeting, StoringType, &storing))
        return NULL;
    int64_t size = page_of(meeting)->size, nbytes = memory.len / (2 * size) & ~(int64_t)63;
    Stages *self = NULL;
    if (size < 2 || !nbytes || (uintptr_t)memory.buf % 64)
        PyErr_SetString(PyExc_ValueError, "Stages are of two ranks and more, and need 128 bytes for each");
    else
        self = (Stages *)type->tp_alloc(type, 0);
    if (self && !(self->rows = PyMem_Calloc((size_t)size, sizeof *self->rows))) {
        PyErr_NoMemory();
        Py_CLEAR(self);
    }
    if (!self) {
        PyBuffer_Release(&memory);
        return NULL;
    }
    self->memory = memory;
    self->nbytes = nbytes;
    self->meeting = Py_NewRef(meeting);
    self->storing = (Storing *)Py_NewRef(storing);
    return (PyObject *)self;
}

static int each(Stages *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->meeting);
    return 0;
}

static void dealloc(Stages *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->meeting);
    Py_CLEAR(self->storing);
    PyMem_Free(self->rows);
    PyBuffer_Release(&self->memory);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)add, METH_O, NULL},
    {NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, new}, {Py_tp_methods, methods}, {Py_tp_traverse, each}, {Py_tp_dealloc, dealloc}, {0, NULL},
};
static PyType_Spec spec = {
    "unisono._compiled.Stages", sizeof(Stages), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

int add_stages(PyObject *module)
{
    static PyTypeObject *type;
    return add_type(module, &spec, &type);
}
