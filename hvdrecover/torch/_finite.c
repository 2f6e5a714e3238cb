/* Whether small tensors hold nothing but finite numbers.

   For small tensors, calling a framework costs far more than looking at the numbers. DLPack says where they are,
   by a table of functions that a class of tensors offers: https://dmlc.github.io/dlpack/latest/c_api.html. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

/* Infinity and NaN are the numbers with all bits of the exponent set. To add the lowest of them then carries into the
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

enum { MAJOR = 1, CPU = 1, FLOAT = 2, BFLOAT = 4, LARGE = 1 << 16 };

typedef struct {
    char *data;
    int32_t device, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* in numbers, not bytes */
    uint64_t byte_offset;
} tensor;

typedef struct {
    uint32_t major, minor;
    void *older, *allocate, *share, *take;
    int (*describe)(void *object, tensor *found); /* fills in borrowed pointers; non-zero, and raises, on an error */
    void *stream;
} functions;

static bool is_contiguous(const tensor *each, int64_t *numbers) {
    *numbers = 1;
    for (int place = each->ndim; place-- > 0; *numbers *= each->shape[place]) {
        if (each->strides && each->shape[place] > 1 && each->strides[place] != *numbers) {
            return false;
        }
    }
    return true;
}

typedef bool (*look)(const char *first, int64_t count);

static look look_for(const tensor *each) {
    if (each->device != CPU || each->lanes != 1) {
        return NULL;
    }
    if (each->code == BFLOAT) {
        return each->bits == 16 ? bfloats : NULL;
    }
    if (each->code != FLOAT) {
        return NULL;
    }
    return each->bits == 32 ? floats : each->bits == 64 ? doubles : each->bits == 16 ? halves : NULL;
}

static PyObject *are_finite(PyObject *module, PyObject *const *arguments, Py_ssize_t count_arguments) {
    if (count_arguments < 1) {
        PyErr_SetString(PyExc_TypeError, "no table of functions");
        return NULL;
    }
    const functions *offered = PyCapsule_GetPointer(arguments[0], "dlpack_exchange_api");
    if (offered == NULL) {
        return NULL;
    }
    if (offered->major != MAJOR || offered->describe == NULL) {
        Py_RETURN_NONE;
    }
    bool finite = true;
    for (Py_ssize_t place = 1; finite && place < count_arguments; place++) {
        tensor each;
        int64_t count;
        if (Py_IsNone(arguments[place])) {
            continue;
        }
        if (offered->describe(arguments[place], &each)) {
            PyErr_Clear();
            Py_RETURN_NONE;
        }
        look go_through = look_for(&each);
        if (go_through == NULL || !is_contiguous(&each, &count)) {
            Py_RETURN_NONE;
        }
        if (count < LARGE) {
            finite = go_through(each.data + each.byte_offset, count);
        } else {
            Py_BEGIN_ALLOW_THREADS;
            finite = go_through(each.data + each.byte_offset, count);
            Py_END_ALLOW_THREADS;
        }
    }
    return PyBool_FromLong(finite);
}

static PyMethodDef methods[] = {
    {"are_finite", (PyCFunction)(void (*)(void))are_finite, METH_FASTCALL,
     "are_finite(table, *tensors): whether tensors hold finite numbers only, as None does; None if one is not\n"
     "dense, not on the CPU, or not of floats. The table is that of the tensors' class, __dlpack_c_exchange_api__."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_finite", NULL, 0, methods};

PyMODINIT_FUNC PyInit__finite(void) { return PyModuleDef_Init(&module); }
