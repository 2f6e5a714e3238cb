"""Gradients averaged across the ranks, by Horovod's grouped allreduce."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.util import split_list

from hvdrecover import config
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow import steps, xla
from hvdrecover.tensorflow.keywords import Layers, taking_what, weights_of
from hvdrecover.tensorflow.missing_gradients import KEEPING_OPS, Presence
from hvdrecover.tensorflow.own_gradients import Gradient, own
from hvdrecover.tensorflow.variables import Variable, counter, is_variable, raw, without_numbers
from hvdrecover.virtual import ranks

Groups = int | Sequence[Sequence[Variable]] | None


@dataclass(frozen=True)
class Reduction:
    """The reduction of gradients; the attributes are keywords of Horovod's, of the same meaning.

    All that is dense and of one dtype is reduced as one group, unless ``groups`` says otherwise: the sums are
    then made in the same order in each run, so that a resumed one is equal to the last bit. Sparse gradients
    are gathered. A gradient that is missing on some of the ranks is an error on all of them.

    Attributes:
        op: ``hvd.Average``, ``hvd.Sum``, ….
        compression: of ``hvd.Compression``; ``hvd.Compression.fp16`` sends half of the bytes.
        gradient_predivide_factor: divides gradients before the sum; what comes after the sum makes up for it.
        groups: a number of groups of about equal size, or a list of groups of variables, with all others as a
            group of their own; None for one group.
        sparse_as_dense: make sparse gradients dense first.
        device_dense: the device for collectives of dense gradients; ``""`` leaves it to TensorFlow.
        device_sparse: the device for those of sparse gradients.
        name: begins the names of collectives.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        local: variables whose gradients each rank keeps for itself, by their identity.

    Args:
        num_groups: ``groups``, if that is None.
        process_set: must be of all ranks.

    Raises:
        ConfigError: a value that can't be.
    """

    op: Any = hvd.Average
    compression: Any = hvd.Compression.none
    gradient_predivide_factor: float = 1.0
    groups: Groups = None
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
            object.__setattr__(self, "groups", num_groups)
        if isinstance(self.groups, int):
            if self.groups < 1:
                raise ConfigError("groups", f"{self.groups} is not a number of groups from 1 on")
        elif self.groups is not None and not all(
            is_variable(variable) for group in self.groups for variable in group
        ):
            raise ConfigError("groups", "it is neither a number nor a list of lists of variables")
        if self.gradient_predivide_factor != 1.0 and self.op != hvd.Average:
            raise ConfigError(
                "gradient_predivide_factor",
                "it divides what is averaged; pass op=hvd.Average, or leave it out",
            )
        if process_set.process_set_id != 0:
            raise ConfigError(
                "process_set",
                "gradients are reduced over all ranks, as all recover together; for some of them call "
                "hvd.grouped_allreduce(gradients, process_set=...) in a loop of your own",
            )

    def keep_local(self, variables: Sequence[Variable]) -> None:
        """Leave the gradients of variables to each rank."""
        self.local.update((id(raw(variable)), variable) for variable in variables)

    def is_local(self, variable: Variable) -> bool:
        """Return whether each rank keeps a variable's gradient for itself."""
        return id(raw(variable)) in self.local

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # it would take seconds
    def __call__(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> list[Gradient]:
        """Reduce the gradients of variables.

        Args:
            gradients: one for each variable; None stays None.
            variables: what they are gradients of.

        Raises:
            ConfigError: sparse gradients, and an ``op`` other than the average or the sum; or it is part of
                what XLA is to compile, or runs under a strategy of ``tf.distribute``; or a virtual rank is
                being carried out.
            MissingGradientError: a gradient is None on some of the ranks only; out of a graph it comes as an
                error of TensorFlow's.
        """
        if ranks.are_carried_out():
            raise ConfigError(
                "gradients",
                "they would be averaged over processes, and are those of a virtual rank; take them by a "
                "plain tf.GradientTape, and hand them over by step.add(gradients)",
            )
        given = [self._dense(gradient) for gradient in gradients]
        shared = [place for place, variable in enumerate(variables) if not self.is_local(variable)]
        result = [self._alone(gradient) for gradient in given] if self.local else given
        averaged = self._shared([given[place] for place in shared], [variables[place] for place in shared])
        for place, gradient in zip(shared, averaged, strict=True):
            result[place] = gradient
        return result

    def _shared(self, given: list[Gradient], variables: Sequence[Variable]) -> list[Gradient]:
        """Reduce gradients of variables that all ranks have in common."""
        if not given:
            return given
        own.note(given, variables)
        reducing = steps.Reducing(given)
        if hvd.size() == 1 and not config.read().elastic:
            return reducing.done(given)
        if self.op == hvd.Adasum and not hvd.mpi_enabled():
            raise ConfigError(
                "op", "Horovod has Adasum for MPI only, and elastic jobs run on Gloo; use op=hvd.Average"
            )
        xla.refuse("Horovod's collectives")
        _refuse_strategies()
        with _Turn() as turn:
            reduced = self._reduced(Presence(given, variables, turn.zero), variables)
            turn.ends_with([each for each in reduced if each is not None])
        pairs = zip(given, reduced, strict=True)
        return reducing.done([mine if mine is None else everybodys for mine, everybodys in pairs])

    def _dense(self, gradient: Gradient) -> Gradient:
        sparse = isinstance(gradient, tf.IndexedSlices)
        return tf.convert_to_tensor(gradient) if sparse and self.sparse_as_dense else gradient

    def _alone(self, gradient: Gradient) -> Gradient:
        """Return what this rank applies to a local variable: its gradient, scaled if that is asked for."""
        if gradient is None or not self.scale_local_gradients:
            return gradient
        return _divided(gradient)

    def _reduced(self, presence: Presence, variables: Sequence[Variable]) -> list[Gradient]:
        name = _name(self.name, variables)
        reduced = list(presence.filled)
        told: tf.Tensor | None = None
        for number, places in enumerate(self._groups_of(presence.filled, variables)):
            tensors = [presence.filled[place] for place in places]
            # Always along with gradients, never alone or left out: it would change how sums are rounded.
            if carries := told is None and tensors[0].dtype.is_floating and self.op in KEEPING_OPS:
                tensors.append(presence.told(tensors[0].dtype))
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
                told = group.pop()
            for place, gradient in zip(places, group, strict=True):
                reduced[place] = gradient
        for place, gradient in enumerate(presence.filled):
            if isinstance(gradient, tf.IndexedSlices):
                reduced[place] = self._gathered(gradient, f"{name}_{place}")
        if told is None:
            (told,) = hvd.grouped_allreduce(
                [presence.told(tf.float32)], op=hvd.Sum, name=f"{name}_presence", ignore_name_scope=True
            )
        return presence.checked(told, reduced)

    def _gathered(self, gradient: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        """The sum of sparse gradients: the slices of all of them."""
        if self.op not in (hvd.Average, hvd.Sum):
            raise ConfigError(
                "op", "sparse gradients can only be averaged or summed; pass sparse_as_dense=True"
            )
        with tf.device(self.device_sparse):
            slices = _gathered(gradient, name)
        return _divided(slices) if self.op == hvd.Average else slices

    def _groups_of(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> list[list[int]]:
        """The places of the dense gradients in groups, each of one dtype, as Horovod asks for."""
        dense = [
            place
            for place, gradient in enumerate(gradients)
            if gradient is not None and not isinstance(gradient, tf.IndexedSlices)
        ]
        groups: list[list[int]]
        if isinstance(self.groups, int):
            groups = split_list(dense, min(self.groups, max(1, len(dense))))
        else:
            number_of = {
                id(raw(variable)): number
                for number, group in enumerate(self.groups or [])
                for variable in group
            }
            groups = [[] for _ in range(len(self.groups or []) + 1)]
            for place in dense:
                groups[number_of.get(id(raw(variables[place])), -1)].append(place)
        by_dtype: dict[tuple[int, Any], list[int]] = {}
        for number, group in enumerate(groups):
            for place in group:
                by_dtype.setdefault((number, gradients[place].dtype), []).append(place)
        return list(by_dtype.values())


class Tape:
    """A ``tf.GradientTape`` whose gradients are averaged across the ranks; see `DistributedGradientTape`."""

    def __init__(self, tape: tf.GradientTape, reduction: Reduction) -> None:
        self._tape = tape
        self._reduction = reduction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def __enter__(self) -> Tape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def register_local_source(self, source: Variable) -> None:
        """Leave a variable's gradient to each rank."""
        self._reduction.keep_local([source])

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """As ``tf.GradientTape.gradient``, averaged across the ranks; all ranks have to call it.

        Args:
            target: see there, as for the following.
            sources: variables, in any structure.
            output_gradients: see there.
            use_generic_names: Horovod's; not used, as names never depend on what the process did before.
            options: see there.
        """
        gradients = self._tape.gradient(target, sources, output_gradients, **options)
        flat = _flat(sources)
        reduced = self._reduction(_flat(gradients), flat)
        return tf.nest.pack_sequence_as(sources, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Variable, Gradient]], list[tuple[Variable, Gradient]]]:
        """Return pairs of a source and its gradient: those that are this rank's own, and all others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if self._reduction.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._reduction.is_local(pair[0])]


def _tape(gradtape: tf.GradientTape, local_layers: Layers = None, **options: Any) -> Tape:
    reduction = Reduction(**options)
    reduction.keep_local(weights_of(local_layers))
    return Tape(gradtape, reduction)


DistributedGradientTape = taking_what(hvd.DistributedGradientTape, _tape)
"""Make a tape average its gradients across the ranks, before or after it has recorded.

Examples:
    >>> weights = tf.Variable([1.0, 2.0])
    >>> with recover.DistributedGradientTape(tf.GradientTape()) as tape:
    ...     loss = tf.reduce_sum(weights * weights)
    >>> gradients = tape.gradient(loss, [weights])

It takes what Horovod's takes; `Reduction` says what of it means what.
"""

PartialDistributedGradientTape = taking_what(hvd.PartialDistributedGradientTape, _tape)
"""`DistributedGradientTape`, but that the gradients of ``local_layers`` are left to each rank.

Examples:
    >>> tape = recover.PartialDistributedGradientTape(tf.GradientTape(), keras.layers.Dense(2))
"""


def _refuse_strategies() -> None:
    if tf.distribute.has_strategy():
        name = type(tf.distribute.get_strategy()).__name__
        raise ConfigError(
            "tf.distribute",
            f"gradients are made under a {name}, whose replicas would wait for each other in Horovod's "
            "collectives; start one process for each device by horovodrun instead, and make and train the "
            "model outside of strategy.scope() and strategy.run",
        )


class _Turn:
    """Lets a function's reductions run one after the other, in the order of the program.

    TensorFlow would start those of the same variables together, in nested functions and in iterations of a
    loop, where all of them are called the same; Horovod refuses that.

    Attributes:
        zero: a float32 zero that TensorFlow does not know to be one. Collectives of nothing but constants it
            would do just once, and while it makes its graphs at that.
    """

    def __enter__(self) -> _Turn:
        number = _turns().assign_add(1) if tf.inside_function() else None
        self.zero = tf.constant(0.0) if number is None else tf.cast(number < 0, tf.float32)
        self._dependencies = tf.control_dependencies([] if number is None else [number])
        self._dependencies.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._dependencies.__exit__(*error)

    def ends_with(self, results: list[Gradient]) -> None:
        """Keep the next one waiting until these are there."""
        if tf.inside_function():
            with tf.control_dependencies(tf.nest.flatten(results, expand_composites=True)):
                _turns().assign_add(1)


@functools.cache
def _turns() -> tf.Variable:
    """Return what all reductions change, so that TensorFlow keeps their order."""
    return counter()


def _gathered(gradient: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
    """Return the slices of all ranks together."""
    values = hvd.allgather(gradient.values, name=f"{name}_values", ignore_name_scope=True)
    indices = hvd.allgather(gradient.indices, name=f"{name}_indices", ignore_name_scope=True)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _flat(structure: Any) -> list[Any]:
    flat: list[Any] = tf.nest.flatten(structure)
    return flat


def _divided(gradient: Gradient) -> Gradient:
    """Divide by the number of ranks, as of when it runs, not as of when it was traced."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(gradient.values), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(hvd.size_op(), gradient.dtype)


def _name(prefix: str | None, variables: Sequence[Variable]) -> str:
    """Return what a collective on gradients is called: the same on all ranks, whatever each has done before.

    Horovod would number it; a rank that has just started would begin at 0, and wait for the others for ever.
    """
    each = (
        f"{without_numbers(str(getattr(variable, 'name', '')))} {variable.shape} {raw(variable).dtype.name}"
        for variable in variables
    )
    digest = hashlib.blake2b("\n".join(each).encode(), digest_size=8).hexdigest()
    return f"{prefix or 'hvdrecover_gradients'}_{digest}"
