"""Checks of gradients that two ranks make together; rank 0 prints one line of JSON for each.

::

    horovodrun -np 2 python tensorflow_gradients.py first|all

``first`` is one variant of each check, in a graph; tracing it takes seconds.

Each rank has one half of a batch. What comes of both is compared with what this process computes alone, from
the whole batch, without Horovod.
"""

import functools
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.averaging import Reduction

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(16, 3)).astype(np.float32)
Y = GENERATOR.integers(0, 2, size=16)
WORDS = GENERATOR.integers(0, 10, size=(16, 3))
CLOSE = 1e-5  # of sums of float32 in another order
CLOSE_HALF = 2e-3  # of float16
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=8.0),
}
OPTIONS: dict[str, tuple[dict[str, Any], float, float]] = {
    # options, what they multiply the gradients with, tolerance
    "default": ({}, 1.0, CLOSE),
    "fp16": ({"compression": hvd.Compression.fp16}, 1.0, CLOSE_HALF),
    "sum": ({"op": hvd.Sum}, 2.0, CLOSE),
    "predivided": ({"gradient_predivide_factor": 4.0}, 1.0, CLOSE),
    "sparse_as_dense": ({"sparse_as_dense": True}, 1.0, CLOSE),
}
TWO_PASSES = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
CHECKS: dict[str, Callable[["Findings"], None]] = {}
FIRST: list[str] = []  # those that always run


