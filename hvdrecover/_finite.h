/* Whether dense arrays hold nothing but finite numbers. */

#ifndef HVDRECOVER_FINITE_H
#define HVDRECOVER_FINITE_H

#include <stdbool.h>
#include <stdint.h>

/* Infinity and NaN are what has all bits of the exponent set. To add the lowest of them then carries into the
   sign's place, and nowhere else does, so that a compiler can go through many numbers at once. */
#define ARE_FINITE(type, first, count, exponent)                                                              \
    do {                                                                                                      \
        const type mask = (type)(exponent), lowest = mask & -mask;                                            \
        type carried = 0;                                                                                     \
        for (int64_t at = 0; at < count; at++) {                                                              \
            carried |= (type)((((const type *)first)[at] & mask) + lowest);                                   \
        }                                                                                                     \
        return !(carried >> (8 * sizeof(type) - 1));                                                          \
    } while (0)

/* Compiled for the vectors that all x86 processors have, and for those that most have: twice as fast, as long
   as the numbers are in a cache. The one that fits is chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif

VECTORS static bool floats(const char *first, int64_t count) {
    ARE_FINITE(uint32_t, first, count, 0x7F800000);
}

VECTORS static bool doubles(const char *first, int64_t count) {
    ARE_FINITE(uint64_t, first, count, 0x7FF0000000000000);
}

VECTORS static bool halves(const char *first, int64_t count) {
    ARE_FINITE(uint16_t, first, count, 0x7C00);
}

VECTORS static bool bfloats(const char *first, int64_t count) {
    ARE_FINITE(uint16_t, first, count, 0x7F80);
}

#endif
