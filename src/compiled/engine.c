/* unisono.engine.Quickly: what an engine does around a call by the transport's shorter way. */
#include "compiled.h"

enum { NOBODY, ANYBODY, ONE };

static PyObject *s_call, *s_enter, *s_leave, *s_blamed, *s_patience, *s_names, *s_broadcast, *s_reduce;

/* Whether this thread may make a call now by the shorter way; -1 with an error. */
int may(Quickly *self, PyObject *name)
{
    if (!self->quick || !self->names || !self->sink || !self->activity || self->whose == NOBODY || self->closed)
        return 0;
    if (self->broken && self->broken != Py_None)
        return 0;
    if (self->whose == ONE && self->owner != PyThread_get_thread_ident())
        return 0;
    int named = PySet_Contains(self->names, name);
    if (named <= 0)
        return named;
    PyObject *sink;
    if (PyContextVar_Get(self->sink, Py_None, &sink) < 0)
        return -1;
    Py_DECREF(sink);
    return sink == Py_None;
}

static int begin(Quickly *self, Doing *doing, PyObject *const *given)
{
    doing_begin(doing, given[0], given[3], given[4], self->calls + 1);
    doing->since = monotonic();
    if (!doing->record || doing->record == Py_None) {
        doing->inside = 1;
        return 0;
    }
    PyObject *now = PyObject_GetAttrString((PyObject *)doing, "now");
    PyObject *entered = now ? PyObject_CallMethodOneArg((PyObject *)doing, s_enter, now) : NULL;
    Py_XDECREF(now);
    Py_XDECREF(entered);
    return entered ? 0 : -1;
}

/* How long a call may take; -1 with an error. */
int limit_of(Quickly *self, PyObject *timeout, double *limit)
{
    *limit = self->limit_s;
    if (timeout == Py_None)
        return 0;
    PyObject *told = PyObject_CallMethodOneArg((PyObject *)self, s_patience, timeout);
    *limit = told ? PyFloat_AsDouble(told) : -1.0;
    Py_XDECREF(told);
    return *limit == -1.0 && PyErr_Occurred() ? -1 : 0;
}

int end(Doing *doing)
{
    if (!doing->record || doing->record == Py_None) {
        doing->since = monotonic();
        doing->inside = 0;
        return 0;
    }
    PyObject *left = PyObject_CallMethodNoArgs((PyObject *)doing, s_leave);
    Py_XDECREF(left);
    return left ? 0 : -1;
}

/* The error that is under way becomes the one that the engine wants to be raised. */
static void blame(Quickly *self, Doing *doing)
{
    PyObject *error = raised(), *now = PyObject_GetAttrString((PyObject *)doing, "now");
    PyObject *told = now ? PyObject_CallMethodObjArgs((PyObject *)self, s_blamed, error, now, NULL) : NULL;
    Py_XDECREF(now);
    raise_told(error, told);
}

/* Autograd has to know that a tensor, or each of several, was written. */
int increment_version(PyObject *written)
{
    static PyObject *increment;
    if (!increment) {
        PyObject *graph = PyImport_ImportModule("torch.autograd.graph");
        increment = graph ? PyObject_GetAttrString(graph, "increment_version") : NULL;
        Py_XDECREF(graph);
    }
    PyObject *done = increment ? PyObject_CallOneArg(increment, written) : NULL;
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Of a call that is made: tell autograd what it has written to on this rank, if anything. */
static int mark_dirty(Quickly *self, PyObject *const *given)
{
    PyObject *name = given[0], *target = given[1], *root = given[4];
    if (target == Py_None)
        return 0;
    int reduces = root != Py_None && PyUnicode_Compare(name, s_reduce) == 0;
    if (reduces || (root != Py_None && PyUnicode_Compare(name, s_broadcast) == 0)) {
        int here = PyLong_AsLong(root) == self->rank;
        if (here != reduces)
            return PyErr_Occurred() ? -1 : 0;
    }
    return increment_version(target);
}

/* name, target, source, op, root, timeout */
static PyObject *quickly(Quickly *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 6) {
        PyErr_Format(PyExc_TypeError, "quickly() takes 6 arguments, not %zd", count);
        return NULL;
    }
    int nested = !self->inside || !PySet_Check(self->inside) || PySet_GET_SIZE(self->inside);
    int ready = self->pending || nested ? 0 : may(self, given[0]);
    if (ready <= 0)
        return ready < 0 ? NULL : Py_NewRef(Py_False);
    /* None of them goes while this is under way, whatever is set meanwhile. */
    Doing *doing = (Doing *)Py_NewRef(self->activity);
    PyObject *quick = Py_NewRef(self->quick), *inside = Py_NewRef(self->inside), *done = NULL;
    PyObject *here = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    double limit;
    if (!here || limit_of(self, given[5], &limit) < 0 || PySet_Add(inside, here) < 0)
        goto out;
    if (begin(self, doing, given) == 0) {
        PyObject *deadline = PyFloat_FromDouble(doing->since + limit);
        PyObject *call[] = {quick, given[0], given[1], given[2], given[3], given[4], deadline};
        done = deadline ? PyObject_VectorcallMethod(s_call, call, 7, NULL) : NULL;
        Py_XDECREF(deadline);
        if (done == Py_True && mark_dirty(self, given) < 0)
            Py_CLEAR(done);
        if (!done) {
            blame(self, doing);
        } else if (done == Py_True) {
            doing_done(doing, ++self->calls);
        }
        PyObject *error = done ? NULL : raised();
        if (end(doing) < 0) {
            Py_CLEAR(done);
            raise_after(error);
        } else if (error) {
            raise_again(error);
        }
    }
    PySet_Discard(inside, here);
out:
    Py_XDECREF(here);
    Py_DECREF(inside);
    Py_DECREF(quick);
    Py_DECREF(doing);
    return done;
}

