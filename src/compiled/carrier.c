/* unisono.transports._mpi_carrier.Carrier: the messages of one tensor to or from one rank. */
#include "seen.h"

static PyTypeObject *CarrierType;

/* Of the header, which is little-endian: the number of elements, that of the message, and the name of the dtype. */
enum { NUMBER_AT = 8, NAME_AT = 16, HEADER = 40 };

typedef struct {
    PyObject_HEAD
    PyObject *lock, *begin, *envelope, *first, *header, *rest, *peer, *numbers;
    Seen seen;
    Py_ssize_t nbytes;
    long long most;
    int receives, looks;
    char busy;
} Carrier;

static PyObject *s_test, *s_see_through, *s_unfit, *s_ended, *s_acquire, *s_release;

/* Acquire or release a lock, if there is one. */
int turn(PyObject *lock, PyObject *method)
{
    if (lock == Py_None)
        return 0;
    PyObject *turned = PyObject_CallMethodNoArgs(lock, method);
    Py_XDECREF(turned);
    return turned ? 0 : -1;
}

/* With the lock held, call a method, or a function with arguments. Also with an error, something may be found. */
static int locked(Carrier *self, PyObject *called, PyObject *method, PyObject *arguments, PyObject **found)
{
    if (turn(self->lock, s_acquire) < 0)
        return -1;
    *found = method ? PyObject_CallMethodNoArgs(called, method) : PyObject_Call(called, arguments, NULL);
    PyObject *error = *found ? NULL : raised();
    if (turn(self->lock, s_release) < 0) {
        raise_after(error);
        return -1;
    }
    if (error)
        raise_again(error);
    return *found ? 0 : -1;
}

/* Signals and other threads may have changed the tensor in a wait. Its old memory may be another's by now. */
static int look(Carrier *self, PyObject *tensor)
{
    int alike = self->nbytes ? same(&self->seen, tensor) : 1;
    if (!alike)
        PyErr_SetString(PyExc_RuntimeError, "the tensor of a message was changed while the message was under way");
    return alike == 1 ? 0 : -1;
}

static int finish(Carrier *self, PyObject *request, PyObject *tensor, PyObject *deadline)
{
    for (int look = 0; look < self->looks; look++) {
        PyObject *told = NULL;
        int over = locked(self, request, s_test, NULL, &told) < 0 ? -1 : PyObject_IsTrue(told);
        Py_XDECREF(told);
        if (over)
            return over < 0 ? -1 : 0;
    }
    PyObject *seen = PyObject_CallMethodObjArgs((PyObject *)self, s_see_through, request, tensor, deadline, NULL);
    Py_XDECREF(seen);
    return seen ? 0 : -1;
}

static int start_rest(Carrier *self, long long number, PyObject **request)
{
    PyObject *arguments = Py_BuildValue("(OOL)", self->rest, self->peer, 2 * number + 1);
    int begun = arguments ? locked(self, self->begin, NULL, arguments, request) : -1;
    Py_XDECREF(arguments);
    return begun;
}

static int send(Carrier *self, PyObject **under_way, PyObject *tensor, PyObject *deadline)
{
    char *envelope = PyByteArray_AS_STRING(self->envelope);
    int64_t number = 0;
    if (look(self, tensor) < 0)
        return -1;
    if (self->rest == Py_None) {
        memcpy(envelope + HEADER, self->seen.one.address, (size_t)self->nbytes);
    } else {
        PyObject *next = PyIter_Next(self->numbers);
        number = next ? PyLong_AsLongLong(next) : -1;
        Py_XDECREF(next);
        if (number < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_RuntimeError, "there are no more numbers");
            return -1;
        }
        number %= self->most;
        memcpy(envelope + NUMBER_AT, &number, sizeof number);
    }
    if (locked(self, self->begin, NULL, self->first, &under_way[0]) < 0)
        return -1;
    if (self->rest != Py_None && start_rest(self, number, &under_way[1]) < 0)
        return -1;
    if (finish(self, under_way[0], tensor, deadline) < 0)
        return -1;
    return under_way[1] ? finish(self, under_way[1], tensor, deadline) : 0;
}

static int receive(Carrier *self, PyObject **under_way, PyObject *tensor, PyObject *deadline)
{
    if (locked(self, self->begin, NULL, self->first, &under_way[0]) < 0)
        return -1;
    if (finish(self, under_way[0], tensor, deadline) < 0)
        return -1;
    const char *envelope = PyByteArray_AS_STRING(self->envelope), *header = PyBytes_AS_STRING(self->header);
    if (memcmp(envelope, header, NUMBER_AT) || memcmp(envelope + NAME_AT, header + NAME_AT, HEADER - NAME_AT)) {
        PyObject *unfit = PyObject_CallMethodOneArg((PyObject *)self, s_unfit, tensor);
        Py_XDECREF(unfit);
        if (unfit)
            PyErr_SetString(PyExc_RuntimeError, "a message that does not fit");
        return -1;
    }
    if (look(self, tensor) < 0)
        return -1;
    if (self->rest == Py_None) {
        memcpy(self->seen.one.address, envelope + HEADER, (size_t)self->nbytes);
        return 0;
    }
    int64_t number;
    memcpy(&number, envelope + NUMBER_AT, sizeof number);
    return start_rest(self, number, &under_way[1]) < 0 ? -1 : finish(self, under_way[1], tensor, deadline);
}

