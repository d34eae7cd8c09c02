/* The module unisono._compiled. */
#include "compiled.h"

int add_filling(PyObject *module);
int add_hook(PyObject *module);

int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type ? PyModule_AddType(module, *type) : -1;
}

/* As in unisono/compiled.py: another number for other parts, or for parts of other parts. */
enum { INTERFACE = 12 };

static int fill(PyObject *module)
{
    static int filled;
    if (filled++) {
        PyErr_SetString(PyExc_ImportError, "unisono's compiled parts know one interpreter only");
        return -1;
    }
    if (PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0)
        return -1;
    if (add_filling(module) < 0 || add_hook(module) < 0)
        return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "unisono._compiled", "Parts of unisono, compiled; `unisono.compiled` tells which.", 0, NULL, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__compiled(void)
{
    return PyModuleDef_Init(&definition);
}
