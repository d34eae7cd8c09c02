/* What the parts of unisono._compiled have in common. Each of them stands in for a class of Python, which says what it
 * does and why; src/unisono/compiled.py tells which. Calls get slower by every piece of memory that they look at: after
 * a long message little is left in the caches. So what a call needs lies together here. */
#ifndef UNISONO_COMPILED_H
#define UNISONO_COMPILED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

#ifndef __linux__
#error "time.monotonic() is another clock elsewhere"
#endif
#ifdef Py_GIL_DISABLED
#error "the global lock guards all of this"
#endif

/* A call, as `Noted`: as such, or what one is made of when somebody asks. */
typedef struct {
    PyObject *noted;
    PyObject *name, *op, *root, *code;
    long number; /* 0 of a message, whose root is the other rank */
    int last;
} Note;

enum { KEPT = 16 };

/* unisono.activity.Doing */
typedef struct {
    PyObject_HEAD
    double since;
    PyObject *record;
    char inside;
    long calls, messages;
    PyObject *awaited, *posted;
    Note now;
    unsigned kept;
    Note latest[KEPT];
} Doing;

/* unisono.transports._guarded.Guarded */
typedef struct {
    PyObject_HEAD
    PyObject *broken;
    double deadline; /* 0 for None */
} Guarded;

/* unisono.quickly.Quickly */
typedef struct {
    PyObject_HEAD
    PyObject *quick, *names, *sink, *broken, *activity, *inside;
    double limit_s;
    unsigned long owner;
    long calls;
    int whose, pending, rank;
    char closed;
} Quickly;

extern PyTypeObject *DoingType, *GuardedType;

int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type);

void doing_begin(Doing *doing, PyObject *name, PyObject *op, PyObject *root, long number);
void doing_done(Doing *doing, long number);

int may(Quickly *engine, PyObject *name);
int limit_of(Quickly *engine, PyObject *timeout, double *limit);
int end(Doing *doing);
int increment_version(PyObject *written);

PyObject *raised(void);
void raise_again(PyObject *error);
void raise_after(PyObject *earlier);
void raise_told(PyObject *error, PyObject *told);

static inline double monotonic(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