class Findings:
    """The problems that a check found on this rank; it continues, so that ranks stay in step."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def expect(self, good: Any, problem: str) -> None:
        if not good:
            self.problems.append(problem)

    def close(self, what: str, got: Any, expected: Any, tolerance: float = CLOSE) -> None:
        """Expect arrays to be close to others, and not to be 0."""
        for place, (one, other) in enumerate(zip(arrays(got), arrays(expected), strict=True)):
            self.expect(
                one.shape == other.shape and np.allclose(one, other, rtol=tolerance, atol=tolerance),
                f"{what}[{place}]: {one.tolist()} instead of {other.tolist()}",
            )
            self.expect(np.any(other), f"{what}[{place}]: nothing but zeros shows nothing")

    def same_everywhere(self, what: str, got: Any) -> None:
        """Expect arrays to be the same on all ranks, to the last bit."""
        bits = [array.tobytes() for array in arrays(got)]
        everybodys = hvd.allgather_object(bits, name="same")
        self.expect(all(each == everybodys[0] for each in everybodys), f"{what}: the ranks differ")


def arrays(values: Any) -> list[np.ndarray]:
    return [np.asarray(tf.convert_to_tensor(value)) for value in values]


def check(function: Callable[[Findings], None]) -> Callable[[Findings], None]:
    CHECKS[function.__name__] = function
    FIRST.append(function.__name__)
    return function


def check_each(**variants: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One check for each value of the only argument, eagerly and in a function."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        ((argument, values),) = variants.items()
        FIRST.append(f"{function.__name__}-{next(iter(values))}-graph")
        for value in values:
            for graph in (False, True):
                name = f"{function.__name__}-{value}-{'graph' if graph else 'eager'}"
                CHECKS[name] = functools.partial(function, graph=graph, **{argument: value})
        return function

    return register


def half(data: np.ndarray) -> np.ndarray:
    size = len(data) // hvd.size()
    return data[hvd.rank() * size : (hvd.rank() + 1) * size]


def a_model(*, embedding: bool = False) -> keras.Model:
    """A small model, always of the same weights."""
    first = [keras.layers.Embedding(10, 2), keras.layers.Flatten()] if embedding else []
    model = keras.Sequential([*first, keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
    model.build((None, 3))
    for place, variable in enumerate(model.trainable_variables):
        count = int(np.prod(variable.shape))
        variable.assign(np.linspace(-1, 1 + place, count).reshape(variable.shape))
    return model


def loss_of(model: keras.Model, x: Any, y: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))


def plain(tape: tf.GradientTape) -> tf.GradientTape:
    return tape


def averaging(way: str, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """An optimizer, and what makes a tape for it; one of the two averages gradients."""
    if way == "tape":
        return optimizer, functools.partial(recover.DistributedGradientTape, **options)
    return recover.DistributedOptimizer(optimizer, **options), plain


def step_of(model: keras.Model, optimizer: Any, tape_of: Any = plain) -> Callable[..., None]:
    def step(x: Any, y: Any, factor: Any = 1.0) -> None:
        with tape_of(tf.GradientTape()) as tape:
            loss = optimizer.scale_loss(factor * loss_of(model, x, y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    return step


def train(model: keras.Model, optimizer: Any, batches: Any, *, graph: bool, tape_of: Any = plain) -> Any:
    step = step_of(model, optimizer, tape_of)
    run = tf.function(step) if graph else step
    for x, y in batches:
        run(tf.constant(x), tf.constant(y))
    return model.trainable_variables, optimizer.variables


def compare(found: Findings, got: Any, expected: Any) -> None:
    for what, mine, right in zip(("weight", "slot"), got, expected, strict=True):
        found.same_everywhere(what, mine)
        moving = [place for place, each in enumerate(arrays(right)) if np.any(each)]
        found.expect(len(moving) > 1, f"{what}: almost all of them are zeros")
        found.close(what, [mine[place] for place in moving], [right[place] for place in moving])


FIRST.append("tape_or_optimizer-sgd-eager")


@check_each(kind=OPTIMIZERS)
def tape_or_optimizer(found: Findings, kind: str, graph: bool) -> None:
    """As a single process on the concatenated batch."""
    expected = train(a_model(), OPTIMIZERS[kind](), [(X, Y)] * 3, graph=graph)
    for way in ("tape", "optimizer"):
        optimizer, tape_of = averaging(way, OPTIMIZERS[kind]())
        got = train(a_model(), optimizer, [(half(X), half(Y))] * 3, graph=graph, tape_of=tape_of)
        compare(found, got, expected)


def gradients_of(model: keras.Model, x: Any, y: Any, *, graph: bool, tape_of: Any = plain) -> Any:
    def step() -> Any:
        with tape_of(tf.GradientTape()) as tape:
            loss = loss_of(model, x, y)
        return tape.gradient(loss, model.trainable_variables)

    return (tf.function(step) if graph else step)()


@check_each(name=OPTIONS)
def option(found: Findings, name: str, graph: bool) -> None:
    """Dense and sparse gradients. The steps of plain SGD show the gradients that an optimizer applies."""
    options, factor, tolerance = OPTIONS[name]
    model = a_model(embedding=True)
    expected = gradients_of(model, WORDS, Y, graph=graph)
    found.expect(isinstance(expected[0], tf.IndexedSlices), "the embedding has a dense gradient")
    exact = [factor * gradient for gradient in arrays(expected)]
    tape_of = functools.partial(recover.DistributedGradientTape, **options)
    averages = gradients_of(model, half(WORDS), half(Y), graph=graph, tape_of=tape_of)
    sparse = isinstance(averages[0], tf.IndexedSlices)
    found.expect(sparse == (name != "sparse_as_dense"), f"sparse: {sparse}")
    before = arrays(model.trainable_variables)
    optimizer = recover.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    weights, _ = train(model, optimizer, [(half(WORDS), half(Y))], graph=graph)
    steps = [one - other for one, other in zip(before, arrays(weights), strict=True)]
    for what, got in (("gradient", averages), ("step", steps)):
        found.close(what, got, exact, tolerance)
        found.same_everywhere(what, got)
        if name == "fp16":  # dense gradients are rounded; those of an embedding are sent as they are
            for one, other in zip(arrays(got)[1:], exact[1:], strict=True):
                found.expect(not np.allclose(one, other, rtol=1e-5, atol=0), f"not compressed: {one}")


@check_each(way=["tape", "optimizer"])
def groups_of_variables(found: Findings, way: str, graph: bool) -> None:
    """A number of them, or lists of some variables in another order; all others are a group, too."""
    for number in (2, 3):
        model = a_model()
        variables = model.trainable_variables
        groups = 2 if number == 2 else [[variables[3], variables[0]], [variables[1]]]
        expected = gradients_of(model, X, Y, graph=graph)
        before = arrays(variables)
        optimizer, tape_of = averaging(way, keras.optimizers.SGD(1.0), groups=groups)
        optimizer.build(variables)
        step = step_of(model, optimizer, tape_of)
        data = tf.constant(half(X)), tf.constant(half(Y))
        if graph:
            step = tf.function(step)
            operations = step.get_concrete_function(*data).graph.get_operations()
            count = [operation.type for operation in operations].count("HorovodGroupedAllreduce")
            found.expect(count == number, f"{count} groups instead of {number}")
        step(*data)
        steps = [one - other for one, other in zip(before, arrays(variables), strict=True)]
        found.close("step", steps, expected)
        found.same_everywhere("weight", variables)


TARGET = GENERATOR.normal(size=(16, 4))


def normalized_steps(kind: Any, x: Any, target: Any, *, graph: bool, tape_of: Any = plain) -> list[Any]:
    """Train two layers of batch normalization without names; return all variables."""
    dense = keras.layers.Dense(4, use_bias=False, dtype="float64")
    layers = [kind(epsilon=0.01, momentum=0.9, dtype="float64") for _ in range(2)]
    model = keras.Sequential([dense, *layers])
    model.build((None, 3))
    dense.kernel.assign(np.linspace(-1, 2, 12).reshape(3, 4))
    optimizer = keras.optimizers.SGD(0.25)

    def step(inputs: Any, outputs: Any) -> None:
        with tape_of(tf.GradientTape()) as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - outputs))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    run = tf.function(step) if graph else step
    for _ in range(3):
        run(tf.constant(x, "float64"), tf.constant(target))
    variables: list[Any] = model.variables
    return variables


@check_each(what=["layers"])
def sync_batch_norm(found: Findings, what: str, graph: bool) -> None:
    """As Keras's own layers with the whole batch."""
    tape_of, kind = recover.DistributedGradientTape, recover.SyncBatchNormalization
    got = normalized_steps(kind, half(X), half(TARGET), graph=graph, tape_of=tape_of)
    expected = normalized_steps(keras.layers.BatchNormalization, X, TARGET, graph=graph)
    found.close("variable", got, expected, 1e-12)
    found.same_everywhere("variable", got)


