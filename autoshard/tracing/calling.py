"""Flattens the inputs and outputs of a model's call into tuples of leaves, and nests them again.

Leaves are those of torch's pytrees. Tensor leaves become inputs and outputs of the program. All other leaves are
constants of the program, by leaf index.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from autoshard.errors import TraceError
from autoshard.ir.dataclass_nodes import register_dataclasses
from autoshard.ir.loss import find_loss
from autoshard.ir.precision import widen

_LOGGER = logging.getLogger(__name__)
_PLAIN = (
    bool, int, float, complex, str, bytes, slice, range, type, enum.Enum, types.FunctionType, types.EllipsisType,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator,
)  # fmt: skip


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Return `values`, a pytree, with its floating-point tensors cast to `dtype`."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, values)


@dataclass(frozen=True, slots=True)
class TracedCall:
    """The flattened arguments of a model's call.

    Args:
        tensors: leaf index → leaf, for the leaves that are tensors.
        constants: leaf index → leaf, for all other leaves.
        tree: pytree structure that nests the leaves into `(args, kwargs)`.
        paths: a readable path of each leaf: "args[0]['mask']".
    """

    tensors: dict[int, Tensor]
    constants: dict[int, Any]
    tree: pytree.TreeSpec
    paths: tuple[str, ...]

    def assemble(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the `(args, kwargs)` of the call with its tensors replaced by `tensors`, in leaf order."""
        by_index = dict(zip(self.tensors, tensors, strict=True))
        leaves = [by_index[i] if i in by_index else self.constants[i] for i in range(self.tree.num_leaves)]
        return pytree.tree_unflatten(leaves, self.tree)


@dataclass(slots=True)
class Result:
    """The result of a traced call, which `FlatModule` fills in when it runs.

    Args:
        tree: pytree structure of the model's result.
        indices: leaf index of each tensor in the result, then the leaf indices in `kept`.
        constants: leaf index → leaf, for leaves that are no tensors. Objects that a program cannot return become None.
        dropped: types of the objects that become None.
        kept: leaf index → path of the module attribute in which the call left a tensor. These indices follow the leaves
            of the model's own result.
        lost: attributes in which the call left tensors, and which a program does not set.
        detached: leaf indices of tensors that do not require grad.
        reached: for each tensor, the indices of the flat inputs to which its gradient surely flows
            (`reach.reached_inputs`).
        own_gradients: names of the user's `torch.autograd.Function` classes from which the result was computed.
    """

    tree: pytree.TreeSpec | None = None
    indices: tuple[int, ...] = ()
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    kept: dict[int, str] = dataclasses.field(default_factory=dict)
    lost: tuple[str, ...] = ()
    detached: tuple[int, ...] = ()
    reached: tuple[frozenset[int], ...] = ()
    own_gradients: tuple[str, ...] = ()


def take_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedCall:
    """Return the flattened arguments of a model's call.

    Raises:
        TraceError: an argument is an object that may hold tensors, which a trace would not see.
    """
    register_dataclasses((args, kwargs))
    leaves, tree = pytree.tree_flatten_with_path((args, kwargs))
    tensors: dict[int, Tensor] = {}
    constants: dict[int, Any] = {}
    for index, (path, leaf) in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors[index] = leaf
        elif _is_plain(leaf):
            constants[index] = leaf
        else:
            raise TraceError(
                f"Input {_path_text(path)} is an object of type {type(leaf).__qualname__}, which may hold tensors "
                f"that a trace cannot see. Pass tensors, lists, dicts or dataclasses of them, or register the "
                f"type with torch.utils._pytree.register_pytree_node."
            )
    return TracedCall(tensors, constants, tree, tuple(_path_text(path) for path, _ in leaves))


def _path_text(path: Sequence[Any]) -> str:
    """Return a readable path, such as "args[0]['mask']", of a leaf of `(args, kwargs)`.

    The path of a keyword argument begins with the argument's name.
    """
    place, rest = path[0].idx, path[1:]
    if place == 1:
        return str(rest[0].key) + "".join(str(key) for key in rest[1:])
    return "args" + "".join(str(key) for key in rest)


def _is_plain(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, _PLAIN) or type(leaf).__module__ == "numpy"


def count_targets(model: nn.Module, loss_fn: Callable[..., Any], count: int) -> int:
    """Return how many of a call's `count` positional arguments, at their end, are targets for `loss_fn`.

    `loss_fn(outputs, *targets)` takes one target for each required positional parameter after the first. With
    `*targets` in its signature, it takes all arguments that `model.forward` does not take by position.
    """
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise TraceError(
            f"loss_fn={_name_of(loss_fn)} does not say how many targets it takes. Wrap it, e.g. lambda outputs: "
            "loss(outputs)."
        ) from error
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        taken = inspect.signature(model.forward).parameters.values()
        wanted = max(0, count - sum(_is_positional(parameter) for parameter in taken))
    else:
        required = [p for p in parameters if _is_positional(p) and p.default is p.empty]
        wanted = max(0, len(required) - 1)
    if wanted > count:
        raise TraceError(
            f"loss_fn={_name_of(loss_fn)} takes {wanted} targets after the outputs, but the model is called with only "
            f"{count} positional arguments. Pass the targets as the last positional arguments."
        )
    return wanted


