/* The module unisono._compiled. */
#include "compiled.h"

extern PyType_Spec doing_spec, guarded_spec;
int add_quickly(PyObject *module);
int add_repeats(PyObject *module);
int add_storing(PyObject *module);
int add_filling(PyObject *module);
int add_hook(PyObject *module);
PyObject *sum_rows(PyObject *module, PyObject *arguments);
PyObject *sum_ahead(PyObject *module, PyObject *arguments);
PyObject *stop_sums(PyObject *module, PyObject *arguments);

int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type ? PyModule_AddType(module, *type) : -1;
}

/* As in unisono/compiled.py: another number for other parts, or for parts of other parts. */
enum { INTERFACE = 11 };

static int fill(PyObject *module)
{
    if (DoingType) {
        PyErr_SetString(PyExc_ImportError, "unisono's compiled parts know one interpreter only");
        return -1;
    }
    if (add_type(module, &doing_spec, &DoingType) < 0 || add_type(module, &guarded_spec, &GuardedType) < 0)
        return -1;
    if (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        return -1;
    if (add_quickly(module) < 0 || add_repeats(module) < 0 || add_storing(module) < 0 || add_filling(module) < 0 || add_hook(module) < 0)
        return -1;
    return 0;
}

static PyMethodDef functions[] = {
    {"sum_rows", sum_rows, METH_VARARGS, NULL},
    {"sum_ahead", sum_ahead, METH_VARARGS, NULL},
    {"stop_sums", stop_sums, METH_VARARGS, NULL},
    {NULL},
};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "unisono._compiled", "Parts of unisono, compiled; `unisono.compiled` tells which.", 0, functions, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__compiled(void)
{
    return PyModuleDef_Init(&definition);
}
