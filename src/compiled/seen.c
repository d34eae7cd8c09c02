/* Whether tensors are those of an earlier call, and as they were. Where torch offers DLPack's table of C functions, one
 * call of it tells where a tensor lies and how; else it takes a method of Python for each question. */
#include "seen.h"

static PyObject *s_data_ptr, *s_numel, *s_is_contiguous, *s_requires_grad, *s_dtype, *s_is_neg;

typedef struct {
    uint32_t major, minor;
    void *older;
    void *others[3];
    int (*view)(void *object, DLTensor *out);
    void *stream;
} Exchange;

static const Exchange *exchange;

static int64_t as_int(PyObject *object, PyObject *method)
{
    PyObject *found = PyObject_CallMethodNoArgs(object, method);
    int64_t value = found ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return value;
}

static void *address_of(PyObject *tensor)
{
    PyObject *found = PyObject_CallMethodNoArgs(tensor, s_data_ptr);
    void *address = found ? PyLong_AsVoidPtr(found) : NULL;
    Py_XDECREF(found);
    return address;
}

/* Not before there is a tensor: there are processes that need no torch, whose import takes a second. */
static int find_exchange(void)
{
    static int found;
    if (found)
        return 0;
    PyObject *torch = PyImport_ImportModule("torch"), *tensor = NULL, *table = NULL;
    if (torch)
        tensor = PyObject_GetAttrString(torch, "Tensor");
    if (tensor && PyObject_HasAttrString(tensor, "__dlpack_c_exchange_api__"))
        table = PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
    if (table && PyCapsule_IsValid(table, "dlpack_exchange_api")) {
        const Exchange *offered = PyCapsule_GetPointer(table, "dlpack_exchange_api");
        if (offered && offered->major == 1 && offered->view)
            exchange = offered;
    }
    found = tensor && !PyErr_Occurred();
    Py_XDECREF(torch);
    Py_XDECREF(table);
    Py_XDECREF(tensor);
    return found ? 0 : -1;
}

static int see_one(SeenTensor *seen, PyObject *tensor)
{
    if (find_exchange() < 0)
        return -1;
    seen->address = address_of(tensor);
    seen->count = PyErr_Occurred() ? -1 : as_int(tensor, s_numel);
    if (PyErr_Occurred())
        return -1;
    seen->dtype = PyObject_GetAttr(tensor, s_dtype);
    seen->reference = seen->dtype ? PyWeakref_NewRef(tensor, NULL) : NULL;
    if (!seen->reference)
        return -1;
    DLTensor now;
    seen->viewed = exchange && exchange->view(tensor, &now) == 0;
    if (seen->viewed) {
        /* To DLPack, the integers of less than 8 bits are those of 8. */
        const uint8_t *kind = (uint8_t *)&now.kind;
        seen->kind = now.kind;
        seen->several = kind[0] <= 1 && kind[1] == 8;
    } else {
        /* There are dtypes that DLPack does not know. */
        PyErr_Clear();
    }
    return 0;
}

/* Where a tensor lies and how, if DLPack can tell. */
int viewed(PyObject *tensor, DLTensor *now)
{
    if (find_exchange() < 0 || !exchange)
        return 0;
    if (exchange->view(tensor, now) == 0)
        return 1;
    PyErr_Clear();
    return 0;
}

void unsee(Seen *seen)
{
    for (Py_ssize_t n = 0; n < seen->count; n++) {
        Py_XDECREF(seen->tensors[n].reference);
        Py_XDECREF(seen->tensors[n].dtype);
    }
    if (seen->listed)
        PyMem_Free(seen->tensors);
    memset(seen, 0, sizeof *seen);
}

/* One of the tensors that are given; NULL if there are fewer. */
static PyObject *item(const Seen *seen, PyObject *given, Py_ssize_t n)
{
    if (!seen->listed)
        return Py_NewRef(given);
    return n < PySequence_Fast_GET_SIZE(given) ? Py_NewRef(PySequence_Fast_GET_ITEM(given, n)) : NULL;
}

