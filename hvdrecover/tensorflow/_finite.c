/* Two operations, loaded by tf.load_op_library: HvdrecoverAreFinite says which tensors hold nothing but finite
   numbers, and HvdrecoverGate asks Python if one doesn't.

   For small tensors, TensorFlow's own operations cost many times what the numbers do, and a branch slows all
   of its graph down. TensorFlow's interface of C is stable, https://www.tensorflow.org/install/lang_c, so what
   is needed of it is declared here and found in the library that the process has loaded: this is built without
   TensorFlow. */

#include "../_finite.h"
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { FLOAT = 1, DOUBLE = 2, BOOL = 10, BFLOAT16 = 14, HALF = 19 }; /* TF_DataType */
enum { OK = 0, UNKNOWN = 2 }; /* TF_Code */

typedef struct TF_Context TF_Context;
typedef struct TF_Construction TF_Construction;
typedef struct TF_Definition TF_Definition;
typedef struct TF_Inference TF_Inference;
typedef struct TF_Kernel TF_Kernel;
typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;

/* name, type of the result, parameters */
#define FUNCTIONS(of)                                                                                         \
    of(TF_NewStatus, TF_Status *, (void))                                                                     \
    of(TF_DeleteStatus, void, (TF_Status *))                                                                  \
    of(TF_GetCode, int, (const TF_Status *))                                                                  \
    of(TF_SetStatus, void, (TF_Status *, int code, const char *message))                                      \
    of(TF_NewOpDefinitionBuilder, TF_Definition *, (const char *name))                                        \
    of(TF_OpDefinitionBuilderAddAttr, void, (TF_Definition *, const char *))                                  \
    of(TF_OpDefinitionBuilderAddInput, void, (TF_Definition *, const char *))                                 \
    of(TF_OpDefinitionBuilderAddOutput, void, (TF_Definition *, const char *))                                \
    of(TF_OpDefinitionBuilderSetIsStateful, void, (TF_Definition *, bool))                                    \
    of(TF_OpDefinitionBuilderSetShapeInferenceFunction, void,                                                 \
       (TF_Definition *, void (*infer)(TF_Inference *, TF_Status *)))                                         \
    of(TF_ShapeInferenceContextSetUnknownShape, void, (TF_Inference *, TF_Status *))                          \
    of(TF_RegisterOpDefinition, void, (TF_Definition *, TF_Status *))                                         \
    of(TF_NewKernelBuilder, TF_Kernel *,                                                                      \
       (const char *name, const char *device, void *(*create)(TF_Construction *),                             \
        void (*compute)(void *, TF_Context *), void (*end)(void *)))                                          \
    of(TF_RegisterKernelBuilder, void, (const char *name, TF_Kernel *, TF_Status *))                          \
    of(TF_OpKernelConstruction_GetAttrInt64, void, (TF_Construction *, const char *, int64_t *, TF_Status *)) \
    of(TF_OpKernelConstruction_Failure, void, (TF_Construction *, TF_Status *))                               \
    of(TF_NumInputs, int, (TF_Context *))                                                                     \
    of(TF_GetInput, void, (TF_Context *, int place, TF_Tensor **, TF_Status *))                               \
    of(TF_AllocateOutput, TF_Tensor *,                                                                        \
       (TF_Context *, int place, int type, const int64_t *shape, int dimensions, size_t bytes, TF_Status *))  \
    of(TF_OpKernelContext_Failure, void, (TF_Context *, TF_Status *))                                         \
    of(TF_TensorType, int, (const TF_Tensor *))                                                               \
    of(TF_TensorElementCount, int64_t, (const TF_Tensor *))                                                   \
    of(TF_TensorData, void *, (const TF_Tensor *))                                                            \
    of(TF_DeleteTensor, void, (TF_Tensor *))

#define DECLARE(name, result, parameters) static result(*name) parameters;
FUNCTIONS(DECLARE)