@check_each(how=["copied", "in_place", "broadcast_"])
def broadcast_of_variables(found: Findings, how: str, graph: bool) -> None:
    """TensorFlow's and Keras's, of two dtypes; and no others."""
    mine, roots = np.random.default_rng(hvd.rank()), np.random.default_rng(1)
    kinds = [
        (keras.Variable, "float32", (3, 4)),
        (tf.Variable, "float64", (2,)),
        (keras.Variable, "float64", ()),
    ]
    variables = [kind(mine.normal(size=shape), dtype=dtype) for kind, dtype, shape in kinds]
    expected = [roots.normal(size=shape).astype(dtype) for _, dtype, shape in kinds]
    model = a_model()
    if hvd.rank() == 0:
        model.set_weights([0 * each for each in model.get_weights()])
    another = keras.Variable(float(hvd.rank() + 1))

    def send() -> None:
        if how == "broadcast_":
            recover.broadcast_(variables, 1)
            recover.broadcast_(model.variables, 1, "models")
        else:
            recover.broadcast_variables([*variables, *model.variables], 1, inplace=how == "in_place")

    (tf.function(send) if graph else send)()
    found.expect(
        all(np.array_equal(*pair) for pair in zip(arrays(variables), expected, strict=True)),
        f"{arrays(variables)} instead of {expected}",
    )
    found.close("weight", model.variables, a_model().variables, 0.0)
    found.expect(float(another) == hvd.rank() + 1, "one that was not to be sent has changed")


