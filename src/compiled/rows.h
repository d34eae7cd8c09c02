/* Sums of rows of memory: unisono.transports. */
#ifndef UNISONO_ROWS_H
#define UNISONO_ROWS_H

#include "compiled.h"

void sum_of_rows(char *first, int64_t stride, int64_t rows, int64_t count, int width, int64_t divisor);

#endif