def _name_of(function: Callable[..., Any]) -> str:
    """Return a function's name, or an object's class, without an address: all ranks raise the same message."""
    return getattr(function, "__name__", type(function).__name__)


def has_targets(
    model: nn.Module, loss_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call has targets for `loss_fn`. False if the model needs all arguments of the call itself."""
    try:
        check_fits(model, args, kwargs, count_targets(model, loss_fn, len(args)))
    except TraceError:
        return not _fits(model, args, kwargs)
    return True


def _fits(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        check_fits(model, args, kwargs, 0)
    except TraceError:
        return False
    return True


def check_fits(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: int) -> None:
    """Raise `TraceError` if `model.forward` does not accept these arguments without the last `targets` of `args`.

    Models with their own `__call__` or with forward pre-hooks, which may change the arguments, are not checked.
    """
    if type(model).__call__ is not nn.Module.__call__ or model._forward_pre_hooks:
        return  # `forward` may get another call
    try:
        signature = inspect.signature(model.forward, follow_wrapped=False)
    except ValueError:
        return
    try:
        signature.bind(*args[: len(args) - targets], **kwargs)
    except TypeError as error:
        others = f" (loss_fn= takes the last {targets})" if targets else ""
        raise TraceError(
            f"The call does not fit {type(model).__qualname__}.forward{signature}: {error}{others}. Pass its arguments "
            "in a tuple, or by name in a dict."
        ) from error


def check_layouts(model: nn.Module) -> None:
    """Raise `TraceError` if a parameter or buffer of the model is sparse or nested."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is torch.strided and not tensor.is_nested:
            continue
        raise TraceError(
            f"{type(model).__qualname__} keeps {name!r} of layout={tensor.layout}, but programs keep dense tensors. "
            "Register the tensor's indices and values as buffers, and make it in forward: torch.sparse_coo_tensor("
            "self.indices, self.values, size). Or register the dense one."
        )


def check_apart(model: nn.Module) -> None:
    """Raise `TraceError` if a trained parameter shares its memory with another parameter, or with a buffer.

    On one device, an update of one tensor changes the other too, but a program stores the two tensors separately. A
    parameter may have several names. A buffer that is a frozen parameter itself is refused too. So is a lazy parameter,
    which has no shape yet.
    """
    first: dict[tuple[int, int], tuple[str, Tensor]] = {}
    parameters = dict(model.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    for name, tensor in (*parameters.items(), *model.named_buffers()):
        if is_lazy(tensor):
            raise TraceError(
                f"{name!r} of {type(model).__qualname__} has no shape yet, as the module is lazy. Call the model once "
                "with such inputs before compile."
            )
        if not tensor.numel() or tensor.layout is not torch.strided:
            continue
        place = tensor.untyped_storage()._cdata, int(tensor.storage_offset())
        other, held = first.setdefault(place, (name, tensor))
        if other != name and (tensor is held or not trained.isdisjoint((name, other))):
            kind = "Parameter" if name in parameters else "Buffer"
            raise TraceError(
                f"{kind} {name!r} of {type(model).__qualname__} shares its memory with parameter {other!r}. Tie "
                f"parameters as one object ({name} = {other}), or register a copy ({other}.detach().clone())."
            )


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of a model and, if there is one, of a loss function on the model's outputs.

    Args:
        loss_fn: applied to the model's outputs and the targets; None: the call returns the model's outputs.
        targets: number of targets, the last positional arguments. The model does not get them.
        cast_inputs: applied to the model's own arguments, a pytree. With `cast_inputs`, outputs narrower than float32
            are cast to float32 before `loss_fn` gets them.
        loss_only: return only the first floating scalar of the result, which is the loss.
    """

    loss_fn: Callable[..., Any] | None = None
    targets: int = 0
    cast_inputs: Callable[[Any], Any] | None = None
    loss_only: bool = False

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = self._outputs(model, args, kwargs)
        if not self.loss_only:
            return outputs
        register_dataclasses(outputs)
        return find_loss(outputs)

    def _outputs(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cut = len(args) - self.targets
        taken = (args[:cut], kwargs)
        taken_args, taken_kwargs = taken if self.cast_inputs is None else self.cast_inputs(taken)
        outputs = model(*taken_args, **taken_kwargs)
        if self.loss_fn is None:
            return outputs
        if self.cast_inputs is not None:
            register_dataclasses(outputs)
            outputs = pytree.tree_map_only(Tensor, widen, outputs)
        return self.loss_fn(outputs, *args[cut:])


def flatten_result(value: Any, result: Result) -> list[Tensor]:
    """Return the tensors in a model's result. Write its structure and all its other leaves into `result`."""
    register_dataclasses(value)
    leaves, result.tree = pytree.tree_flatten(value)
    result.indices = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    others = {i: leaf for i, leaf in enumerate(leaves) if i not in result.indices}
    result.constants = {i: leaf if _is_plain(leaf) else None for i, leaf in others.items()}
    result.dropped = tuple(type(leaf).__qualname__ for leaf in others.values() if not _is_plain(leaf))
    return [leaves[i] for i in result.indices]


def warn_of_dropped(result: Result) -> None:
    """Log a warning for each object of the model's result that becomes None in the program."""
    for kind in result.dropped:
        _LOGGER.warning(
            "the model returns an object of type %s, which a program cannot return: it becomes None "
            "(a key-value cache is switched off with use_cache=False)",
            kind,
        )