@check_each(kind=[*OPTIMIZERS, "sparse"])
def several_passes(found: Findings, kind: str, graph: bool) -> None:
    """Two passes on each rank: as a single process on all four quarters. Sparse gradients become dense."""
    inputs, of_words = (WORDS, True) if kind == "sparse" else (X, False)
    make = OPTIMIZERS.get(kind, OPTIMIZERS["sgd"])
    optimizer = recover.DistributedOptimizer(make(), **TWO_PASSES)
    x, y = half(inputs), half(Y)
    quarters = [(x[:4], y[:4]), (x[4:], y[4:])]
    got = train(a_model(embedding=of_words), optimizer, quarters * 3, graph=graph)
    expected = train(a_model(embedding=of_words), make(), [(inputs, Y)] * 3, graph=graph)
    compare(found, got, expected)


@check_each(what=["tape"])
def variables_of_all_kinds(found: Findings, what: str, graph: bool) -> None:
    """TensorFlow's and Keras's, of two dtypes, one of them unused."""
    variables = [
        tf.Variable([1.0, 2.0], dtype=tf.float64),
        keras.Variable([1.0, 2.0], dtype="float32"),
        tf.Variable([5.0]),
        tf.Variable([3.0, 4.0]),
        keras.Variable([3.0, 4.0], dtype="float64"),
    ]
    factor = hvd.rank() + 1.0

    def step() -> Any:
        with tf.GradientTape() as tape:
            used = [tf.cast(tf.convert_to_tensor(variables[place]), tf.float64) for place in (0, 1, 3, 4)]
            loss = tf.add_n([tf.reduce_sum(factor * value**2) for value in used])
        return recover.DistributedGradientTape(tape).gradient(loss, variables)

    got = (tf.function(step) if graph else step)()
    found.expect(got[2] is None, "an unused variable has a gradient")
    given = [gradient for gradient in got if gradient is not None]
    found.expect(
        [gradient.dtype.name for gradient in given] == ["float64", "float32", "float32", "float64"],
        str(given),
    )
    found.close("gradient", given, [[3.0, 6.0], [3.0, 6.0], [9.0, 12.0], [9.0, 12.0]])


@check_each(how=["in_a_row", "in_functions", "in_a_loop"])
def the_same_variables_twice_at_once(found: Findings, how: str, graph: bool) -> None:
    """Nothing in the data orders the two; neither may be taken for the other."""
    variable = tf.Variable(tf.ones([1000]))

    def gradient(factor: tf.Tensor) -> Any:
        with recover.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(factor * variable)
        return tape.gradient(loss, variable)

    nested = tf.function(gradient) if how == "in_functions" else gradient

    def both(factor: tf.Tensor) -> Any:
        if how == "in_a_loop":
            each = tf.TensorArray(tf.float32, 2)
            for place in tf.range(2):
                each = each.write(place, nested(tf.cast(place + 1, tf.float32) * factor))
            return tf.unstack(each.stack(), 2)
        return nested(factor), nested(2.0 * factor)

    run = tf.function(both) if graph else both
    for _ in range(20):
        got = run(tf.constant(hvd.rank() + 1.0))
        found.close("gradient", got, [[1.5] * 1000, [3.0] * 1000])


FIRST_HALVES = np.r_[0:4, 8:12]  # of the whole batch: the first halves of both ranks' halves


