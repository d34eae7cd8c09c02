/* Errors that are put aside for a while, and what becomes of them. */
#include "compiled.h"

/* The error that is under way, which is so no more. */
PyObject *raised(void)
{
#if PY_VERSION_HEX >= 0x030c0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace)
        PyException_SetTraceback(error, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
#endif
}

/* It is under way again; takes the reference. */
void raise_again(PyObject *error)
{
#if PY_VERSION_HEX >= 0x030c0000
    PyErr_SetRaisedException(error);
#else
    if (error)
        PyErr_Restore(Py_NewRef(Py_TYPE(error)), error, PyException_GetTraceback(error));
#endif
}

/* Whether an error is among what another one came after. */
static int came_before(PyObject *error, PyObject *other)
{
    int found = 0;
    PyObject *one = Py_NewRef(other);
    for (int n = 0; one && !found && n < 100; n++) {
        found = one == error;
        Py_SETREF(one, PyException_GetContext(one));
    }
    Py_XDECREF(one);
    return found;
}

/* The error that is under way came while an earlier one was, if any; takes the reference to that. */
void raise_after(PyObject *earlier)
{
    PyObject *later = raised(), *handled = PyErr_GetHandledException();
    if (later && earlier && !came_before(later, earlier)) {
        PyObject *context = PyException_GetContext(later);
        if (!context || context == handled)
            PyException_SetContext(later, Py_NewRef(earlier));
        Py_XDECREF(context);
    }
    Py_XDECREF(handled);
    Py_XDECREF(earlier);
    raise_again(later);
}

/* Of an error, what somebody has told of it is raised: itself, or another one, which comes after it. If nobody could, an
 * error of that is under way. Takes both references. */
void raise_told(PyObject *error, PyObject *told)
{
    if (told == error)
        raise_again(Py_NewRef(error));
    else if (told)
        PyErr_SetObject((PyObject *)Py_TYPE(told), told);
    Py_XDECREF(told);
    raise_after(error);
}
