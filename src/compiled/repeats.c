/* unisono.transports._again.Repeats: calls that are made again with the same tensors. */
#include "repeats.h"

static PyObject *s_anew, *s_unlike, *s_reach, *s_explained, *s_divided, *s_lock, *s_acquire,
    *s_release;

/* Acquire or release a lock, if there is one. */
static int turn(PyObject *lock, PyObject *method)
{
    if (lock == Py_None)
        return 0;
    PyObject *turned = PyObject_CallMethodNoArgs(lock, method);
    Py_XDECREF(turned);
    return turned ? 0 : -1;
}

/* 1 if all ranks have come to the same call in the same way; 0 if `_unlike` has to see to it; -1 with an error. */
static int agree(Repeats *self, const Entry *entry, PyObject *deadline)
{
    PyObject *reached = PyObject_CallMethodObjArgs(self->agreement, s_reach, entry->said, deadline, NULL);
    Py_XDECREF(reached);
    return reached ? reached == Py_True : -1;
}

/* The error that is under way becomes what it means. */
static void explain(Repeats *self)
{
    PyObject *error = raised(), *told = PyObject_CallMethodOneArg((PyObject *)self, s_explained, error);
    raise_told(error, told);
}

static int begin(Repeats *self, const Entry *entry, PyObject *deadline)
{
    Guarded *comms = (Guarded *)Py_NewRef(self->comms);
    comms->deadline = PyFloat_AsDouble(deadline);
    int over = -1;
    if (!PyErr_Occurred() && turn(self->lock, s_acquire) == 0) {
        PyObject *done = PyObject_Call(entry->begin, entry->arguments, NULL);
        PyObject *error = done ? NULL : raised();
        if (turn(self->lock, s_release) < 0) {
            raise_after(error);
        } else if (error) {
            raise_again(error);
            explain(self);
        } else {
            over = 0;
        }
        Py_XDECREF(done);
    }
    comms->deadline = 0.0;
    Py_DECREF(comms);
    return over;
}

/* name, target, source, op, root, deadline */
static PyObject *call(Repeats *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 6) {
        PyErr_Format(PyExc_TypeError, "call() takes 6 arguments, not %zd", count);
        return NULL;
    }
    PyObject *again[] = {(PyObject *)self, given[0], given[1], given[2], given[3], given[4], given[5]};
    Entry *entry = find(self, given);
    PyObject *done = NULL;
    if (!entry)
        return PyObject_VectorcallMethod(s_anew, again, 7, NULL);
    if (!self->comms) {
        PyErr_SetString(PyExc_RuntimeError, "__init__() was not called");
        return NULL;
    }
    /* Another may take its place while this looks, or waits. */
    entry->holders++;
    int found = same(&entry->target, given[1]), alike = found == 1 ? same(&entry->source, given[2]) : found;
    if (alike != 1) {
        drop(entry);
        return alike < 0 ? NULL : PyObject_VectorcallMethod(s_anew, again, 7, NULL);
    }
    alike = agree(self, entry, given[5]);
    if (alike == 1) {
        PyObject *broken = ((Guarded *)self->comms)->broken;
        if (broken && broken != Py_None)
            PyErr_SetObject((PyObject *)Py_TYPE(broken), broken);
        else if (entry->begin == Py_None || begin(self, entry, given[5]) == 0)
            done = entry->divisor ? PyObject_CallMethodObjArgs((PyObject *)self, s_divided, given[1], NULL)
                                  : Py_NewRef(Py_True);
    } else if (alike == 0) {
        done = PyObject_VectorcallMethod(s_unlike, again, 7, NULL);
    }
    drop(entry);
    return done;
}

static int init(Repeats *self, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"agreement", "comms", NULL};
    PyObject *agreement, *comms;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "OO", names, &agreement, &comms))
        return -1;
    if (!PyObject_TypeCheck(comms, GuardedType)) {
        PyErr_SetString(PyExc_TypeError, "communicators are Guarded");
        return -1;
    }
    Py_XSETREF(self->agreement, Py_NewRef(agreement));
    Py_XSETREF(self->comms, Py_NewRef(comms));
    PyObject *lock = PyObject_GetAttr(comms, s_lock);
    if (!lock)
        return -1;
    Py_XSETREF(self->lock, lock);
    return 0;
}

static int each(Repeats *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->agreement);
    Py_VISIT(self->comms);
    Py_VISIT(self->lock);
    for (int n = 0; n < ENTRIES; n++)
        if (self->entries[n]) {
            Py_VISIT(self->entries[n]->begin);
            Py_VISIT(self->entries[n]->arguments);
        }
    return 0;
}

static int clear(Repeats *self)
{
    Py_CLEAR(self->agreement);
    Py_CLEAR(self->comms);
    Py_CLEAR(self->lock);
    for (int n = 0; n < ENTRIES; n++) {
        Entry *entry = self->entries[n];
        self->entries[n] = NULL;
        drop(entry);
    }
    return 0;
}

static void dealloc(Repeats *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, NULL},
    {"remember", (PyCFunction)(void (*)(void))remember, METH_FASTCALL, NULL},
    {NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_init, init}, {Py_tp_methods, methods}, {Py_tp_traverse, each}, {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc}, {0, NULL},
};
static PyType_Spec spec = {
    "unisono._compiled.Repeats", sizeof(Repeats), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots,
};

int add_repeats(PyObject *module)
{
    static PyTypeObject *type;
    static const struct {
        PyObject **place;
        const char *name;
    } names[] = {
        {&s_anew, "_anew"}, {&s_unlike, "_unlike"}, {&s_explained, "_explained"}, {&s_divided, "_divided"},
        {&s_reach, "reach"}, {&s_lock, "lock"},
        {&s_acquire, "acquire"}, {&s_release, "release"},
    };
    for (size_t n = 0; n < sizeof names / sizeof *names; n++)
        if (!(*names[n].place = PyUnicode_InternFromString(names[n].name)))
            return -1;
    return prepare_seeing() < 0 ? -1 : add_type(module, &spec, &type);
}
