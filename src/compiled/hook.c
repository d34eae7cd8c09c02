/* unisono.gradients.hooks: a gradient has come. Hooks that torch calls in the backward pass whose number is known need to ask
 * nothing that could not be seen here. */
#include "filling.h"

static PyTypeObject *HookType, *RunningType;
static PyObject *current_pass;

/* Whose gradients may be noted without asking: those of the pass of this number; -1 if none's. */
typedef struct {
    PyObject_HEAD
    long number;
    PyObject *full;
} Running;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *slowly;
    Running *running;
    Filling *filling;
    Py_ssize_t slot;
} Hook;

/* Whether it can be noted without asking; -1 after an error. */
static int may_note(const Hook *self)
{
    if (!self->filling || self->running->number < 0)
        return 0;
    PyObject *found = PyObject_CallNoArgs(current_pass);
    long now = found ? PyLong_AsLong(found) : -1;
    Py_XDECREF(found);
    if (PyErr_Occurred())
        return -1;
    const char *came = self->filling->came.buf;
    return now == self->running->number && !self->filling->started && !came[self->slot];
}

static PyObject *called(PyObject *object, PyObject *const *given, size_t count, PyObject *names)
{
    const Hook *self = (Hook *)object;
    int may = may_note(self);
    if (may <= 0)
        return may < 0 ? NULL : PyObject_Vectorcall(self->slowly, given, count, names);
    int full = filling_arrived(self->filling, self->slot);
    if (full > 0)
        return PyObject_CallNoArgs(self->running->full);
    return full < 0 ? NULL : Py_NewRef(Py_None);
}

/* filling or None, slot: where the gradient belongs */
static PyObject *place(Hook *self, PyObject *arguments)
{
    PyObject *filling;
    Py_ssize_t slot;
    if (!PyArg_ParseTuple(arguments, "On", &filling, &slot))
        return NULL;
    if (filling == Py_None) {
        Py_CLEAR(self->filling);
        Py_RETURN_NONE;
    }
    if (!PyObject_TypeCheck(filling, FillingType) || slot < 0 || slot >= ((Filling *)filling)->count) {
        PyErr_SetString(PyExc_ValueError, "a gradient's place is a slot of a Filling, or None");
        return NULL;
    }
    Py_XSETREF(self->filling, (Filling *)Py_NewRef(filling));
    self->slot = slot;
    Py_RETURN_NONE;
}

static int find_current_pass(void)
{
    if (current_pass)
        return 0;
    PyObject *torch = PyImport_ImportModule("torch._C");
    current_pass = torch ? PyObject_GetAttrString(torch, "_current_graph_task_id") : NULL;
    Py_XDECREF(torch);
    return current_pass ? 0 : -1;
}

static PyObject *new_hook(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    PyObject *slowly, *running;
    if (!PyArg_ParseTuple(arguments, "OO!", &slowly, RunningType, &running) || find_current_pass() < 0)
        return NULL;
    Hook *self = (Hook *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->call = called;
    self->slowly = Py_NewRef(slowly);
    self->running = (Running *)Py_NewRef(running);
    return (PyObject *)self;
}

static int each_of_hook(Hook *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->slowly);
    Py_VISIT(self->running);
    Py_VISIT(self->filling);
    return 0;
}

static void end_of_hook(Hook *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->slowly);
    Py_CLEAR(self->running);
    Py_CLEAR(self->filling);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *new_running(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    PyObject *full;
    if (!PyArg_ParseTuple(arguments, "O", &full))
        return NULL;
    Running *self = (Running *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->number = -1;
    self->full = Py_NewRef(full);
    return (PyObject *)self;
}

static int each_of_running(Running *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->full);
    return 0;
}

static int clear_running(Running *self)
{
    /* Hooks that a circle still holds may be called. */
    self->number = -1;
    Py_CLEAR(self->full);
    return 0;
}

static void end_of_running(Running *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear_running(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef hook_methods[] = {{"place", (PyCFunction)place, METH_VARARGS, NULL}, {NULL}};
static PyMemberDef hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Hook, call), READONLY, NULL},
    {NULL},
};
static PyType_Slot hook_slots[] = {
    {Py_tp_new, new_hook}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_methods, hook_methods}, {Py_tp_members, hook_members},
    {Py_tp_traverse, each_of_hook}, {Py_tp_dealloc, end_of_hook}, {0, NULL},
};
static PyType_Spec hook_spec = {
    "unisono._compiled.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, hook_slots,
};

static PyMemberDef running_members[] = {{"number", T_LONG, offsetof(Running, number), 0, NULL}, {NULL}};
static PyType_Slot running_slots[] = {
    {Py_tp_new, new_running}, {Py_tp_members, running_members}, {Py_tp_traverse, each_of_running},
    {Py_tp_clear, clear_running}, {Py_tp_dealloc, end_of_running}, {0, NULL},
};
static PyType_Spec running_spec = {
    "unisono._compiled.Running", sizeof(Running), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, running_slots,
};

int add_hook(PyObject *module)
{
    return add_type(module, &running_spec, &RunningType) < 0 ? -1 : add_type(module, &hook_spec, &HookType);
}