/* Of None, of a tensor, or of a list of these. */
int see(Seen *seen, PyObject *given)
{
    memset(seen, 0, sizeof *seen);
    if (given == Py_None)
        return 0;
    seen->listed = PyList_CheckExact(given) || PyTuple_CheckExact(given);
    Py_ssize_t count = seen->listed ? PySequence_Fast_GET_SIZE(given) : 1;
    seen->tensors = seen->listed ? PyMem_Calloc(count ? count : 1, sizeof *seen->tensors) : &seen->one;
    if (!seen->tensors) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t n = 0; n < count; n++) {
        /* Python may be called meanwhile, and change the list. */
        PyObject *tensor = item(seen, given, n);
        seen->count = n + 1;
        if (!tensor)
            PyErr_SetString(PyExc_RuntimeError, "a list of tensors changed meanwhile");
        int found = tensor ? see_one(&seen->tensors[n], tensor) : -1;
        Py_XDECREF(tensor);
        if (found < 0) {
            unsee(seen);
            return -1;
        }
    }
    return 0;
}

static int is(PyObject *object, PyObject *attribute, PyObject *wanted)
{
    PyObject *found = PyObject_GetAttr(object, attribute);
    Py_XDECREF(found);
    return found == wanted;
}

static int as_viewed(const SeenTensor *seen, PyObject *tensor)
{
    DLTensor now;
    if (exchange->view(tensor, &now) < 0) {
        PyErr_Clear();
        return 0;
    }
    if ((char *)now.data + now.byte_offset != seen->address || now.kind != seen->kind)
        return 0;
    int64_t count = 1;
    for (int n = now.ndim - 1; n >= 0; n--) {
        if (now.strides && now.shape[n] != 1 && now.strides[n] != count)
            return 0;
        count *= now.shape[n];
    }
    return count == seen->count && (!seen->several || is(tensor, s_dtype, seen->dtype));
}

static int as_told(const SeenTensor *seen, PyObject *tensor)
{
    if (address_of(tensor) != seen->address || PyErr_Occurred() || as_int(tensor, s_numel) != seen->count)
        return 0;
    PyObject *contiguous = PyObject_CallMethodNoArgs(tensor, s_is_contiguous);
    Py_XDECREF(contiguous);
    return contiguous == Py_True && is(tensor, s_dtype, seen->dtype);
}

static int same_one(const SeenTensor *seen, PyObject *tensor)
{
    PyObject *there;
#if PY_VERSION_HEX >= 0x030d0000
    PyWeakref_GetRef(seen->reference, &there);
    Py_XDECREF(there);
#else
    there = PyWeakref_GetObject(seen->reference);
#endif
    if (there != tensor)
        return 0;
    if (!(seen->viewed ? as_viewed(seen, tensor) : as_told(seen, tensor)) || !is(tensor, s_requires_grad, Py_False))
        return 0;
    /* The memory is the same of what is to be read as its opposite. */
    PyObject *negative = PyObject_CallMethodNoArgs(tensor, s_is_neg);
    Py_XDECREF(negative);
    return negative == Py_False;
}

/* -1 if an interrupt ended the look. */
int same(const Seen *seen, PyObject *given)
{
    int alike = 1;
    if (!seen->tensors)
        return given == Py_None;
    if (!seen->listed) {
        alike = same_one(seen->tensors, given);
    } else if ((!PyList_CheckExact(given) && !PyTuple_CheckExact(given)) ||
               PySequence_Fast_GET_SIZE(given) != seen->count) {
        return 0;
    } else {
        for (Py_ssize_t n = 0; alike && n < seen->count; n++) {
            PyObject *tensor = item(seen, given, n);
            alike = tensor && same_one(&seen->tensors[n], tensor);
            Py_XDECREF(tensor);
        }
    }
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        /* Whoever looks more closely tells what is wrong. */
        PyErr_Clear();
        return 0;
    }
    return alike;
}

int prepare_seeing(void)
{
    s_data_ptr = PyUnicode_InternFromString("data_ptr");
    s_numel = PyUnicode_InternFromString("numel");
    s_is_contiguous = PyUnicode_InternFromString("is_contiguous");
    s_requires_grad = PyUnicode_InternFromString("requires_grad");
    s_dtype = PyUnicode_InternFromString("dtype");
    s_is_neg = PyUnicode_InternFromString("is_neg");
    return s_data_ptr && s_numel && s_is_contiguous && s_requires_grad && s_dtype && s_is_neg ? 0 : -1;
}
