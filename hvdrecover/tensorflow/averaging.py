"""Gradients averaged across the ranks. One reduction has these steps:

1. If a guard looks at gradients, note whether this rank's own gradients are finite, for its report.
2. Fill in zeros for gradients that this rank lacks: otherwise the other ranks would wait in the allreduce.
3. Reduce all dense gradients of one dtype as one group, in the order of the program. So sums are made in the
   same order in each run, and a resumed run is equal to the last bit. With the gradients goes a number for
   each variable: on how many ranks its gradient is missing or present.
4. Gather the slices of sparse gradients.
5. If gradients are missing on some ranks only, raise an error that names ranks and variables.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled

from hvdrecover import config
from hvdrecover.errors import ConfigError, MissingGradientError
from hvdrecover.guard.comparison import first_lines, named
from hvdrecover.scalars import Scalars
from hvdrecover.state.adapter import gather_json
from hvdrecover.tensorflow.collectives import (
    TensorFlowWorld,
    counter,
    in_python,
    refuse_xla,
    taking_what,
    xla_compiles,
)
from hvdrecover.tensorflow.variables import (
    Gradient,
    Layers,
    Variable,
    is_variable,
    name_of,
    raw,
    weights_of,
    without_numbers,
)
from hvdrecover.virtual import ranks

_KEEPING_OPS = (hvd.Average, hvd.Sum, hvd.Max)  # the result of a number that is not 0 somewhere is not 0
_DTYPES = (tf.float16, tf.float32, tf.float64)  # dtypes of gradients that Horovod can reduce
_SLICES = "_hvdrecover_slices"  # attribute of a variable: the dtypes of its last sparse gradient
_OWN = "_hvdrecover_own_gradients"  # attribute of a graph


@dataclass
class Reduction:
    """The reduction of gradients; the attributes are keywords of Horovod's, of the same meaning.

    Attributes:
        op: ``hvd.Average``, ``hvd.Sum``, ….
        compression: of ``hvd.Compression``; ``hvd.Compression.fp16`` sends half of the bytes.
        gradient_predivide_factor: divides gradients before the sum; the sum is multiplied by it.
        groups: a number of groups of about equal size, or a list of groups of variables, with all others as a
            group of their own; None for one group of all dense gradients of a dtype.
        sparse_as_dense: make sparse gradients dense first. Others are gathered.
        device_dense: the device for collectives of dense gradients; ``""`` leaves it to TensorFlow.
        device_sparse: the device for those of sparse gradients.
        name: begins the names of collectives.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        local: variables whose gradients each rank keeps for itself, by their identity.

    Args:
        num_groups: ``groups``, if that is None.
        process_set: must be of all ranks.
    """

    op: Any = hvd.Average
    compression: Any = hvd.Compression.none
    gradient_predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[Variable]] | None = None
    sparse_as_dense: bool = False
    device_dense: str = ""
    device_sparse: str = ""
    name: str | None = None
    scale_local_gradients: bool = True
    num_groups: InitVar[int] = 0
    process_set: InitVar[Any] = hvd.global_process_set
    local: dict[int, Variable] = field(default_factory=dict, init=False)

    def __post_init__(self, num_groups: int, process_set: Any) -> None:
        if self.groups is None and num_groups:
            self.groups = num_groups
        if isinstance(self.groups, int):
            if self.groups < 1:
                raise ConfigError("groups", f"must be an integer ≥ 1, got {self.groups}")
        elif not all(is_variable(each) for group in self.groups or [] for each in group):
            raise ConfigError("groups", "must be a number of groups, or a list of lists of variables")
        if self.gradient_predivide_factor != 1.0 and self.op != hvd.Average:
            problem = "it divides what is averaged; pass op=hvd.Average, or leave it out"
            raise ConfigError("gradient_predivide_factor", problem)
        if process_set.process_set_id != 0:
            raise ConfigError(
                "process_set",
                "gradients are reduced over all ranks, as all recover together; for some of them call "
                "hvd.grouped_allreduce(gradients, process_set=...) in a loop of your own",
            )

    def keep_local(self, variables: Sequence[Variable]) -> None:
        self.local.update((id(raw(variable)), variable) for variable in variables)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # it would take seconds
    def __call__(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> list[Gradient]:
        """Reduce the gradients of variables, one for each; None stays None."""
        if ranks.are_carried_out():
            raise ConfigError(
                "gradients",
                "they would be averaged over processes, and are those of a virtual rank; take them by a "
                "plain tf.GradientTape, and hand them over by step.add(gradients)",
            )
        result, shared = list(gradients), []
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if isinstance(gradient, tf.IndexedSlices) and self.sparse_as_dense:
                result[place] = tf.convert_to_tensor(gradient)
            if id(raw(variable)) not in self.local:
                shared.append(place)
            elif gradient is not None and self.scale_local_gradients:
                result[place] = _divided(result[place])
        reduced = self._of_all([result[place] for place in shared], [variables[place] for place in shared])
        for place, gradient in zip(shared, reduced, strict=True):
            result[place] = gradient
        return result

    def _of_all(self, given: list[Gradient], variables: Sequence[Variable]) -> list[Gradient]:
        if not given:
            return given
        if own.wanted:
            there = [place for place, gradient in enumerate(given) if gradient is not None]
            own.note([_sum(given[place]) for place in there], [variables[place] for place in there])
        began = None if _marks is None or xla_compiles() else _time_after(given)
        if hvd.size() == 1 and not config.read().elastic:
            _mark(began, given)
            return given
        refuse_xla()
        # In nested functions and loops, several reductions have the same name. TensorFlow would start them
        # together, and Horovod refuses that. So each waits for the one before it in the program.
        # The zero must not be known to be constant: see `collectives._not_constant`.
        is_graph = tf.inside_function()
        turn = [_turns().assign_add(1)] if is_graph else []
        zero = tf.cast(turn[0] < 0, tf.float32) if is_graph else tf.constant(0.0)
        with tf.control_dependencies(turn):
            reduced = self._reduced(given, variables, zero)
        if is_graph:
            done = tf.nest.flatten([each for each in reduced if each is not None], expand_composites=True)
            with tf.control_dependencies(done):
                _turns().assign_add(1)
        pairs = zip(given, reduced, strict=True)
        averages = [mine if mine is None else average for mine, average in pairs]
        _mark(began, averages)
        return averages

    def _reduced(
        self, given: Sequence[Gradient], variables: Sequence[Variable], zero: tf.Tensor
    ) -> list[Gradient]:
        name, filled = _name(self.name, variables), _filled(given, variables, zero)
        reduced = list(filled)
        here = [gradient is not None for gradient in given]
        presence = tf.cast([[not each for each in here], here], tf.float32) + zero
        summed: tf.Tensor | None = None
        for number, places in enumerate(self._groups_of(filled, variables)):
            tensors = [filled[place] for place in places]
            # Always in a group of gradients: with another size of the group, sums would be rounded otherwise.
            if carries := summed is None and tensors[0].dtype.is_floating and self.op in _KEEPING_OPS:
                tensors.append(tf.cast(presence, tensors[0].dtype))
            group = hvd.grouped_allreduce(
                tensors,
                op=self.op,
                compression=self.compression,
                prescale_factor=1 / self.gradient_predivide_factor,
                postscale_factor=self.gradient_predivide_factor,
                device_dense=self.device_dense,
                name=f"{name}_{number}",
                ignore_name_scope=True,
            )
            if carries:
                summed = group.pop()
            for place, gradient in zip(places, group, strict=True):
                reduced[place] = gradient
        for place, gradient in enumerate(filled):
            if isinstance(gradient, tf.IndexedSlices):
                reduced[place] = self._gathered(gradient, f"{name}_{place}")
        if summed is None:
            (summed,) = hvd.grouped_allreduce(
                [presence], op=hvd.Sum, name=f"{name}_presence", ignore_name_scope=True
            )
        return _checked(reduced, summed, here, variables)

    def _gathered(self, gradient: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        if self.op not in (hvd.Average, hvd.Sum):
            problem = "sparse gradients can only be averaged or summed; pass sparse_as_dense=True"
            raise ConfigError("op", problem)
        with tf.device(self.device_sparse):
            parts = [
                hvd.allgather(each, name=f"{name}_{kind}", ignore_name_scope=True)
                for each, kind in ((gradient.values, "values"), (gradient.indices, "indices"))
            ]
        slices = tf.IndexedSlices(*parts, gradient.dense_shape)
        return _divided(slices) if self.op == hvd.Average else slices

    def _groups_of(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> list[list[int]]:
        """Return the places of the dense gradients in groups, each of one dtype, as Horovod demands."""
        dense = [
            place
            for place, gradient in enumerate(gradients)
            if gradient is not None and not isinstance(gradient, tf.IndexedSlices)
        ]
        if isinstance(self.groups, int):
            numbers = [at * self.groups // len(dense) for at in range(len(dense))]
        else:
            asked = {id(raw(each)): at for at, group in enumerate(self.groups or []) for each in group}
            numbers = [asked.get(id(raw(variables[place])), -1) for place in dense]
        found: dict[tuple[int, Any], list[int]] = {}
        for place, number in zip(dense, numbers, strict=True):
            found.setdefault((number, gradients[place].dtype), []).append(place)
        return list(found.values())


def _divided(gradient: Gradient) -> Gradient:
    """Divide by the number of ranks when the graph runs, not when it was traced."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(gradient.values), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(hvd.size_op(), gradient.dtype)


