"""Runs the initialisers of a model on tensors without memory, and records their operators.

They run in the order of constructors, submodules first. First, `reset_parameters` of each module runs. Then,
as in transformers, each module is passed to `_init_weights`: its own, or that of the nearest module around it. Last,
the user's own function runs on each module, like `model.apply`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autoshard.errors import TraceError
from autoshard.ir.initialisation import Initialisation, Operation, StridedView
from autoshard.tracing.random_numbers import draw_numbers, number_random_operators, refuse_generator
from autoshard.tracing.replaced import replaced

InitFunction = Callable[[nn.Module], Any]

_RESETS = ("reset_parameters", "_reset_parameters")


def record_initialisation(
    model: nn.Module, device: torch.device, init_fn: InitFunction | None = None
) -> Initialisation:
    """Return the operators by which a model initialises its parameters and buffers. The model stays unchanged.

    Args:
        model: any module; its parameters and buffers may be on any device, or on meta.
        device: the device on which the recorded operators will run. The model's tensors may be elsewhere now.
        init_fn: called with each module, after the modules' own initialisers.

    Raises:
        TraceError: an initialiser fails, reads a value of a tensor, or leaves a tensor in an attribute.
    """
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), _standing_in(model, device) as stand_ins:
        recorder = _Recorder()
        begins = {name: recorder.view_of(tensor) for name, tensor in stand_ins.items()}
        seed = torch.empty((), dtype=torch.int64, device=device)
        number = recorder.view_of(seed).memory
        with recorder, number_random_operators(seed), _truncating_without_reads():
            _run_initialisers(model, init_fn)
        _refuse_attributes(model)
        ends = {name: recorder.view_of(tensor) for name, tensor in _named(model)}
        _check_shapes(begins, ends)
    return Initialisation(tuple(recorder.operations), recorder.numels, begins, ends, recorder.constants, number)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@contextlib.contextmanager
def _standing_in(model: nn.Module, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Within the context, the model has contiguous fake tensors as parameters and buffers; yield them by name.

    Tied parameters stay tied.
    """
    made: dict[int, Tensor] = {}
    names = [(name, id(tensor)) for name, tensor in _named(model)]
    held: list[dict[str, Any]] = [held for module in model.modules() for held in (module._parameters, module._buffers)]
    before = [dict(entries) for entries in held]
    for entries in held:
        for name, tensor in entries.items():
            if tensor is not None:
                entries[name] = made.setdefault(id(tensor), _stand_in(tensor, device))
    try:
        yield {name: made[number] for name, number in names}
    finally:
        for entries, own in zip(held, before, strict=True):
            entries.clear()
            entries.update(own)


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.numels: dict[int, int] = {}
        self.constants: dict[int, Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # a freed memory would give its address to another

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        views_of_args, views_of_kwargs = pytree.tree_map_only(Tensor, self.view_of, (args, kwargs))
        result = func(*args, **kwargs)
        known = len(self.numels)
        views = [self.view_of(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        results = tuple(view if view.memory >= known else None for view in views)
        written = tuple(_written(func, views_of_args, views_of_kwargs))
        if written or any(results):
            self.operations.append(Operation(func, views_of_args, views_of_kwargs, results, written))
        return result

    def view_of(self, tensor: Tensor) -> StridedView:
        """Return the `StridedView` of a tensor: the number of its memory, with shape, strides and offset."""
        memory = tensor.untyped_storage()
        if memory._cdata not in self._numbers:
            self._numbers[memory._cdata] = number = len(self.numels)
            self._kept.append(memory)
            self.numels[number] = memory.nbytes() // tensor.itemsize
            if not isinstance(tensor, FakeTensor):
                with _disable_current_modes():
                    self.constants[number] = tensor.detach().as_strided((self.numels[number],), (1,), 0)
        if tensor.is_conj() or tensor.is_neg():
            raise NotImplementedError("a lazy conjugate")
        number, shape, stride = self._numbers[memory._cdata], tuple(tensor.shape), tensor.stride()
        return StridedView(number, shape, stride, int(tensor.storage_offset()), tensor.dtype)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[StridedView]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, StridedView))


def _truncating_without_reads() -> contextlib.AbstractContextManager[None]:
    """Return a context in which one operator draws truncated normal numbers. torch's version reads drawn values."""

    def draw(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        refuse_generator(nn.init.trunc_normal_, generator)
        return tensor.copy_(
            draw_numbers("truncated_normal", (mean, std, a, b), tensor.shape, tensor.dtype, tensor.device)
        )

    return replaced({(nn.init, "_no_grad_trunc_normal_"): draw})


def _run_initialisers(model: nn.Module, init_fn: InitFunction | None) -> None:
    names = {module: name for name, module in model.named_modules()}
    for module in _inside_out(model):
        for reset in _RESETS:
            _call(getattr(module, reset, None), (), module, names)
    _init_as_transformers_do(model, None, names)
    if init_fn is not None:
        for module in _inside_out(model):
            _call(init_fn, (module,), module, names)


def _inside_out(model: nn.Module) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        found.setdefault(module)

    visit(model)
    return [*found]


def _init_as_transformers_do(module: nn.Module, init: InitFunction | None, names: dict[nn.Module, str]) -> None:
    own = getattr(module, "_init_weights", None)
    init = own if _takes(own, (module,)) else init
    for child in module.children():
        _init_as_transformers_do(child, init, names)
    _call(init, (module,), module, names)
    if not _takes(own, (module,)):
        _call(own, (), module, names)


def _takes(function: Any, args: tuple[Any, ...]) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*args)
    except (TypeError, ValueError):
        return False
    return True


def _call(function: Any, args: tuple[Any, ...], module: nn.Module, names: dict[nn.Module, str]) -> None:
    if not _takes(function, args):
        return
    try:
        function(*args)
    except TraceError:
        raise
    except Exception as error:  # whatever the user's initialiser raises on tensors without values
        raise TraceError(
            f"init_weights ran {getattr(function, '__qualname__', function)} on {names[module] or 'the model'!r} "
            f"({type(module).__name__}) with tensors that have shapes and no values, and it raised "
            f"{type(error).__name__}: {error}. An initialiser may draw, fill and compute, and may not read values "
            "(item(), if tensor). Initialise that module otherwise, or load its weights."
        ) from error


def _refuse_attributes(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, FakeTensor):
                setattr(module, attribute, None)
                raise TraceError(
                    f"An initialiser leaves a tensor in attribute {f'{name}.{attribute}'.lstrip('.')!r}, which is no "
                    "buffer: register_buffer makes it one (persistent=False where no checkpoint has it)."
                )


def _check_shapes(begins: dict[str, StridedView], ends: dict[str, StridedView]) -> None:
    for name, view in begins.items():
        found = ends.get(name)
        if found is None or (found.shape, found.dtype) != (view.shape, view.dtype):
            what = "is gone" if found is None else f"has shape={found.shape} and {found.dtype}"
            raise TraceError(
                f"Weight {name!r} of shape={view.shape} and {view.dtype} {what} after its initialisation. "
                "An initialiser must keep the shapes and types that the model was compiled with."
            )
