/* unisono.transports._shm_ahead: ranks tell how much of their rows lies ready; whoever has time sums it. */
#include "rows.h"

/* A word for each rank, in a line of its own: OPEN, the number of the reduction, and how many bytes are ready. */
enum { LINE = 64, BYTES_BITS = 40, NUMBER_BITS = 23 };

/* One word for all: the number of the reduction, whether nothing more may be claimed before all have come, whether the sums
 * are divided, and how many pieces are claimed. */
static const uint64_t STOPPED = 1u << 31, DIVIDED = 1u << 30, PIECES = (1u << 30) - 1;

static _Atomic uint64_t *word(unsigned long long ledger, long long line)
{
    return (_Atomic uint64_t *)(uintptr_t)(ledger + (unsigned long long)(LINE * line));
}

/* The claims of this reduction; those of an earlier one are none. */
static uint64_t claims_of(uint64_t found, uint32_t number)
{
    return found >> 32 == number ? found & UINT32_MAX : 0;
}

static int all_ready(unsigned long long ledger, long long rows, uint32_t number, int64_t nbytes)
{
    uint64_t tag = 1u << NUMBER_BITS | (number & ((1u << NUMBER_BITS) - 1));
    for (long long row = 0; row < rows; row++) {
        uint64_t found = atomic_load(word(ledger, row));
        if (found >> BYTES_BITS != tag || (int64_t)(found & ((1ull << BYTES_BITS) - 1)) < nbytes)
            return 0;
    }
    return 1;
}

/* address, stride, rows, bytes of a row, bytes of an element, divisor, ledger, number, bytes of a piece, whether all ranks
 * have come; returns whether anything was summed */
PyObject *sum_ahead(PyObject *module, PyObject *arguments)
{
    unsigned long long address, ledger;
    long long stride, rows, nbytes, width, divisor, number, piece;
    int all, any = 0;
    if (!PyArg_ParseTuple(arguments, "KLLLLLKLLp", &address, &stride, &rows, &nbytes, &width, &divisor, &ledger, &number,
                          &piece, &all))
        return NULL;
    if (rows < 1 || nbytes < 0 || divisor < 1 || (width != 4 && width != 8) || piece < 16 || piece % 16) {
        PyErr_SetString(PyExc_ValueError, "sum_ahead() takes rows of floats or doubles, a divisor, and pieces of 16 bytes");
        return NULL;
    }
    PyThreadState *thread = PyEval_SaveThread();
    _Atomic uint64_t *claims = word(ledger, rows);
    uint64_t mine = divisor > 1 ? DIVIDED : 0, found = atomic_load(claims);
    for (;;) {
        uint64_t now = claims_of(found, (uint32_t)number);
        int64_t from = (int64_t)(now & PIECES) * piece, to = from + piece < nbytes ? from + piece : nbytes;
        if (from >= nbytes)
            break;
        if (!all && ((now & STOPPED) || ((now & PIECES) && (now & DIVIDED) != mine) ||
                     !all_ready(ledger, rows, (uint32_t)number, to)))
            break;
        uint64_t claimed = (uint64_t)(uint32_t)number << 32 | mine | ((now & PIECES) + 1);
        if (!atomic_compare_exchange_strong(claims, &found, claimed))
            continue;
        sum_of_rows((char *)(uintptr_t)address + from, stride, rows, (to - from) / width, (int)width, divisor);
        found = claimed;
        any = 1;
    }
    PyEval_RestoreThread(thread);
    return PyBool_FromLong(any);
}

/* ledger, rows, number; from now on nobody claims anything before all ranks have come. Returns how many pieces were claimed,
 * and whether they are divided. */
PyObject *stop_sums(PyObject *module, PyObject *arguments)
{
    unsigned long long ledger;
    long long rows, number;
    if (!PyArg_ParseTuple(arguments, "KLL", &ledger, &rows, &number))
        return NULL;
    _Atomic uint64_t *claims = word(ledger, rows);
    uint64_t found = atomic_load(claims), now;
    do {
        now = claims_of(found, (uint32_t)number) | STOPPED;
    } while (!atomic_compare_exchange_strong(claims, &found, (uint64_t)(uint32_t)number << 32 | now));
    return PyLong_FromUnsignedLongLong(now & ~STOPPED);
}
