/* unisono.gradients.copies: gradients that lie as their places in a bucket do are copied there and taken off their
 * parameters; what is left needs torch. */
#include "seen.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

static PyTypeObject *CopiesType, *TensorType;
static PyObject *s_grad, *s_requires_grad, *s_is_neg;

/* A copy as long as this lets other threads run. */
enum { LONG = 1 << 16 };

typedef struct {
    PyObject_HEAD
    PyObject *parameters, *places;
    int past;
} Copies;

/* Past the caches: lines that another rank has read or written are slow to write to by way of them, while that rank's core
 * shares no cache with this one; and of long memory nothing stays there anyway. */
static void copy_past(char *to, const char *from, size_t nbytes)
{
#ifdef __SSE2__
    size_t ahead = -(uintptr_t)to & 15;
    if (ahead > nbytes)
        ahead = nbytes;
    memcpy(to, from, ahead);
    to += ahead, from += ahead, nbytes -= ahead;
    for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    memcpy(to, from, nbytes);
    /* Before anything that tells others. */
    _mm_sfence();
#else
    memcpy(to, from, nbytes);
#endif
}

/* Whether two tensors have their elements in one order, and how many bytes these are; -1 if not. */
static int64_t alike(const DLTensor *one, const DLTensor *other)
{
    if (one->kind != other->kind || one->ndim != other->ndim || one->device_type != CPU || other->device_type != CPU)
        return -1;
    int64_t count = 1;
    for (int n = 0; n < one->ndim; n++) {
        if (!one->strides || !other->strides || one->shape[n] != other->shape[n] ||
            (one->shape[n] != 1 && one->strides[n] != other->strides[n]))
            return -1;
        count *= one->shape[n];
    }
    return count * nbytes_of(one);
}

static int is(PyObject *object, PyObject *wanted)
{
    Py_XDECREF(object);
    return object == wanted;
}

/* Whether it was one that can be copied so, and was. */
static int copied(const Copies *self, PyObject *place, PyObject *gradient)
{
    DLTensor to, from;
    if (Py_TYPE(gradient) != TensorType || !is(PyObject_GetAttr(gradient, s_requires_grad), Py_False) ||
        !is(PyObject_CallMethodNoArgs(gradient, s_is_neg), Py_False) || !viewed(gradient, &from) || !viewed(place, &to))
        return 0;
    int64_t nbytes = alike(&to, &from);
    if (nbytes < 0 || (nbytes && !from.data))
        return 0;
    PyThreadState *thread = nbytes >= LONG ? PyEval_SaveThread() : NULL;
    char *there = (char *)to.data + to.byte_offset;
    const char *here = (const char *)from.data + from.byte_offset;
    if (self->past)
        copy_past(there, here, (size_t)nbytes);
    else if (nbytes)
        memcpy(there, here, (size_t)nbytes);
    if (thread)
        PyEval_RestoreThread(thread);
    return 1;
}

/* 1 if a gradient was taken or there is none, 0 if it is left to torch. */
static int take_one(const Copies *self, Py_ssize_t slot, PyObject *inside)
{
    PyObject *parameter = PyTuple_GET_ITEM(self->parameters, slot);
    PyObject *gradient = PyObject_GetAttr(parameter, s_grad);
    if (!gradient || gradient == Py_None) {
        Py_XDECREF(gradient);
        return gradient ? 1 : -1;
    }
    int done = copied(self, PyTuple_GET_ITEM(self->places, slot), gradient);
    Py_DECREF(gradient);
    if (PyErr_Occurred())
        return -1;
    if (done && (PyObject_SetAttr(parameter, s_grad, Py_None) < 0 || PyList_SetItem(inside, slot, Py_NewRef(Py_True)) < 0))
        return -1;
    return done;
}

/* slots, inside: the slots that are left */
static PyObject *take(Copies *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 2 || !PyList_CheckExact(given[0]) || !PyList_CheckExact(given[1]) || !self->parameters) {
        PyErr_SetString(PyExc_TypeError, "take() takes a list of slots, and one of what is inside, after __init__()");
        return NULL;
    }
    PyObject *left = PyList_New(0);
    for (Py_ssize_t n = 0; left && n < PyList_GET_SIZE(given[0]); n++) {
        PyObject *item = Py_NewRef(PyList_GET_ITEM(given[0], n));
        Py_ssize_t slot = PyLong_AsSsize_t(item);
        int found = -1;
        if (slot >= 0 && slot < PyTuple_GET_SIZE(self->parameters))
            found = take_one(self, slot, given[1]);
        else if (!PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "there is no such slot");
        if (found < 0 || (!found && PyList_Append(left, item) < 0))
            Py_CLEAR(left);
        Py_DECREF(item);
    }
    return left;
}

static int init(Copies *self, PyObject *arguments, PyObject *named)
{
    static char *names[] = {"parameters", "places", "past", NULL};
    PyObject *parameters, *places;
    int past;
    if (self->parameters) {
        PyErr_SetString(PyExc_RuntimeError, "Copies are made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "O!O!p", names, &PyTuple_Type, &parameters, &PyTuple_Type, &places, &past))
        return -1;
    if (PyTuple_GET_SIZE(parameters) != PyTuple_GET_SIZE(places)) {
        PyErr_SetString(PyExc_ValueError, "each parameter has one place");
        return -1;
    }
    if (!TensorType) {
        PyObject *torch = PyImport_ImportModule("torch");
        TensorType = torch ? (PyTypeObject *)PyObject_GetAttrString(torch, "Tensor") : NULL;
        Py_XDECREF(torch);
        if (!TensorType)
            return -1;
    }
    self->parameters = Py_NewRef(parameters);
    self->places = Py_NewRef(places);
    self->past = past;
    return 0;
}

static int each(Copies *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->parameters);
    Py_VISIT(self->places);
    return 0;
}

static int clear(Copies *self)
{
    Py_CLEAR(self->parameters);
    Py_CLEAR(self->places);
    return 0;
}

static void dealloc(Copies *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"take", (PyCFunction)(void (*)(void))take, METH_FASTCALL, NULL},
    {NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_init, init}, {Py_tp_methods, methods}, {Py_tp_traverse, each}, {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc}, {0, NULL},
};
static PyType_Spec spec = {
    "unisono._compiled.Copies", sizeof(Copies), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

int add_copies(PyObject *module)
{
    s_grad = PyUnicode_InternFromString("grad");
    s_requires_grad = PyUnicode_InternFromString("requires_grad");
    s_is_neg = PyUnicode_InternFromString("is_neg");
    return s_grad && s_requires_grad && s_is_neg ? add_type(module, &spec, &CopiesType) : -1;
}