def _name(prefix: str | None, variables: Sequence[Variable]) -> str:
    """Return the name of a collective: the same on all ranks, whatever each of them has done before."""
    # Horovod would use a counter. A rank that has just started would begin at 0, and wait forever.
    each = (
        f"{without_numbers(str(getattr(variable, 'name', '')))} {variable.shape} {raw(variable).dtype.name}"
        for variable in variables
    )
    digest = hashlib.blake2b("\n".join(each).encode(), digest_size=8).hexdigest()
    return f"{prefix or 'hvdrecover_gradients'}_{digest}"


_turns = functools.cache(counter)


# -- gradients that are missing ------------------------------------------------------------------------------


def _filled(gradients: Sequence[Gradient], variables: Sequence[Variable], zero: tf.Tensor) -> list[Gradient]:
    """Return gradients with zeros for missing ones; None where no rank can have a gradient."""
    found: list[Gradient] = []
    for gradient, variable in zip(gradients, map(raw, variables), strict=True):
        if isinstance(gradient, tf.IndexedSlices):
            # Slices must not be known to be constant either, as those of `Embedding(tf.range(n))` are.
            parts = [each + tf.cast(zero, each.dtype) for each in (gradient.values, gradient.indices)]
            setattr(variable, _SLICES, tuple(each.dtype for each in parts))
            gradient = tf.IndexedSlices(*parts, gradient.dense_shape)
        elif gradient is None and variable.dtype in _DTYPES:
            if (dtypes := getattr(variable, _SLICES, None)) is None:
                gradient = tf.fill(tf.shape(variable), tf.cast(zero, variable.dtype))
            else:  # the variable's last gradient was sparse: this one has no slices
                none = tf.cast(zero, dtypes[1])
                slices = tf.fill([none, *variable.shape[1:]], tf.cast(zero, dtypes[0]))
                gradient = tf.IndexedSlices(slices, tf.fill([none], none), tf.shape(variable, dtypes[1]))
        found.append(gradient)
    return found


