/* unisono.activity.Doing: what a rank is doing, noted with nothing made that nobody asks for. */
#include "compiled.h"

PyTypeObject *DoingType;

enum { TAGS = 256 };

static int init(Doing *self, PyObject *arguments, PyObject *named)
{
    PyObject *awaited = PyTuple_New(0), *posted = PyDict_New();
    Py_XSETREF(self->awaited, awaited);
    Py_XSETREF(self->posted, posted);
    return awaited && posted ? 0 : -1;
}

static void forget(Note *note)
{
    Note old = *note;
    memset(note, 0, sizeof *note);
    Py_XDECREF(old.noted);
    Py_XDECREF(old.name);
    Py_XDECREF(old.op);
    Py_XDECREF(old.root);
    Py_XDECREF(old.code);
}

static Note kept(const Note *note)
{
    Py_XINCREF(note->noted);
    Py_XINCREF(note->name);
    Py_XINCREF(note->op);
    Py_XINCREF(note->root);
    Py_XINCREF(note->code);
    return *note;
}

static PyObject *made_of(const Note *note)
{
    const char *form = note->number ? "root %S" : "rank %S";
    PyObject *detail = note->root == Py_None ? Py_NewRef(note->op) : PyUnicode_FromFormat(form, note->root);
    PyObject *number = note->number ? PyLong_FromLong(note->number) : Py_NewRef(Py_None);
    if (!detail || !number) {
        Py_XDECREF(detail);
        Py_XDECREF(number);
        return NULL;
    }
    if (!note->code)
        return Py_BuildValue("(ONNO)", note->name, number, detail, Py_None);
    return Py_BuildValue("(ONN(Oi))", note->name, number, detail, note->code, note->last);
}

static PyObject *noted_of(const Note *note)
{
    if (note->noted)
        return Py_NewRef(note->noted);
    if (!note->name)
        Py_RETURN_NONE;
    /* What is made may start the collector, or call Python, and another call take the note's place. */
    Note here = kept(note);
    PyObject *made = made_of(&here);
    forget(&here);
    return made;
}

/* Before a quick call: it is under way, for the frame that called what called this. */
void doing_begin(Doing *self, PyObject *name, PyObject *op, PyObject *root, long number)
{
    Note note = {NULL, Py_NewRef(name), Py_NewRef(op), Py_NewRef(root), NULL, number, 0};
    PyFrameObject *method = PyEval_GetFrame(), *caller = method ? PyFrame_GetBack(method) : NULL;
    if (caller) {
        note.code = (PyObject *)PyFrame_GetCode(caller);
        note.last = PyFrame_GetLasti(caller);
        Py_DECREF(caller);
    }
    Note old = self->now;
    self->now = note;
    forget(&old);
    Py_XSETREF(self->awaited, PyTuple_New(0));
}

static void keep_now(Doing *self)
{
    Note *place = &self->latest[self->kept++ % KEPT], old = *place;
    *place = kept(&self->now);
    forget(&old);
}

/* After it: it counts, and is one of the latest. */
void doing_done(Doing *self, long number)
{
    self->calls = number;
    keep_now(self);
}

static PyObject *keep(Doing *self, PyObject *noted)
{
    Note *place = &self->latest[self->kept++ % KEPT], old = *place;
    memset(place, 0, sizeof *place);
    place->noted = Py_NewRef(noted);
    forget(&old);
    Py_RETURN_NONE;
}

static PyObject *get_latest(Doing *self, void *closure)
{
    unsigned count = self->kept < KEPT ? self->kept : KEPT, first = self->kept - count;
    PyObject *list = PyList_New(0);
    for (unsigned n = 0; list && n < count; n++) {
        PyObject *noted = noted_of(&self->latest[(first + n) % KEPT]);
        if (!noted || PyList_Append(list, noted) < 0)
            Py_CLEAR(list);
        Py_XDECREF(noted);
    }
    return list;
}

static PyObject *get_now(Doing *self, void *closure)
{
    return noted_of(&self->now);
}

static int set_now(Doing *self, PyObject *noted, void *closure)
{
    Note old = self->now;
    memset(&self->now, 0, sizeof self->now);
    self->now.noted = noted && noted != Py_None ? Py_NewRef(noted) : NULL;
    forget(&old);
    return 0;
}

static int each(Doing *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->record);
    Py_VISIT(self->awaited);
    Py_VISIT(self->posted);
    for (int n = -1; n < KEPT; n++) {
        Note *note = n < 0 ? &self->now : &self->latest[n];
        Py_VISIT(note->noted);
        Py_VISIT(note->name);
        Py_VISIT(note->op);
        Py_VISIT(note->root);
        Py_VISIT(note->code);
    }
    return 0;
}

static int clear(Doing *self)
{
    Py_CLEAR(self->record);
    Py_CLEAR(self->awaited);
    Py_CLEAR(self->posted);
    forget(&self->now);
    for (int n = 0; n < KEPT; n++)
        forget(&self->latest[n]);
    return 0;
}

static void dealloc(Doing *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"since", T_DOUBLE, offsetof(Doing, since), 0, NULL},
    {"record", T_OBJECT, offsetof(Doing, record), 0, NULL},
    {"inside", T_BOOL, offsetof(Doing, inside), 0, NULL},
    {"calls", T_LONG, offsetof(Doing, calls), 0, NULL},
    {"messages", T_LONG, offsetof(Doing, messages), 0, NULL},
    {"awaited", T_OBJECT, offsetof(Doing, awaited), 0, NULL},
    {"posted", T_OBJECT, offsetof(Doing, posted), 0, NULL},
    {NULL},
};
static PyGetSetDef getters[] = {
    {"now", (getter)get_now, (setter)set_now, NULL, NULL},
    {"latest", (getter)get_latest, NULL, NULL, NULL},
    {NULL},
};
static PyMethodDef methods[] = {{"keep", (PyCFunction)keep, METH_O, NULL}, {NULL}};
static PyType_Slot slots[] = {
    {Py_tp_init, init}, {Py_tp_members, members}, {Py_tp_getset, getters}, {Py_tp_methods, methods}, {Py_tp_traverse, each},
    {Py_tp_clear, clear}, {Py_tp_dealloc, dealloc}, {0, NULL},
};
PyType_Spec doing_spec = {
    "unisono._compiled.Doing", sizeof(Doing), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots,
};
