/* unisono.gradients.filling.Filling: which gradients of a bucket have come. Those that lie as their places do are copied
 * (copies.c), and taken off their parameters; the rest is left to torch. */
#include "filling.h"

/* Gradients that need no torch are taken when so much has come: where they were is used again, and still in the cache. */
enum { CHUNK = 1 << 16 };

PyTypeObject *FillingType;
static PyObject *s_grad, *s_nbytes, *s_take_by_torch, *s_add;

/* 1 if a gradient was taken or there is none, 0 if it is left to torch. */
static int take_one(Filling *self, Py_ssize_t slot)
{
    PyObject *parameter = PyTuple_GET_ITEM(self->parameters, slot);
    PyObject *gradient = PyObject_GetAttr(parameter, s_grad);
    if (!gradient || gradient == Py_None) {
        Py_XDECREF(gradient);
        return gradient ? 1 : -1;
    }
    int done = copied(PyTuple_GET_ITEM(self->places, slot), gradient, self->past, self->low, self->high);
    if (PyErr_Occurred())
        done = -1;
    if (done > 0) {
        /* What comes now comes alone, and is added. */
        inside(self)[slot] = 1;
        if (PyObject_SetAttr(parameter, s_grad, Py_None) < 0)
            done = -1;
    }
    /* Not before: who is told that it goes may look at the parameter. */
    Py_DECREF(gradient);
    return done;
}