def _checked(
    results: list[Gradient], summed: tf.Tensor, here: Sequence[bool], variables: Sequence[Variable]
) -> list[Gradient]:
    """Return reduced gradients; raise an error if a gradient is missing on some of the ranks only."""

    def fail() -> None:
        mine = [place for place, is_here in enumerate(here) if not is_here]
        missing = gather_json(TensorFlowWorld(), mine, "hvdrecover.gradients.absent")
        lines = []
        for place, variable in enumerate(variables):
            without = [rank for rank, places in enumerate(missing) if place in places]
            with_it = [rank for rank, places in enumerate(missing) if place not in places]
            if without and with_it:
                lines.append(f"{name_of(variable)}: missing on {named(without)}, there on {named(with_it)}")
        raise MissingGradientError(
            "gradients are missing on some of the ranks",
            first_lines(lines),
            "Have all ranks compute the loss from the same variables; where one has no use for a variable, "
            "add 0.0 * tf.reduce_sum(variable) to the loss.",
        )

    # Row 0 of `summed` is not 0 where some rank lacks the gradient, and row 1 where some rank has it.
    differ = tf.reduce_any(tf.reduce_all(summed != 0, axis=0))
    if tf.executing_eagerly():
        if bool(differ):
            fail()
        return results
    # Wait for all results: an error in the middle of collectives would leave other ranks in them.
    there = [each for each in results if each is not None]
    with tf.control_dependencies(tf.nest.flatten(there, expand_composites=True)):
        differ = tf.identity(differ)
    good = tf.cond(differ, lambda: in_python(fail, [], tf.bool), lambda: tf.constant(True))
    with tf.control_dependencies([good]):
        held = iter(tf.nest.map_structure(tf.identity, there, expand_composites=True))
    return [each if each is None else next(held) for each in results]


class _Own:
    """The sums of this rank's gradients before the last reduction of each graph, for a guard's report."""

    wanted = False  # whether a guard looks at gradients

    def note(self, sums: Iterable[Any], variables: Sequence[Variable]) -> None:
        # A graph deletes its sums with itself. Eager code has a default graph, too.
        noted = dict(zip((id(raw(each)) for each in variables), sums, strict=True))
        setattr(tf.compat.v1.get_default_graph(), _OWN, noted)

    def of(self, variables: Sequence[Variable]) -> tf.Tensor | None:
        """Return the `sums_of` of variables' gradients; None if the last reduction was of other variables."""
        noted = getattr(tf.compat.v1.get_default_graph(), _OWN, {})
        keys = [id(raw(variable)) for variable in variables]
        return tf.stack([noted[key] for key in keys]) if noted.keys() >= set(keys) else None