/* The error that is under way becomes what it means. What is under way may still touch the tensor's memory. */
static void ended(Carrier *self, PyObject **under_way, PyObject *tensor)
{
    PyObject *error = raised(), *list = PyList_New(0), *told = NULL;
    int put = list ? 0 : -1;
    for (int n = 0; n < 2 && put == 0; n++)
        if (under_way[n])
            put = PyList_Append(list, under_way[n]);
    if (put == 0)
        told = PyObject_CallMethodObjArgs((PyObject *)self, s_ended, error, list, tensor, NULL);
    Py_XDECREF(list);
    raise_told(error, told);
}

/* tensor, deadline */
static PyObject *carry(Carrier *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_Format(PyExc_TypeError, "carry() takes 2 arguments, not %zd", count);
        return NULL;
    }
    if (!self->begin || !self->busy) {
        PyErr_SetString(PyExc_RuntimeError, self->begin ? "nobody has taken it" : "__init__() was not called");
        return NULL;
    }
    PyObject *under_way[2] = {NULL, NULL};
    int over = self->receives ? receive(self, under_way, given[0], given[1]) : send(self, under_way, given[0], given[1]);
    if (over < 0)
        ended(self, under_way, given[0]);
    else
        self->busy = 0;
    Py_XDECREF(under_way[0]);
    Py_XDECREF(under_way[1]);
    return over < 0 ? NULL : Py_NewRef(Py_None);
}

/* Whether it is one of these, and was free, and is the caller's now. */
int take_carrier(PyObject *carrier)
{
    if (!PyObject_TypeCheck(carrier, CarrierType) || ((Carrier *)carrier)->busy)
        return 0;
    return ((Carrier *)carrier)->busy = 1;
}

static PyObject *take(Carrier *self, PyObject *unused)
{
    return PyBool_FromLong(take_carrier((PyObject *)self));
}

static int init(Carrier *self, PyObject *arguments, PyObject *named)
{
    PyObject *lock, *begin, *envelope, *first, *header, *tensor, *rest, *peer, *numbers;
    Py_ssize_t nbytes;
    long long most;
    int receives, looks;
    if (self->begin) {
        PyErr_SetString(PyExc_RuntimeError, "a Carrier is made once");
        return -1;
    }
    if (!PyArg_ParseTuple(arguments, "OOO!O!O!OnOOOLpi", &lock, &begin, &PyByteArray_Type, &envelope, &PyTuple_Type, &first,
                          &PyBytes_Type, &header, &tensor, &nbytes, &rest, &peer, &numbers, &most, &receives, &looks))
        return -1;
    Py_ssize_t inside = rest == Py_None ? nbytes : 0;
    if (PyBytes_GET_SIZE(header) != HEADER || nbytes < 0 || PyByteArray_GET_SIZE(envelope) < HEADER + inside || most < 1 ||
        !PyIter_Check(numbers)) {
        PyErr_SetString(PyExc_ValueError, "an envelope holds a header of 40 bytes, and what does not follow by itself");
        return -1;
    }
    if (see(&self->seen, tensor) < 0)
        return -1;
    self->lock = Py_NewRef(lock);
    self->envelope = Py_NewRef(envelope);
    self->first = Py_NewRef(first);
    self->header = Py_NewRef(header);
    self->rest = Py_NewRef(rest);
    self->peer = Py_NewRef(peer);
    self->numbers = Py_NewRef(numbers);
    self->nbytes = nbytes;
    self->most = most;
    self->receives = receives;
    self->looks = looks;
    self->busy = 1;
    self->begin = Py_NewRef(begin);
    return 0;
}

static int each(Carrier *self, visitproc visit, void *arg)
{
    PyObject *held[] = {self->lock, self->begin, self->envelope, self->first, self->header, self->rest, self->peer, self->numbers};
    Py_VISIT(Py_TYPE(self));
    for (size_t n = 0; n < sizeof held / sizeof *held; n++)
        Py_VISIT(held[n]);
    return 0;
}

static int clear(Carrier *self)
{
    PyObject **held[] = {&self->begin,  &self->lock, &self->envelope, &self->first,
                         &self->header, &self->rest, &self->peer,     &self->numbers};
    for (size_t n = 0; n < sizeof held / sizeof *held; n++)
        Py_CLEAR(*held[n]);
    unsee(&self->seen);
    return 0;
}

static void dealloc(Carrier *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {{"busy", T_BOOL, offsetof(Carrier, busy), READONLY, NULL}, {NULL}};
static PyMethodDef methods[] = {
    {"carry", (PyCFunction)(void (*)(void))carry, METH_FASTCALL, NULL},
    {"take", (PyCFunction)take, METH_NOARGS, NULL},
    {NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_init, init}, {Py_tp_members, members}, {Py_tp_methods, methods}, {Py_tp_traverse, each}, {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc}, {0, NULL},
};
static PyType_Spec spec = {
    "unisono._compiled.Carrier", sizeof(Carrier), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots,
};

int add_carrier(PyObject *module)
{
    s_test = PyUnicode_InternFromString("Test");
    s_see_through = PyUnicode_InternFromString("_see_through");
    s_unfit = PyUnicode_InternFromString("_unfit");
    s_ended = PyUnicode_InternFromString("_ended");
    s_acquire = PyUnicode_InternFromString("acquire");
    s_release = PyUnicode_InternFromString("release");
    if (!s_test || !s_see_through || !s_unfit || !s_ended || !s_acquire || !s_release)
        return -1;
    return add_type(module, &spec, &CarrierType);
}
