/* unisono.transports._mpi_page.Shared.meeting: ranks that are in one call give the words of a sum in their page, and go on when
 * all have given theirs. */
#include "meeting.h"

PyTypeObject *MeetingType;
static PyObject *s_see_through;

int meet(Meeting *self)
{
    Page *page = (Page *)self->page;
    if (page->awaited) {
        PyErr_SetString(PyExc_RuntimeError, "an error has ended the wait for the sum before this one");
        return -1;
    }
    if (page_met(page, self->words, self->wanted))
        return 0;
    PyObject *deadline = PyFloat_FromDouble(((Guarded *)self->comms)->deadline);
    PyObject *seen = deadline ? PyObject_CallMethodObjArgs(self->agreement, s_see_through, self->said, deadline, NULL) : NULL;
    Py_XDECREF(deadline);
    if (seen == Py_False)
        PyErr_SetString(PyExc_RuntimeError, "a rank left a collective in the middle");
    Py_XDECREF(seen);
    return seen == Py_True ? 0 : -1;
}

/* page, agreement (that sees a wait through which is long), comms (that know the deadline), said */
static PyObject *new(PyTypeObject *type, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"page", "agreement", "comms", "said", NULL};
    PyObject *page, *agreement, *comms, *said;
    const char *words, *wanted;
    Py_ssize_t given, hoped;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "O!OO!O!", names, PageType, &page, &agreement, GuardedType, &comms,
                                     &PyTuple_Type, &said))
        return NULL;
    if (!page_made((Page *)page) || !PyArg_ParseTuple(said, "y#y#", &words, &given, &wanted, &hoped))
        return NULL;
    Meeting *self = given == sizeof self->words && hoped == given ? (Meeting *)type->tp_alloc(type, 0) : NULL;
    if (!self) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "at a Meeting three words are said, and three are heard");
        return NULL;
    }
    memcpy(self->words, words, sizeof self->words);
    memcpy(self->wanted, wanted, sizeof self->wanted);
    self->page = Py_NewRef(page);
    self->agreement = Py_NewRef(agreement);
    self->comms = Py_NewRef(comms);
    self->said = Py_NewRef(said);
    return (PyObject *)self;
}

static int each(Meeting *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->agreement);
    Py_VISIT(self->comms);
    return 0;
}

static int clear(Meeting *self)
{
    Py_CLEAR(self->agreement);
    Py_CLEAR(self->comms);
    return 0;
}

static void dealloc(Meeting *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_CLEAR(self->page);
    Py_CLEAR(self->said);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_new, new}, {Py_tp_traverse, each}, {Py_tp_clear, clear}, {Py_tp_dealloc, dealloc}, {0, NULL},
};
static PyType_Spec spec = {
    "unisono._compiled.Meeting", sizeof(Meeting), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

int add_meeting(PyObject *module)
{
    s_see_through = PyUnicode_InternFromString("see_through");
    return s_see_through ? add_type(module, &spec, &MeetingType) : -1;
}