own = _Own()


def numbers_of(gradient: Gradient) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def sums_of(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return each tensor's float32 sum: not finite if a number is not finite, or if the numbers are large."""
    return tf.stack([_sum(each) for each in tensors])


def _sum(gradient: Gradient) -> tf.Tensor:
    numbers = numbers_of(gradient)
    numbers = tf.abs(numbers) if numbers.dtype.is_complex else numbers
    wide = tf.cast(numbers, tf.float32) if numbers.dtype.size < 4 else numbers
    return tf.cast(tf.reduce_sum(wide), tf.float32)


# Variables in which graphs leave times and norms, for scalars. Python reads them when it next passes: no rank
# waits for them, and they cost next to nothing.
class _Marks:
    def __init__(self) -> None:
        self.steps = counter()  # number of reductions: each is a step
        self.waited = counter(tf.float64)  # seconds of waiting for gradients of other ranks, in all
        self.averaged = counter(tf.float64)  # Euclidean norm of the last averaged gradients together


_marks: _Marks | None = None  # of all graphs of this process; made when a state wants scalars


def watch(scalars: Scalars) -> None:
    """Report steps to the rank's scalars whenever they ask for them."""
    global _marks
    marks = _marks = _marks or _Marks()
    steps, waited = int(marks.steps), float(marks.waited)

    def poll() -> None:
        nonlocal steps, waited
        steps_before, steps = steps, int(marks.steps)
        if steps != steps_before:
            waited_before, waited = waited, float(marks.waited)
            scalars.waited(waited - waited_before)
            scalars.stepped({"norm/averaged_gradient": float(marks.averaged)}, steps - steps_before)

    scalars.poll = poll


def _time_after(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Return the time when gradients are computed, in seconds since the Unix epoch: float64."""
    flat = [each for each in tf.nest.flatten(gradients, expand_composites=True) if tf.is_tensor(each)]
    with tf.control_dependencies([] if tf.executing_eagerly() else flat), tf.device("CPU:0"):
        if is_op_determinism_enabled():  # it refuses `tf.timestamp`
            return in_python(time.time, [], tf.float64)
        return tf.timestamp()


def _mark(began: tf.Tensor | None, gradients: Sequence[Gradient]) -> None:
    if began is None or _marks is None:
        return
    ended, dense = _time_after(gradients), []
    for each in gradients:
        if isinstance(each, tf.IndexedSlices):  # slices of one place are added up
            places, numbers = tf.unique(each.indices)
            each = tf.math.unsorted_segment_sum(each.values, numbers, tf.size(places))
        if each is not None:
            dense.append(tf.cast(each, tf.float32))
    with tf.device("CPU:0"):
        _marks.waited.assign_add(ended - began)
        _marks.averaged.assign(tf.cast(tf.linalg.global_norm(dense), tf.float64))
        _marks.steps.assign_add(1)


class Tape:
    def __init__(self, gradtape: tf.GradientTape, local_layers: Layers = None, **options: Any) -> None:
        self._tape = gradtape
        self._reduction = Reduction(**options)
        self._reduction.keep_local(weights_of(local_layers))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> Tape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def register_local_source(self, source: Variable) -> None:
        self._reduction.keep_local([source])

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,  # ignored: names never depend on the past of the process
        **options: Any,
    ) -> Any:
        """Like ``tf.GradientTape.gradient``, but averaged across the ranks. All ranks must call it."""
        gradients = self._tape.gradient(target, sources, output_gradients, **options)
        reduced = self._reduction(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, reduced)


DistributedGradientTape = taking_what(hvd.DistributedGradientTape, Tape)
"""Make a tape average its gradients across the ranks, before or after it has recorded.

Examples:
    >>> weights = tf.Variable([1.0, 2.0])
    >>> with recover.DistributedGradientTape(tf.GradientTape()) as tape:
    ...     loss = tf.reduce_sum(weights * weights)
    >>> gradients = tape.gradient(loss, [weights])

It takes what Horovod's takes; see `Reduction`.
"""

PartialDistributedGradientTape = taking_what(hvd.PartialDistributedGradientTape, Tape)
"""`DistributedGradientTape`, but that the gradients of ``local_layers`` are left to each rank.

Examples:
    >>> tape = recover.PartialDistributedGradientTape(tf.GradientTape(), keras.layers.Dense(2))
"""
