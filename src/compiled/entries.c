/* The entries of Repeats: what is kept of a call, and where it is found again. */
#include "repeats.h"

static size_t home(PyObject *name, void *target, void *source)
{
    uintptr_t mixed = (uintptr_t)name ^ ((uintptr_t)target * 3) ^ ((uintptr_t)source * 5);
    return (size_t)((mixed * 0x9E3779B97F4A7C15u) >> 40) % SETS * PLACES;
}

static int is_for(const Entry *entry, PyObject *const *given)
{
    return entry && entry->target_at == given[1] && entry->source_at == given[2] && entry->name == given[0] &&
           entry->op == given[3] && entry->root == given[4];
}

/* What is kept of a call with these: name, target, source, op, root. NULL if nothing is. */
Entry *find(const Repeats *self, PyObject *const *given)
{
    Entry *const *places = &self->entries[home(given[0], given[1], given[2])];
    for (int n = 0; n < PLACES; n++)
        if (is_for(places[n], given))
            return places[n];
    return NULL;
}

void drop(Entry *entry)
{
    if (!entry || --entry->holders > 0)
        return;
    unsee(&entry->target);
    unsee(&entry->source);
    Py_XDECREF(entry->name);
    Py_XDECREF(entry->op);
    Py_XDECREF(entry->root);
    Py_XDECREF(entry->said);
    Py_XDECREF(entry->begin);
    Py_XDECREF(entry->arguments);
    PyMem_Free(entry);
}

/* name, target, source, op, root, said, begin, arguments, divisor */
PyObject *remember(Repeats *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 9 || !PyTuple_Check(given[5]) || PyTuple_GET_SIZE(given[5]) != 2 || !PyTuple_Check(given[7])) {
        PyErr_SetString(PyExc_TypeError, "remember() takes 9 arguments");
        return NULL;
    }
    PyObject *words = PyTuple_GET_ITEM(given[5], 0), *wanted = PyTuple_GET_ITEM(given[5], 1);
    if (!PyBytes_Check(words) || Py_SIZE(words) != 24 || !PyBytes_Check(wanted) || Py_SIZE(wanted) != 24) {
        PyErr_SetString(PyExc_TypeError, "what is said are three words, and what comes of them");
        return NULL;
    }
    Entry *entry = PyMem_Calloc(1, sizeof *entry);
    if (!entry)
        return PyErr_NoMemory();
    entry->holders = 1;
    entry->divisor = PyLong_AsLong(given[8]);
    if (PyErr_Occurred() || see(&entry->target, given[1]) < 0 || see(&entry->source, given[2]) < 0) {
        drop(entry);
        return NULL;
    }
    entry->name = Py_NewRef(given[0]);
    entry->op = Py_NewRef(given[3]);
    entry->root = Py_NewRef(given[4]);
    entry->target_at = given[1];
    entry->source_at = given[2];
    entry->said = Py_NewRef(given[5]);
    entry->begin = Py_NewRef(given[6]);
    entry->arguments = Py_NewRef(given[7]);
    memcpy(entry->words, PyBytes_AS_STRING(words), sizeof entry->words);
    memcpy(entry->wanted, PyBytes_AS_STRING(wanted), sizeof entry->wanted);
    size_t at = home(given[0], given[1], given[2]), place = at + self->replaced++ % PLACES;
    for (int n = PLACES - 1; n >= 0; n--)
        if (!self->entries[at + n] || is_for(self->entries[at + n], given))
            place = at + n;
    Entry *old = self->entries[place];
    self->entries[place] = entry;
    drop(old);
    Py_RETURN_NONE;
}
