/* unisono.transports._guarded.Guarded: whether MPI may still be called, and until when it may take. */
#include "compiled.h"

PyTypeObject *GuardedType;

static PyObject *get_deadline(Guarded *self, void *closure)
{
    if (self->deadline == 0.0)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(self->deadline);
}

static int set_deadline(Guarded *self, PyObject *value, void *closure)
{
    double deadline = value && value != Py_None ? PyFloat_AsDouble(value) : 0.0;
    if (deadline == -1.0 && PyErr_Occurred())
        return -1;
    self->deadline = deadline;
    return 0;
}

static int each(Guarded *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->broken);
    return 0;
}

static int clear(Guarded *self)
{
    Py_CLEAR(self->broken);
    return 0;
}

static void dealloc(Guarded *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {{"broken", T_OBJECT, offsetof(Guarded, broken), 0, NULL}, {NULL}};
static PyGetSetDef getters[] = {{"deadline", (getter)get_deadline, (setter)set_deadline, NULL, NULL}, {NULL}};
static PyType_Slot slots[] = {
    {Py_tp_members, members}, {Py_tp_getset, getters}, {Py_tp_traverse, each}, {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc}, {0, NULL},
};
PyType_Spec guarded_spec = {
    "unisono._compiled.Guarded", sizeof(Guarded), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots,
};