static bool find_functions(void) {
    void *library = dlopen("libtensorflow_framework.so.2", RTLD_NOLOAD | RTLD_NOW);
    if (library == NULL) {
        return false;
    }
#define FIND(name, result, parameters)                                                                        \
    *(void **)&name = dlsym(library, #name);                                                                  \
    if (name == NULL) {                                                                                       \
        return false;                                                                                         \
    }
    FUNCTIONS(FIND)
    return true;
}

static bool is_finite(const TF_Tensor *tensor) {
    const char *first = TF_TensorData(tensor);
    const int64_t count = TF_TensorElementCount(tensor);
    switch (TF_TensorType(tensor)) { /* no others are let through by the operation's definition */
    case FLOAT:
        return floats(first, count);
    case DOUBLE:
        return doubles(first, count);
    case HALF:
        return halves(first, count);
    default:
        return bfloats(first, count);
    }
}

static void fail_unless_ok(TF_Context *context, TF_Status *status) {
    if (TF_GetCode(status) != OK) {
        TF_OpKernelContext_Failure(context, status);
    }
    TF_DeleteStatus(status);
}

static void look_at_all(void *kernel, TF_Context *context) {
    (void)kernel;
    TF_Status *status = TF_NewStatus();
    const int64_t count = TF_NumInputs(context);
    TF_Tensor *output = TF_AllocateOutput(context, 0, BOOL, &count, 1, (size_t)count, status);
    for (int place = 0; place < count && TF_GetCode(status) == OK; place++) {
        TF_Tensor *input = NULL;
        TF_GetInput(context, place, &input, status);
        if (input != NULL) {
            ((bool *)TF_TensorData(output))[place] = is_finite(input);
            TF_DeleteTensor(input);
        }
    }
    if (output != NULL) {
        TF_DeleteTensor(output);
    }
    fail_unless_ok(context, status);
}

/* Asks what to do about tensors of which not all are finite: NULL to continue, or why the operation is to fail. */
typedef const char *(*question)(int64_t gate, const bool *finite, const bool *mine, int64_t count);

static question ask;

void hvdrecover_ask_by(question asked) { ask = asked; }

static void *make_gate(TF_Construction *construction) {
    TF_Status *status = TF_NewStatus();
    int64_t *number = malloc(sizeof *number);
    TF_OpKernelConstruction_GetAttrInt64(construction, "number", number, status);
    if (TF_GetCode(status) != OK) {
        TF_OpKernelConstruction_Failure(construction, status);
    }
    TF_DeleteStatus(status);
    return number;
}

static bool pass(int64_t gate, const TF_Tensor *finite, const TF_Tensor *mine, TF_Status *status) {
    const bool *flags = TF_TensorData(finite);
    const int64_t count = TF_TensorElementCount(finite);
    if (memchr(flags, false, (size_t)count) == NULL) {
        return true;
    }
    if (TF_TensorElementCount(mine) != count) {
        TF_SetStatus(status, UNKNOWN, "HvdrecoverGate: its two inputs differ in length");
        return false;
    }
    const char *failure = ask(gate, flags, TF_TensorData(mine), count);
    if (failure != NULL) {
        TF_SetStatus(status, UNKNOWN, failure);
    }
    return false;
}

static void go_through_gate(void *kernel, TF_Context *context) {
    TF_Status *status = TF_NewStatus();
    TF_Tensor *finite = NULL, *mine = NULL, *output = NULL;
    TF_GetInput(context, 0, &finite, status);
    if (TF_GetCode(status) == OK) {
        TF_GetInput(context, 1, &mine, status);
    }
    if (TF_GetCode(status) == OK) {
        output = TF_AllocateOutput(context, 0, BOOL, NULL, 0, sizeof(bool), status);
    }
    if (TF_GetCode(status) == OK) {
        *(bool *)TF_TensorData(output) = pass(*(int64_t *)kernel, finite, mine, status);
    }
    TF_Tensor *tensors[] = {finite, mine, output};
    for (int place = 0; place < 3; place++) {
        if (tensors[place] != NULL) {
            TF_DeleteTensor(tensors[place]);
        }
    }
    fail_unless_ok(context, status);
}

static void define(const char *name, const char *attribute, const char *const *inputs, const char *output,
                   bool stateful) {
    TF_Status *status = TF_NewStatus();
    TF_Definition *definition = TF_NewOpDefinitionBuilder(name);
    TF_OpDefinitionBuilderAddAttr(definition, attribute);
    for (; *inputs != NULL; inputs++) {
        TF_OpDefinitionBuilderAddInput(definition, *inputs);
    }
    TF_OpDefinitionBuilderAddOutput(definition, output);
    TF_OpDefinitionBuilderSetIsStateful(definition, stateful); /* else TensorFlow may leave it out */
    TF_OpDefinitionBuilderSetShapeInferenceFunction(definition, TF_ShapeInferenceContextSetUnknownShape);
    TF_RegisterOpDefinition(definition, status);
    TF_DeleteStatus(status);
}

static void implement(const char *name, TF_Kernel *kernel) {
    TF_Status *status = TF_NewStatus();
    TF_RegisterKernelBuilder(name, kernel, status);
    TF_DeleteStatus(status);
}

__attribute__((constructor)) static void register_operations(void) {
    if (!find_functions()) {
        return; /* Python sees that there are no operations */
    }
    const char *look = "HvdrecoverAreFinite", *gate = "HvdrecoverGate";
    const char *const to_look_at[] = {"tensors: T", NULL};
    const char *const to_go_through[] = {"finite: bool", "mine: bool", NULL};
    define(look, "T: list({half, bfloat16, float, double}) >= 1", to_look_at, "finite: bool", false);
    implement(look, TF_NewKernelBuilder(look, "CPU", NULL, look_at_all, NULL));
    define(gate, "number: int", to_go_through, "good: bool", true);
    implement(gate, TF_NewKernelBuilder(gate, "CPU", make_gate, go_through_gate, free));
}
