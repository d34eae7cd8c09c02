/* unisono.quickly.Quickly.carried: what an engine does around a message by the transport's shorter way. */
#include "compiled.h"

static PyObject *s_letter, *s_carry, *s_enter, *s_undelivered, *s_recv;

static int begin(Doing *doing, PyObject *const *given)
{
    doing_begin(doing, given[0], Py_None, given[2], 0);
    if (doing_message(doing, given[0], given[2], given[3]) < 0)
        return -1;
    doing->since = monotonic();
    if (!doing->record || doing->record == Py_None) {
        doing->inside = 1;
        return 0;
    }
    PyObject *awaited = Py_NewRef(doing->awaited), *now = PyObject_GetAttrString((PyObject *)doing, "now");
    PyObject *entered = now ? PyObject_CallMethodObjArgs((PyObject *)doing, s_enter, now, awaited, NULL) : NULL;
    Py_XDECREF(now);
    Py_DECREF(awaited);
    Py_XDECREF(entered);
    return entered ? 0 : -1;
}

/* The error that is under way becomes the one that the engine wants to be raised. */
static void blame(Quickly *self, PyObject *name)
{
    PyObject *error = raised();
    PyObject *told = PyObject_CallMethodObjArgs((PyObject *)self, s_undelivered, error, name, NULL);
    raise_told(error, told);
}

static PyObject *carry(Quickly *self, PyObject *letter, PyObject *const *given, double limit)
{
    /* It does not go while this is under way, whatever is set meanwhile. */
    Doing *doing = (Doing *)Py_NewRef(self->activity);
    PyObject *done = NULL;
    if (begin(doing, given) == 0) {
        PyObject *deadline = PyFloat_FromDouble(doing->since + limit);
        done = deadline ? PyObject_CallMethodObjArgs(letter, s_carry, given[1], deadline, NULL) : NULL;
        Py_XDECREF(deadline);
        if (done && PyUnicode_Compare(given[0], s_recv) == 0 && increment_version(given[1]) < 0)
            Py_CLEAR(done);
        if (!done)
            blame(self, given[0]);
        PyObject *error = done ? NULL : raised();
        if (end(doing) < 0) {
            Py_CLEAR(done);
            raise_after(error);
        } else if (error) {
            raise_again(error);
        }
    }
    Py_DECREF(doing);
    return done;
}

/* name, tensor, peer, tag, timeout */
PyObject *carried(Quickly *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 5) {
        PyErr_Format(PyExc_TypeError, "carried() takes 5 arguments, not %zd", count);
        return NULL;
    }
    int ready = may(self, given[0]);
    if (ready <= 0)
        return ready < 0 ? NULL : Py_NewRef(Py_False);
    double limit;
    PyObject *quick = Py_NewRef(self->quick), *letter = NULL, *done = NULL;
    if (limit_of(self, given[4], &limit) == 0) {
        PyObject *wanted[] = {quick, given[0], given[1], given[2], given[3]};
        letter = PyObject_VectorcallMethod(s_letter, wanted, 5, NULL);
    }
    Py_DECREF(quick);
    if (!letter)
        return NULL;
    if (letter != Py_None)
        done = carry(self, letter, given, limit);
    PyObject *told = letter == Py_None ? Py_NewRef(Py_False) : done ? Py_NewRef(Py_True) : NULL;
    Py_XDECREF(done);
    Py_DECREF(letter);
    return told;
}

int prepare_messages(void)
{
    s_letter = PyUnicode_InternFromString("letter");
    s_carry = PyUnicode_InternFromString("carry");
    s_enter = PyUnicode_InternFromString("enter");
    s_undelivered = PyUnicode_InternFromString("_undelivered");
    s_recv = PyUnicode_InternFromString("recv");
    return s_letter && s_carry && s_enter && s_undelivered && s_recv ? 0 : -1;
}
