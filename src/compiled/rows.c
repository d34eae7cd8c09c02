/* unisono.transports._shm_rows: the sum of rows of memory that ranks share, written to each of them, in one pass. What
 * torch takes several functions for waits for memory as many times. */
#include "rows.h"

/* A sum as long as this lets other threads run. */
enum { LONG = 1 << 16 };

/* In the order of rows, as many elements at once as every processor of 64 bits can add; `divides` is constant where this
 * is used, so that no quotient is computed in vain. */
#define SUM(name, real)                                                                                            \
    typedef real name##_lane __attribute__((vector_size(16), aligned(sizeof(real)), may_alias));                   \
    typedef real name##_one __attribute__((may_alias));                                                            \
    STEP(name##_lanes, name##_lane, real)                                                                          \
    STEP(name##_ones, name##_one, real)                                                                            \
    static void name(char *first, int64_t stride, int64_t rows, int64_t count, int64_t divisor)                    \
    {                                                                                                              \
        int64_t rest = count % (16 / (int64_t)sizeof(real)), lanes = (count - rest) * (int64_t)sizeof(real);       \
        if (divisor & (divisor - 1)) {                                                                             \
            name##_lanes(first, stride, rows, lanes, (real)divisor, 1);                                            \
            name##_ones(first + lanes, stride, rows, rest * (int64_t)sizeof(real), (real)divisor, 1);              \
        } else {                                                                                                   \
            name##_lanes(first, stride, rows, lanes, 1 / (real)divisor, 0);                                        \
            name##_ones(first + lanes, stride, rows, rest * (int64_t)sizeof(real), 1 / (real)divisor, 0);          \
        }                                                                                                          \
    }

#define STEP(name, element, real)                                                                                  \
    static inline __attribute__((always_inline)) void name(char *first, int64_t stride, int64_t rows,              \
                                                           int64_t nbytes, real by, int divides)                   \
    {                                                                                                              \
        for (char *ends = first + nbytes; first < ends; first += sizeof(element)) {                                \
            element sum = *(element *)first;                                                                       \
            for (int64_t row = 1; row < rows; row++)                                                               \
                sum += *(element *)(first + row * stride);                                                         \
            if (divides)                                                                                           \
                sum /= by;                                                                                         \
            else                                                                                                   \
                sum *= by;                                                                                         \
            for (int64_t row = 0; row < rows; row++)                                                               \
                *(element *)(first + row * stride) = sum;                                                          \
        }                                                                                                          \
    }

SUM(floats, float)
SUM(doubles, double)

void sum_of_rows(char *first, int64_t stride, int64_t rows, int64_t count, int width, int64_t divisor)
{
    (width == 4 ? floats : doubles)(first, stride, rows, count, divisor);
}

/* address, stride, rows, count, bytes of an element, divisor */
PyObject *sum_rows(PyObject *module, PyObject *arguments)
{
    unsigned long long address;
    long long stride, rows, count, width, divisor;
    if (!PyArg_ParseTuple(arguments, "KLLLLL", &address, &stride, &rows, &count, &width, &divisor))
        return NULL;
    if (rows < 1 || count < 0 || divisor < 1 || (width != 4 && width != 8)) {
        PyErr_SetString(PyExc_ValueError, "sum_rows() takes rows of floats or doubles, and a divisor");
        return NULL;
    }
    PyThreadState *thread = rows * count * width >= LONG ? PyEval_SaveThread() : NULL;
    sum_of_rows((char *)(uintptr_t)address, stride, rows, count, (int)width, divisor);
    if (thread)
        PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}
