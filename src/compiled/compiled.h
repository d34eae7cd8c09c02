/* What the parts of unisono._compiled have in common: each stands in for a class of Python, which says what it does. */
#ifndef UNISONO_COMPILED_H
#define UNISONO_COMPILED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "the global lock guards all of this"
#endif

int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type);

#endif