static PyObject *get_owner(Quickly *self, void *closure)
{
    if (self->whose == NOBODY)
        Py_RETURN_NONE;
    return self->whose == ANYBODY ? PyLong_FromLong(-1) : PyLong_FromUnsignedLong(self->owner);
}

static int set_owner(Quickly *self, PyObject *owner, void *closure)
{
    if (!owner || owner == Py_None) {
        self->whose = NOBODY;
        return 0;
    }
    if (PyLong_AsLong(owner) == -1 && !PyErr_Occurred()) {
        self->whose = ANYBODY;
        return 0;
    }
    PyErr_Clear();
    unsigned long thread = PyLong_AsUnsignedLong(owner);
    if (PyErr_Occurred())
        return -1;
    self->owner = thread;
    self->whose = ONE;
    return 0;
}

static PyObject *get_quick(Quickly *self, void *closure)
{
    return Py_NewRef(self->quick ? self->quick : Py_None);
}

static int set_quick(Quickly *self, PyObject *quick, void *closure)
{
    PyObject *names = NULL;
    if (quick && quick != Py_None && !(names = PyObject_GetAttr(quick, s_names)))
        return -1;
    if (names && !PyAnySet_Check(names)) {
        PyErr_SetString(PyExc_TypeError, "the names of the quick calls are a frozenset");
        Py_DECREF(names);
        return -1;
    }
    Py_XSETREF(self->names, names);
    Py_XINCREF(quick);
    Py_XSETREF(self->quick, quick);
    return 0;
}

static PyObject *get_activity(Quickly *self, void *closure)
{
    return Py_NewRef(self->activity ? self->activity : Py_None);
}

static int set_activity(Quickly *self, PyObject *activity, void *closure)
{
    if (!activity || !PyObject_TypeCheck(activity, DoingType)) {
        PyErr_SetString(PyExc_TypeError, "an activity is a Doing");
        return -1;
    }
    Py_INCREF(activity);
    Py_XSETREF(self->activity, activity);
    return 0;
}

static int each(Quickly *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->quick);
    Py_VISIT(self->names);
    Py_VISIT(self->sink);
    Py_VISIT(self->broken);
    Py_VISIT(self->activity);
    Py_VISIT(self->inside);
    return 0;
}

static int clear(Quickly *self)
{
    Py_CLEAR(self->quick);
    Py_CLEAR(self->names);
    Py_CLEAR(self->sink);
    Py_CLEAR(self->broken);
    Py_CLEAR(self->activity);
    Py_CLEAR(self->inside);
    return 0;
}

static void dealloc(Quickly *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"_sink", T_OBJECT, offsetof(Quickly, sink), 0, NULL},
    {"_broken", T_OBJECT, offsetof(Quickly, broken), 0, NULL},
    {"_inside", T_OBJECT, offsetof(Quickly, inside), 0, NULL},
    {"_limit_s", T_DOUBLE, offsetof(Quickly, limit_s), 0, NULL},
    {"_calls", T_LONG, offsetof(Quickly, calls), 0, NULL},
    {"_pending", T_INT, offsetof(Quickly, pending), 0, NULL},
    {"_rank", T_INT, offsetof(Quickly, rank), 0, NULL},
    {"closed", T_BOOL, offsetof(Quickly, closed), 0, NULL},
    {NULL},
};
static PyGetSetDef getters[] = {
    {"owner", (getter)get_owner, (setter)set_owner, NULL, NULL},
    {"quick", (getter)get_quick, (setter)set_quick, NULL, NULL},
    {"activity", (getter)get_activity, (setter)set_activity, NULL, NULL},
    {NULL},
};
static PyMethodDef methods[] = {
    {"quickly", (PyCFunction)(void (*)(void))quickly, METH_FASTCALL, NULL},
    {NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_members, members}, {Py_tp_getset, getters}, {Py_tp_methods, methods}, {Py_tp_traverse, each},
    {Py_tp_clear, clear}, {Py_tp_dealloc, dealloc}, {0, NULL},
};
static PyType_Spec spec = {
    "unisono._compiled.Quickly", sizeof(Quickly), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots,
};

int add_quickly(PyObject *module)
{
    static PyTypeObject *type;
    s_call = PyUnicode_InternFromString("call");
    s_enter = PyUnicode_InternFromString("enter");
    s_leave = PyUnicode_InternFromString("leave");
    s_blamed = PyUnicode_InternFromString("_blamed");
    s_patience = PyUnicode_InternFromString("_patience");
    s_names = PyUnicode_InternFromString("names");
    s_broadcast = PyUnicode_InternFromString("broadcast");
    s_reduce = PyUnicode_InternFromString("reduce");
    if (!s_call || !s_enter || !s_leave || !s_blamed || !s_patience || !s_names || !s_broadcast || !s_reduce)
        return -1;
    return add_type(module, &spec, &type);
}