def choosing_step(way: str, model: keras.Model, optimizer: Any, traces: list[bool]) -> Any:
    """A step function that may be told not to reduce; and what it was told whenever it was traced."""

    @tf.function
    def step(x: Any, y: Any, reduce: bool = True) -> Any:
        traces.append(reduce)
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        if reduce:
            if way == "tape":
                tape = recover.DistributedGradientTape(tape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


@check
def traced_again(found: Findings) -> None:
    """Without the reduction at first, as Horovod's docs have it; then with it; then for another shape."""
    x, y = half(X), half(Y)
    expected = train(a_model(), OPTIMIZERS["sgd"](), [(X, Y), (X[FIRST_HALVES], Y[FIRST_HALVES])], graph=True)
    for way in ("tape", "optimizer", "passes"):
        model, optimizer, passes = a_model(), OPTIMIZERS["sgd"](), 2 if way == "passes" else 1
        if way != "tape":
            optimizer = recover.DistributedOptimizer(optimizer, **(TWO_PASSES if passes == 2 else {}))
        optimizer.build(model.trainable_variables)
        traces: list[bool] = []
        step = choosing_step(way, model, optimizer, traces)
        step(tf.constant(x), tf.constant(y), reduce=False)
        for count in (8, 4):
            for part in np.split(np.arange(count), passes):
                step(tf.constant(x[part]), tf.constant(y[part]))
        found.expect(traces == [False, True, True], f"{way}: traced {traces}")
        compare(found, (model.trainable_variables, optimizer.variables), expected)


def a_history() -> None:
    """Do what a process may have done before: it shifts Keras's and TensorFlow's numbers."""
    model = a_model(embedding=True)
    for graph in (False, True):
        train(model, keras.optimizers.Adam(0.1), [(WORDS, Y)], graph=graph)
    tf.Variable([1.0])


@check_each(kind=["adam"])
def ranks_of_different_histories(found: Findings, kind: str, graph: bool) -> None:
    """Collectives find their peers, whatever else was made on one of the ranks."""
    if hvd.rank() == 1:
        a_history()
    before = [layer.name for layer in a_model().layers]
    found.expect(len(set(map(tuple, hvd.allgather_object(before)))) == 2, "Keras gave the same names")
    optimizer = recover.DistributedOptimizer(OPTIMIZERS[kind]())
    got, _ = train(a_model(embedding=True), optimizer, [(half(WORDS), half(Y))] * 3, graph=graph)
    expected, _ = train(a_model(embedding=True), OPTIMIZERS[kind](), [(WORDS, Y)] * 3, graph=graph)
    found.same_everywhere("weight", got)
    found.close("weight", got, expected)


@check_each(way=["tape", "optimizer"])
def infinite_gradients_on_one_rank(found: Findings, way: str, graph: bool) -> None:
    """Both skip the step and halve the scale; and both continue."""
    optimizer, tape_of = averaging(way, OPTIMIZERS["loss_scale"]())
    model = a_model()
    step = step_of(model, optimizer, tape_of)
    run = tf.function(step) if graph else step
    before = arrays(model.trainable_variables)
    run(half(X), half(Y), tf.constant(np.inf if hvd.rank() == 1 else 1.0, tf.float32))
    skipped = arrays(model.trainable_variables)
    found.expect(all(map(np.array_equal, before, skipped)), "the step was not skipped")
    found.expect(float(optimizer.dynamic_scale) == 4.0, f"the scale is {float(optimizer.dynamic_scale)}")
    run(half(X), half(Y), tf.constant(1.0))
    found.same_everywhere("weight", model.trainable_variables)
    found.same_everywhere("slot", optimizer.variables)
    after = arrays(model.trainable_variables)
    found.expect(not any(map(np.array_equal, before, after)), "the next step was skipped, too")


def compiled(optimizer: Any, **options: Any) -> keras.Model:
    model = a_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **{"jit_compile": False, **options})
    return model


