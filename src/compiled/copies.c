/* A gradient that lies as its place in a bucket does is copied there without torch. */
#include "filling.h"
#include "views.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

static PyTypeObject *TensorType;
static PyObject *s_requires_grad, *s_is_neg;

/* A copy as long as this lets other threads run. */
enum { LONG = 1 << 16 };

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

static void store_past(char *to, const char *from, int64_t nbytes)
{
#ifdef __SSE2__
    int64_t ahead = -(uintptr_t)to & 15;
    if (ahead > nbytes)
        ahead = nbytes;
    memcpy(to, from, (size_t)ahead);
    to += ahead, from += ahead, nbytes -= ahead;
    for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    /* Before anything that tells others. */
    _mm_sfence();
#endif
    memcpy(to, from, (size_t)nbytes);
}

/* Whether it was one that can be copied so, and was. One that lies from `low` to `high`, and not in its place, is none. */
int copied(PyObject *place, PyObject *gradient, int past, uintptr_t low, uintptr_t high)
{
    DLTensor to, from;
    if (Py_TYPE(gradient) != TensorType || !is(PyObject_GetAttr(gradient, s_requires_grad), Py_False) ||
        !is(PyObject_CallMethodNoArgs(gradient, s_is_neg), Py_False) || !viewed(gradient, &from) || !viewed(place, &to))
        return 0;
    int64_t nbytes = alike(&to, &from);
    if (nbytes < 0 || (nbytes && !from.data))
        return 0;
    char *there = (char *)to.data + to.byte_offset;
    const char *here = (const char *)from.data + from.byte_offset;
    /* It may be there already, since an earlier step. */
    if (!nbytes || there == here)
        return 1;
    if ((uintptr_t)here >= low && (uintptr_t)here < high)
        return 0;
    PyThreadState *thread = nbytes >= LONG ? PyEval_SaveThread() : NULL;
    /* Of long memory nothing stays in the caches anyway. */
    if (past)
        store_past(there, here, nbytes);
    else
        memcpy(there, here, (size_t)nbytes);
    if (thread)
        PyEval_RestoreThread(thread);
    return 1;
}

/* Not before there is a bucket: there are processes that need no torch. */
int prepare_copies(void)
{
    if (TensorType)
        return 0;
    s_requires_grad = PyUnicode_InternFromString("requires_grad");
    s_is_neg = PyUnicode_InternFromString("is_neg");
    if (!s_requires_grad || !s_is_neg)
        return -1;
    PyObject *torch = PyImport_ImportModule("torch");
    TensorType = torch ? (PyTypeObject *)PyObject_GetAttrString(torch, "Tensor") : NULL;
    Py_XDECREF(torch);
    return TensorType ? 0 : -1;
}
