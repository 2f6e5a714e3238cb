/* Whether small tensors hold nothing but finite numbers.

   For those the operations of a framework cost many times what the numbers do. DLPack says where numbers are,
   by a table of functions that a class of tensors offers: https://dmlc.github.io/dlpack/latest/c_api.html. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include "../_finite.h"
#include <Python.h>

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
    int (*describe)(void *object, tensor *found); /* lends what it finds; not zero, and raises, if there is none */
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
