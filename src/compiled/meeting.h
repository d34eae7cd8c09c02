/* Where all ranks of one host meet once more in the middle of a call. */
#ifndef UNISONO_MEETING_H
#define UNISONO_MEETING_H

#include "compiled.h"

typedef struct {
    PyObject_HEAD
    PyObject *page, *agreement, *comms, *said;
    uint64_t words[3], wanted[3];
} Meeting;

extern PyTypeObject *MeetingType;

int meet(Meeting *meeting);

static inline const Page *page_of(const PyObject *meeting)
{
    return (const Page *)((const Meeting *)meeting)->page;
}

#endif
