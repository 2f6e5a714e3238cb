"""Facts about torch: its tensors, modules, optimizers, random generators and collectives."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import UnionType
from typing import Any, NoReturn

import horovod.torch as hvd
import numpy as np
import numpy.typing as npt
import torch
from horovod.common.exceptions import HorovodInternalError
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hvdrecover.checkpoint.arena import WORTH_A_SPAN, Arena, Bytes, Span, TensorSpec, copy_spans, spans_equal
from hvdrecover.errors import UnsupportedTensorError
from hvdrecover.state import horovod
from hvdrecover.state import rank_local as streams
from hvdrecover.state.adapter import Entry, StepReport, Tree, fit_tensors
from hvdrecover.state.horovod import HorovodWorld
from hvdrecover.torch import guard, optimizers, stepping
from hvdrecover.torch.optimizers import by_name, parameters_of, renamed

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_CPU = torch.device("cpu")
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices
_REPLICATED_ONLY = (
    "replicated state only, got a tensor that is sharded over ranks (DTensor, FSDP). A commit would "
    "hold the shard of rank 0 only. Train with hvd.DistributedOptimizer, or keep sharded state with "
    "torch.distributed.checkpoint"
)
_BY_CODE = {code: dtype for dtype, code in _DTYPES.items()}


class TorchFramework:
    name = "torch"
    tensors: type | UnionType = torch.Tensor

    def __init__(self) -> None:
        self.attributes: Mapping[str, Any] = {}
        self._named: Mapping[str, torch.Tensor] = {}
        self._found: set[int] = set()

    def versions(self) -> dict[str, str]:
        return {"torch": str(torch.__version__), "horovod": horovod.version()}

    def is_component(self, value: Any) -> bool:
        return not isinstance(value, type) and all(
            callable(getattr(value, verb, None)) for verb in ("state_dict", "load_state_dict")
        )

    def spec(self, tensor: torch.Tensor, name: str) -> TensorSpec:
        if torch.nn.parameter.is_lazy(tensor):
            raise UnsupportedTensorError(
                name, "its shape is not known yet; run the lazy module once before the state is made"
            )
        if tensor.requires_grad and tensor.is_leaf:  # those of modules come detached, from a state_dict
            raise UnsupportedTensorError(
                name,
                "it is trained, and going back to a commit would put another tensor in its place; "
                "keep it in a module, and the module in the state",
            )
        # Told by the class name: to import DTensor takes a second.
        if type(tensor).__name__ == "DTensor" and type(tensor).__module__.startswith("torch.distributed."):
            raise UnsupportedTensorError(name, _REPLICATED_ONLY)
        if not _is_plain(tensor) or tensor.dtype not in _DTYPES:
            kind = f"{type(tensor).__name__}, {tensor.dtype}, {tensor.layout}, {tensor.device}"
            raise UnsupportedTensorError(
                name,
                f"a tensor of this kind ({kind}) can't be part of a commit; "
                "make it a dense tensor of a plain dtype",
            )
        return TensorSpec(name, _DTYPES[tensor.dtype], tuple(tensor.shape))

    def match(self, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> bool:
        try:
            return all(
                type(tensor) is torch.Tensor
                and tensor.layout is torch.strided
                and _DTYPES.get(tensor.dtype) == spec.dtype
                and tensor.shape == spec.shape
                and not (tensor.requires_grad or tensor.is_meta)
                for tensor, spec in zip(tensors, specs, strict=True)
            )
        except RuntimeError:  # a nested tensor has no shape
            return False

    def views(self, arena: Arena, sources: Sequence[torch.Tensor] = ()) -> dict[str, torch.Tensor]:
        if _cuda_in_use() and any(tensor.is_cuda for tensor in sources):
            pin(arena)  # so that devices copy into it by themselves
        return {spec.name: _view(arena, spec) for spec in arena.layout.specs}

    def clone(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    def equal(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        return all_equal(pairs)

    def move(self, tree: Tree, present: Any) -> Tree:
        # If the value's own tensors are on several devices, it is unknown which tensor belongs where.
        devices = {each.device for each in pytree.tree_leaves(present) if isinstance(each, torch.Tensor)}
        if len(devices) != 1 or devices == {_CPU}:
            return tree
        (device,) = devices
        return pytree.tree_map(lambda each: each.to(device) if isinstance(each, torch.Tensor) else each, tree)

    def copy_out(self, tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
        # Large tensors that lie in one piece are copied as memory. The rest go to torch's multi-tensor copy,
        # which spends next to nothing on each but does not get all of the memory's bandwidth.
        spans: list[Span] = []
        rest: list[tuple[torch.Tensor, torch.Tensor]] = []
        for source, target in zip(tensors, views, strict=True):
            if source.nbytes >= WORTH_A_SPAN and _is_one_piece(source) and _is_one_piece(target):
                spans.append((target.data_ptr(), source.data_ptr(), source.nbytes))
            else:
                rest.append((source, target))
        try:
            if rest:
                sources, targets = [source for source, _ in rest], [target for _, target in rest]
                with torch.no_grad():
                    torch._foreach_copy_(targets, sources, non_blocking=True)
            if spans:
                copy_spans(spans)
        finally:
            if _cuda_in_use():
                for device in {source.device for source, target in rest if source.is_cuda and target.is_cpu}:
                    torch.cuda.current_stream(device).synchronize()

    def tree(self, component: Any) -> Tree:
        """The component's ``state_dict``; of an optimizer by the names of its parameters."""
        if isinstance(component, torch.optim.Optimizer):
            return optimizers.tree(component, self._names_for(component))
        state = component.state_dict()
        # A module's is an OrderedDict with metadata about versions of its layers; `load` adds it again.
        return dict(state) if isinstance(component, torch.nn.Module) else state

    def _names_for(self, optimizer: torch.optim.Optimizer) -> Mapping[str, torch.Tensor]:
        """Return the parameters by name."""
        # Look again only for a new parameter: walking through the modules takes a fifth of a commit's time.
        if any(id(each) not in self._found for each in parameters_of(optimizer)):
            # The attributes keep their tensors alive, so no other tensor gets the same identity.
            self._named = by_name(self.attributes)
            self._found = {id(each) for each in self._named.values()}
        return self._named

    def fit(self, name: str, component: Any, tree: Tree) -> tuple[Tree, list[str]]:
        kept = isinstance(component, torch.nn.Module | torch.optim.Optimizer)
        if kept and not isinstance(tree, dict):
            kinds = f"a {type(tree).__name__} in the commit, a {type(component).__name__} in this state"
            return self.tree(component), [f"{name}: {kinds}"]
        if isinstance(component, torch.nn.Module):
            mine = dict(component.state_dict())
            # A layer's extra state may be a tensor in one commit, and another object in the next.
            extra = {key for key in mine if key.rpartition(".")[2] == "_extra_state"}
            return fit_tensors(self, name, "model", mine, renamed(tree, mine), extra.__contains__)
        if isinstance(component, torch.optim.Optimizer):
            return optimizers.fit(name, component, tree, by_name(self.attributes))
        return tree, []

    def load(self, component: Any, tree: Tree, *, keep: bool = False) -> None:
        if isinstance(component, torch.nn.Module):
            _load_module(component, tree)
        elif isinstance(component, torch.optim.Optimizer):
            optimizers.load(component, tree, by_name(self.attributes), None if keep else self.copy_out)
        else:
            component.load_state_dict(tree if keep else pytree.tree_map_only(torch.Tensor, self.clone, tree))
            if isinstance(component, torch.amp.GradScaler) and component.is_enabled():
                # The state does not say whether a fault came between `unscale_` and `update`.
                component._per_optimizer_states.clear()

    def unkept(self, component: Any) -> list[str]:
        # A model's other tensors may be constants. So they are named only if the ``state_dict`` is empty, or
        # if a torchmetrics metric declares them as its state, and not as persistent.
        declared, held = [], []
        modules = component.named_modules() if isinstance(component, torch.nn.Module) else [("", component)]
        is_empty = not pytree.tree_leaves(component.state_dict())
        for path, part in modules:
            prefix, persistent = f"{path}." if path else "", getattr(part, "_persistent", None)
            if isinstance(part, torch.nn.Module) and isinstance(persistent, dict):
                names = getattr(part, "_defaults", ())
                declared += [f"{prefix}{name}" for name in names if not persistent.get(name)]
            if is_empty:
                values = {**getattr(part, "__dict__", {}), **getattr(part, "_buffers", {})}
                values.pop("_buffers", None)
                held += [f"{prefix}{name}" for name, value in values.items() if _has_tensor(value)]
        return declared or held

    forget_passes = staticmethod(stepping.forget_passes)

    def rank_local(self, component: Any) -> set[str]:
        if not isinstance(component, torch.nn.Module):
            return set()
        return component.state_dict().keys() - dict(component.named_parameters(remove_duplicate=False)).keys()

    def describe(self, component: Any) -> list[Entry]:
        """A module's parameters and buffers, or the class and settings of an optimizer or scheduler."""
        if isinstance(component, torch.nn.Module):
            kinds: list[tuple[str, torch.Tensor, str]] = [
                (name, each, "trained" if each.requires_grad else "frozen")
                for name, each in component.named_parameters(remove_duplicate=False)
            ]
            kinds += [(name, each, "a buffer") for name, each in component.named_buffers()]
            return [Entry(f".{name}", f"{_kind_of(each)}, {role}") for name, each, role in kinds]
        # Horovod's wrapper of an optimizer has the name of the class that it wraps.
        entries = [Entry("", f"a {type(component).__name__}")]
        if isinstance(component, torch.optim.Optimizer):
            for number, group in enumerate(component.param_groups):
                entries.append(Entry(f".param_groups.{number}", f"{len(group['params'])} parameters"))
                entries += _settings_of(f".param_groups.{number}.", group)
        if isinstance(component, torch.optim.lr_scheduler.LRScheduler):
            entries += _settings_of(".", component.state_dict())
        return entries

    def not_finite(self, component: Any) -> list[str]:
        found = component.named_parameters() if isinstance(component, torch.nn.Module) else ()
        return guard.not_finite({name: each.detach() for name, each in found})

    def original(self, error: BaseException) -> BaseException | None:
        return None

    def report(self, what: StepReport, hook: Any) -> None:
        components = {name: each for name, each in self.attributes.items() if self.is_component(each)}
        if what == "steps":
            for component in components.values():
                if isinstance(component, torch.optim.Optimizer):
                    stepping.steps_of(component).begins.append(hook.step_begins)
        elif what == "times":
            stepping.report_times(components, hook)
        elif what == "missing":
            guard.report_missing(components, hook)
        else:
            guard.report_gradients(components, hook)

    def draw_seed(self) -> int:
        return int(torch.randint(2**63 - 1, ()).item())

    def seed(self, derive: Callable[[str], int]) -> None:
        random.seed(derive("python"))
        seed = derive("numpy")
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
        torch.default_generator.manual_seed(derive("torch"))
        # On a machine whose devices are not in use, torch.manual_seed would queue work for when they are.
        if _cuda_in_use():
            torch.cuda.manual_seed_all(derive("cuda"))

    def generators(self) -> Any:
        return {
            "python": streams.python_state(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state().numpy(),
            "cuda": [state.numpy() for state in torch.cuda.get_rng_state_all()] if _cuda_in_use() else [],
        }

    def set_generators(self, states: Any) -> None:
        streams.set_python(states["python"])
        streams.set_numpy(states["numpy"])
        torch.set_rng_state(torch.from_numpy(states["torch"]))
        if _cuda_in_use():
            for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(torch.from_numpy(state), device)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _is_plain(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return not (tensor.is_quantized or tensor.is_meta or is_traceable_wrapper_subclass(tensor))


def _load_module(module: torch.nn.Module, tree: Tree) -> None:
    """Load a module, which then shares no memory with the tree."""
    copied = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    copied |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    # Parameters and buffers are copied into. A module may keep what else it has, by ``set_extra_state``.
    state = OrderedDict(
        (key, value if key in copied else copy.deepcopy(value)) for key, value in tree.items()
    )
    # Without the layers' versions, some take the state for an old release's, and convert it.
    state._metadata = getattr(module.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
    # A module's own ``load_state_dict`` may lack torch's argument.
    parameters = inspect.signature(module.load_state_dict).parameters.values()
    takes_strict = any(each.name == "strict" or each.kind is each.VAR_KEYWORD for each in parameters)
    module.load_state_dict(state, **({"strict": False} if takes_strict else {}))


def _view(arena: Arena, spec: TensorSpec) -> torch.Tensor:
    dtype = _BY_CODE[spec.dtype]
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(arena.bytes_of(spec.name), dtype=dtype).view(spec.shape)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _kind_of(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return "not yet known"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _settings_of(prefix: str, values: Mapping[str, Any]) -> list[Entry]:
    return [
        Entry(
            f"{prefix}{name}",
            str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value),
            setting=True,
            stored=True,
        )
        for name, value in sorted(values.items())
        if name not in ("params", "last_epoch") and not name.startswith("_")
    ]


# -- tensors at the speed of the machine's memory ------------------------------------------------------------


def all_equal(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    large: list[tuple[torch.Tensor, torch.Tensor]] = []  # kept, so that the addresses stay valid
    for mine, other in pairs:
        if mine.nbytes >= WORTH_A_SPAN and _is_one_piece(mine) and _is_one_piece(other):
            large.append((mine, other))
        elif not torch.equal(bits := _bits(mine), _bits(other).to(bits.device)):
            return False
    return spans_equal([(other.data_ptr(), mine.data_ptr(), mine.nbytes) for mine, other in large])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _is_one_piece(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def pin(arena: Arena) -> None:
    """Pin an arena's memory until it is freed: a device copies into it by itself, several times as fast."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = arena.buffer.ctypes.data
    if int(cudart.cudaHostRegister(address, arena.buffer.nbytes, _PORTABLE)) == 0:
        weakref.finalize(arena, cudart.cudaHostUnregister, address).atexit = False
    else:
        # CUDA refuses memory of some file systems, and more than the machine can spare. Copies are slower.
        with contextlib.suppress(RuntimeError):  # CUDA would report the refusal to who launches a kernel next
            torch.zeros((), device="cuda")


# -- collectives -------------------------------------------------------------------------------------------


class TorchWorld(HorovodWorld):
    def __init__(self) -> None:
        super().__init__(hvd)

    def lost(self, error: BaseException) -> bool:
        return False  # ``horovod.torch`` raises ``HorovodInternalError``

    def join(self, mine: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        return self._begin_join(mine, name)()

    def send(self, values: Sequence[int], name: str) -> Callable[[], npt.NDArray[np.int64]]:
        return self._begin_join(np.array([list(values)], dtype=np.int64), name)

    def broadcast(self, buffer: Bytes, root: int, name: str) -> None:
        if self.size() > 1 and len(buffer):
            hvd.broadcast_(torch.from_numpy(buffer), root, name=name)

    def _begin_join(self, mine: npt.NDArray[np.int64], name: str) -> Callable[[], npt.NDArray[np.int64]]:
        if hvd.size() == 1:
            return lambda: mine
        try:
            # Names are unique: a process that has just started would number its collectives from 0, and wait
            # for ranks that are at another number.
            handle = hvd.allgather_async(torch.tensor(mine), name=name)
        except HorovodInternalError as error:
            return partial(_fail, error)
        return lambda: hvd.synchronize(handle).numpy()


def _fail(error: Exception) -> NoReturn:
    raise error