/* Take those that need no torch, and let torch take the rest. */
static int take_all(Filling *self, PyObject *slots)
{
    PyObject *left = self->plain ? PyList_New(0) : Py_NewRef(slots);
    self->waiting = 0;
    self->waiting_bytes = 0;
    for (Py_ssize_t n = 0; left && self->plain && n < PyList_GET_SIZE(slots); n++) {
        PyObject *item = Py_NewRef(PyList_GET_ITEM(slots, n));
        Py_ssize_t slot = PyLong_AsSsize_t(item);
        int found = -1;
        if (slot >= 0 && slot < self->count)
            found = take_one(self, slot);
        else if (!PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "there is no such slot");
        if (found < 0 || (!found && PyList_Append(left, item) < 0))
            Py_CLEAR(left);
        Py_DECREF(item);
    }
    PyObject *done = NULL;
    if (left)
        done = PyList_GET_SIZE(left) ? PyObject_CallMethodOneArg((PyObject *)self, s_take_by_torch, left) : Py_NewRef(Py_None);
    Py_XDECREF(left);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int take_waiting(Filling *self)
{
    PyObject *slots = PyList_New(self->waiting);
    for (Py_ssize_t n = 0; slots && n < self->waiting; n++) {
        PyObject *slot = PyLong_FromSsize_t(self->slots[n]);
        if (slot)
            PyList_SET_ITEM(slots, n, slot);
        else
            Py_CLEAR(slots);
    }
    int found = slots ? take_all(self, slots) : -1;
    Py_XDECREF(slots);
    return found;
}

/* Whether the bucket is full now; -1 after an error. */
int filling_arrived(Filling *self, Py_ssize_t slot)
{
    if (self->started) {
        self->late = 1;
        return 0;
    }
    if (!came(self)[slot]) {
        came(self)[slot] = 1;
        self->missing--;
        self->slots[self->waiting++] = slot;
        self->waiting_bytes += self->nbytes[slot];
        if (self->waiting_bytes >= self->chunk && take_waiting(self) < 0)
            return -1;
    } else if (inside(self)[slot]) {
        PyObject *number = PyLong_FromSsize_t(slot);
        PyObject *added = number ? PyObject_CallMethodOneArg((PyObject *)self, s_add, number) : NULL;
        Py_XDECREF(number);
        Py_XDECREF(added);
        if (!added)
            return -1;
    }
    return !self->missing;
}

static int made(const Filling *self)
{
    if (!self->slots)
        PyErr_SetString(PyExc_RuntimeError, "nothing can be filled before __init__()");
    return self->slots != NULL;
}

static PyObject *arrived(Filling *self, PyObject *given)
{
    Py_ssize_t slot = PyLong_AsSsize_t(given);
    if ((slot == -1 && PyErr_Occurred()) || !made(self))
        return NULL;
    if (slot < 0 || slot >= self->count) {
        PyErr_SetString(PyExc_IndexError, "there is no such slot");
        return NULL;
    }
    int full = filling_arrived(self, slot);
    return full < 0 ? NULL : PyBool_FromLong(full);
}

static PyObject *take(Filling *self, PyObject *slots)
{
    if (!made(self))
        return NULL;
    if (!PyList_CheckExact(slots)) {
        PyErr_SetString(PyExc_TypeError, "take() takes a list of slots");
        return NULL;
    }
    if (take_all(self, slots) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *forget(Filling *self, PyObject *nothing)
{
    if (!made(self))
        return NULL;
    memset(came(self), 0, (size_t)self->count);
    memset(inside(self), 0, (size_t)self->count);
    self->missing = self->count;
    self->waiting = 0;
    self->waiting_bytes = 0;
    self->started = self->late = 0;
    Py_RETURN_NONE;
}

/* The number of bytes of each parameter, and where it notes what has come. */
static int measured(Filling *self, Py_ssize_t count)
{
    Py_buffer *flags[] = {&self->came, &self->inside};
    for (int n = 0; n < 2; n++) {
        PyObject *bytes = PyByteArray_FromStringAndSize(NULL, count);
        int found = bytes ? PyObject_GetBuffer(bytes, flags[n], PyBUF_WRITABLE) : -1;
        Py_XDECREF(bytes);
        if (found < 0)
            return -1;
    }
    self->nbytes = PyMem_Calloc((size_t)count + 1, sizeof *self->nbytes);
    self->slots = PyMem_Calloc((size_t)count + 1, sizeof *self->slots);
    if (!self->nbytes || !self->slots) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t n = 0; n < count; n++) {
        PyObject *nbytes = PyObject_GetAttr(PyTuple_GET_ITEM(self->parameters, n), s_nbytes);
        self->nbytes[n] = nbytes ? PyLong_AsLongLong(nbytes) : -1;
        Py_XDECREF(nbytes);
        if (PyErr_Occurred())
            return -1;
    }
    self->count = count;
    return 0;
}

static void unmake(Filling *self)
{
    Py_CLEAR(self->parameters);
    Py_CLEAR(self->places);
    PyBuffer_Release(&self->came);
    PyBuffer_Release(&self->inside);
    PyMem_Free(self->nbytes);
    PyMem_Free(self->slots);
    self->nbytes = NULL;
    self->slots = NULL;
    self->count = 0;
}

static int init(Filling *self, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"parameters", "places", "chunk", "plain", "past", "within", NULL};
    PyObject *parameters, *places;
    long long chunk;
    unsigned long long low = 0, high = 0;
    int plain, past;
    if (self->slots) {
        PyErr_SetString(PyExc_RuntimeError, "a Filling is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "O!O!Lpp|(KK)", names, &PyTuple_Type, &parameters, &PyTuple_Type, &places,
                                     &chunk, &plain, &past, &low, &high) ||
        prepare_copies() < 0)
        return -1;
    if (PyTuple_GET_SIZE(parameters) != PyTuple_GET_SIZE(places)) {
        PyErr_SetString(PyExc_ValueError, "each parameter has one place");
        return -1;
    }
    self->parameters = Py_NewRef(parameters);
    self->places = Py_NewRef(places);
    self->chunk = plain && chunk > CHUNK ? CHUNK : chunk;
    self->plain = (char)plain;
    self->past = (char)past;
    self->low = (uintptr_t)low;
    self->high = (uintptr_t)high;
    PyObject *done = NULL;
    if (measured(self, PyTuple_GET_SIZE(parameters)) == 0)
        done = forget(self, NULL);
    if (!done)
        unmake(self);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *get_came(Filling *self, void *closure)
{
    return made(self) ? Py_NewRef(self->came.obj) : NULL;
}

static PyObject *get_inside(Filling *self, void *closure)
{
    return made(self) ? Py_NewRef(self->inside.obj) : NULL;
}

static int each(Filling *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->parameters);
    Py_VISIT(self->places);
    return 0;
}

/* Of the tuples, those who made this know of no circle; it stays whole until it goes. */
static void dealloc(Filling *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    unmake(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"missing", T_PYSSIZET, offsetof(Filling, missing), READONLY, NULL},
    {"started", T_BOOL, offsetof(Filling, started), 0, NULL},
    {"late", T_BOOL, offsetof(Filling, late), 0, NULL},
    {NULL},
};
static PyGetSetDef getters[] = {
    {"came", (getter)get_came, NULL, NULL, NULL},
    {"inside", (getter)get_inside, NULL, NULL, NULL},
    {NULL},
};
static PyMethodDef methods[] = {
    {"arrived", (PyCFunction)arrived, METH_O, NULL},
    {"take", (PyCFunction)take, METH_O, NULL},
    {"forget", (PyCFunction)forget, METH_NOARGS, NULL},
    {NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_init, init}, {Py_tp_members, members}, {Py_tp_getset, getters}, {Py_tp_methods, methods},
    {Py_tp_traverse, each}, {Py_tp_dealloc, dealloc}, {0, NULL},
};
static PyType_Spec spec = {
    "unisono._compiled.Filling", sizeof(Filling), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots,
};

int add_filling(PyObject *module)
{
    s_grad = PyUnicode_InternFromString("grad");
    s_nbytes = PyUnicode_InternFromString("nbytes");
    s_take_by_torch = PyUnicode_InternFromString("take_by_torch");
    s_add = PyUnicode_InternFromString("add");
    if (!s_grad || !s_nbytes || !s_take_by_torch || !s_add)
        return -1;
    return add_type(module, &spec, &FillingType);
}