class Logs(keras.callbacks.Callback):
    """Keeps what an epoch's end brings, and this rank's own metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, float]] = []
        self.own: list[dict[str, float]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs or {}))
        self.own.append({name: float(value) for name, value in self.model.get_metrics_result().items()})


@check
def fit_with_compilation_left_to_keras(found: Findings) -> None:
    """Two epochs, as a single process that has the batches of both ranks.

    Keras compiles where it finds an accelerator; here it is made to believe so.
    """
    optimizer, reference = recover.DistributedOptimizer(OPTIMIZERS["adam"]()), OPTIMIZERS["adam"]()
    model = compiled(optimizer, metrics=["accuracy"], jit_compile="auto")
    alone = compiled(reference, metrics=["accuracy"])
    state = recover.TensorFlowKerasState(model, optimizer, epoch=0, batch=0)
    before, after = Logs(), Logs()
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    callbacks = [before, *recover.fit_callbacks(state), after]
    with mock.patch.object(keras.Model, "_resolve_auto_jit_compile", lambda model: True):
        model.fit(half(X), half(Y), batch_size=4, callbacks=callbacks, **options)
    order = [index for start in (0, 4) for rank in (0, 8) for index in range(rank + start, rank + start + 4)]
    alone.fit(X[order], Y[order], batch_size=8, **options)
    compare(
        found,
        (model.trainable_variables, optimizer.variables),
        (alone.trainable_variables, reference.variables),
    )
    everybodys = hvd.allgather_object((after.own, after.logs))
    found.expect(everybodys[0][0] != everybodys[1][0], f"both ranks had the same metrics: {after.own}")
    found.expect(before.logs == after.logs, f"they differ before our callbacks: {before.logs}")
    found.expect(everybodys[0][1] == everybodys[1][1], f"the averages differ: {everybodys}")
    for epoch, logs in enumerate(after.logs):
        found.expect(logs.keys() == {"loss", "accuracy"}, str(logs))
        for name, value in logs.items():
            mean = np.mean([each[0][epoch][name] for each in everybodys])
            found.expect(np.isclose(value, mean, rtol=1e-12), f"{name}: {value} is not the average {mean}")


@check
def compilation_without_callbacks_is_refused(found: Findings) -> None:
    """Before XLA gets to see it."""
    variable = tf.Variable([1.0])

    @tf.function(jit_compile=True)
    def step() -> Any:
        return Reduction()([tf.constant([1.0])], [variable])

    model = compiled(recover.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True)
    for run in (step, lambda: model.fit(half(X), half(Y), verbose=0)):
        try:
            run()
        except Exception as error:  # AutoGraph makes its own of it where it has converted the function
            found.expect("ConfigError" in f"{type(error)} {error}", traceback.format_exc())
            found.expect("pass jit_compile=False" in str(error), str(error))
        else:
            found.expect(False, "nothing was said")


@check
def fit_that_a_callback_of_one_rank_ends(found: Findings) -> None:
    model = compiled(recover.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    state = recover.TensorFlowKerasState(model, epoch=0, batch=0)

    def stop(epoch: int, logs: Any) -> None:
        model.stop_training = epoch == 1 and hvd.rank() == 1

    stops = keras.callbacks.LambdaCallback(on_epoch_end=stop)
    model.fit(half(X), half(Y), epochs=4, verbose=0, callbacks=[*recover.fit_callbacks(state), stops])
    found.expect(state.epoch == 2, f"it continued to epoch {state.epoch}")


@check
def fit_with_a_callback_that_one_rank_lacks(found: Findings) -> None:
    model = compiled(recover.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    state = recover.TensorFlowKerasState(model, epoch=0, batch=0)
    others = [keras.callbacks.ReduceLROnPlateau("loss")] if hvd.rank() == 0 else []
    try:
        model.fit(half(X), half(Y), verbose=0, callbacks=[*recover.fit_callbacks(state), *others])
    except ConfigError as error:
        found.expect("rank 1 has no ReduceLROnPlateau" in str(error), str(error))
    else:
        found.expect(False, "nothing was said")


def run(name: str) -> None:
    """Run a check on all ranks, and tell its outcome."""
    found = Findings()
    try:
        CHECKS[name](found)
    except Exception:
        found.problems.append(traceback.format_exc())
    problems = hvd.allgather_object(found.problems, name="problems")
    if hvd.rank() == 0:
        everybodys = [f"rank {rank}: {each}"[:4000] for rank, own in enumerate(problems) for each in own]
        print("outcome", json.dumps({"check": name, "problems": everybodys}), flush=True)


if __name__ == "__main__":
    hvd.init()
    keras.utils.set_random_seed(0)
    for each in CHECKS if sys.argv[1] == "all" else FIRST:
        run(each)
