"""Programs: traced graphs with names for inputs and results.

A program's graph is a `torch.fx.Graph` over ATen and semantic operators, with global shapes. It is functional: no node
changes its operands. Its placeholders come in the order of `inputs`, and its output node returns a flat tuple in the
order of `outputs`. Node metadata:

* `val`: a fake or meta tensor of global shape (a tuple of them for operators with several results);
* `phase`: "forward", "backward", or, in the program of a whole training step, "update";
* `module`: qualified path of the user's module that issued the operator, or "";
* `source`: the user's line, "model.py:12 in forward", or "".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec

from autoshard.ir.python_guards import PythonUse
from autoshard.ir.repeat import Repeat


class InputKind(StrEnum):
    """Kind of a program's input.

    A tangent is the gradient of an output, and an input of the backward. A seed starts the random numbers. State and
    hyper-parameters belong to the optimizer.
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"
    SEED = "seed"
    STATE = "state"
    HYPER = "hyper"
    SQUARES = "squares"
    """Input of a pipeline stage: the sum of squares of the gradients of all stages, for the gradients' norm."""
    UNSCALE = "unscale"
    """Input of a training step in float16: the factor that removes the scale of the loss from gradients, a scalar."""


class OutputKind(StrEnum):
    """Kind of a program's result: an output, a gradient, an updated tensor, or a value for another pipeline stage."""

    OUTPUT = "output"
    GRADIENT = "gradient"
    INPUT_GRADIENT = "input_gradient"
    BUFFER_UPDATE = "buffer_update"
    PARAMETER_UPDATE = "parameter_update"
    STATE_UPDATE = "state_update"
    SENT_GRADIENT = "sent_gradient"
    """Result of a pipeline stage: a value of its backward, such as a gradient, that an earlier stage reads."""
    SQUARES = "squares"
    """Result of a pipeline stage: the sum of squares of its own gradients."""
    NORM = "norm"
    """Result of a training step without stages: the norm over the gradients of all parameters, before clipping."""


_TRAINING = (OutputKind.GRADIENT, OutputKind.PARAMETER_UPDATE, OutputKind.SENT_GRADIENT)


@dataclass(frozen=True, slots=True)
class InputSlot:
    """One input: the name of its placeholder, its kind, and its qualified name.

    `aliases` has the further names of a tied parameter.
    """

    node: str
    kind: InputKind
    name: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputSlot:
    """One result of a program: the name of its node, its kind, and its own name.

    `name` is "output:0" for an output, the parameter's name for a gradient, "input:0" for the gradient of an input. An
    updated tensor keeps its name ("exp_avg:wte.weight" for optimizer state). A `detached` output requires no grad in
    the user's model.
    """

    node: str
    kind: OutputKind
    name: str
    detached: bool = False


OWNERS: Mapping[OutputKind, InputKind] = MappingProxyType(
    {
        OutputKind.GRADIENT: InputKind.PARAMETER,
        OutputKind.INPUT_GRADIENT: InputKind.INPUT,
        OutputKind.BUFFER_UPDATE: InputKind.BUFFER,
        OutputKind.PARAMETER_UPDATE: InputKind.PARAMETER,
        OutputKind.STATE_UPDATE: InputKind.STATE,
    }
)
"""Kind of a result → the kind of the input with the same name and spec.

For example, a gradient has its parameter's name and spec. Outputs of the model have no such input.
"""


@dataclass(frozen=True, slots=True)
class Guard:
    """A value that the trace relied on: the traced node `node` had `value` on the example inputs."""

    node: str
    value: bool | int | float


@dataclass(frozen=True, slots=True)
class Program:
    """A traced graph with global shapes, in the form that the module's docstring describes.

    Args:
        inputs: one slot per placeholder, in order.
        outputs: one slot per element of the output tuple, in order.
        output_tree: pytree structure that turns the flat outputs into the model's result. Leaves other than tensors are
            in `output_constants`, by leaf index.
        guards: values that the trace relied on; `guard_program` computes them from the inputs.
        repeats: blocks of the model that the program leaves out; only programs for planning have them.
        python: Python values that the model read and set during the trace.
        unreached: for each tangent, the slots that get no gradient (None, not zeros) in a backward from the tangent's
            output alone. Tangents and slots are given by name.
        own_gradients: names of `torch.autograd.Function` classes in the model, whose gradients the authors wrote.
        kept: leaf index of an output to the module attribute ("router.aux_loss") in which the call stores the output. A
            call does not return these outputs.
    """

    graph_module: fx.GraphModule
    inputs: tuple[InputSlot, ...]
    outputs: tuple[OutputSlot, ...]
    output_tree: TreeSpec | None = None
    output_constants: dict[int, Any] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    guard_program: fx.GraphModule | None = None
    repeats: tuple[Repeat, ...] = ()
    python: PythonUse = field(default_factory=PythonUse)
    kept: Mapping[int, str] = field(default_factory=dict)
    unreached: Mapping[str, frozenset[str]] = field(default_factory=dict)
    own_gradients: tuple[str, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        """The fx graph of `graph_module`."""
        return self.graph_module.graph

    def nodes_by_name(self) -> dict[str, fx.Node]:
        """Return a new dict from the name of each node to the node, in program order."""
        return {node.name: node for node in self.graph.nodes}

    def inputs_of(self, kind: InputKind) -> tuple[InputSlot, ...]:
        """Return the input slots of one kind, in the order of `inputs`."""
        return tuple(slot for slot in self.inputs if slot.kind == kind)

    def read_by_guards(self) -> tuple[InputSlot, ...]:
        """Return the input slots that `guard_program` takes, in the order of its placeholders."""
        if self.guard_program is None:
            return ()
        slots = {slot.node: slot for slot in self.inputs}
        return tuple(slots[str(node.target)] for node in self.guard_program.graph.nodes if node.op == "placeholder")

    def outputs_of(self, kind: OutputKind) -> tuple[OutputSlot, ...]:
        """Return the output slots of one kind, in the order of `outputs`."""
        return tuple(slot for slot in self.outputs if slot.kind == kind)

    @property
    def trains(self) -> bool:
        """Whether the program returns gradients of parameters, updated parameters, or gradients for another stage."""
        return any(slot.kind in _TRAINING for slot in self.outputs)

    def text(self) -> str:
        """Return the program as readable text, the same in every process that traced the same model."""
        return "\n".join(_lines(self))

    def digest(self) -> str:
        """Return a hash of `text`, 16 hex digits, computed once and kept with the graph."""
        of, digest = self.graph_module.meta.get(_DIGEST, (None, ""))
        if of is not self:
            digest = hashlib.sha256(self.text().encode()).hexdigest()[:16]
            self.graph_module.meta[_DIGEST] = (self, digest)
        return digest


_DIGEST = "autoshard: digest"


def tensor_values(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors in a node's `meta["val"]`.

    A tensor gives a tuple of one. A tuple or list gives an entry for each item, which is None for items other than
    tensors. Any other value gives an empty tuple.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(item if isinstance(item, torch.Tensor) else None for item in value)
    return ()


def may_be_tokens(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether an input of this shape and dtype may be a batch of tokens: integers, and no mask of booleans."""
    return bool(shape) and not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def describe(value: Any) -> str:
    """Return dtype and shape of a tensor, or of each tensor in a tuple, as text such as `f32[2, 8]`."""
    if isinstance(value, torch.Tensor):
        return f"{_SHORT_DTYPE.get(value.dtype, str(value.dtype))}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(item) for item in value)})"
    return repr(value)


_SHORT_DTYPE = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def _lines(program: Program) -> Iterator[str]:
    names = {slot.node: slot for slot in program.inputs}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            slot = names[node.name]
            yield f"{node.name}: {describe(node.meta.get('val'))} = {slot.kind.value} {slot.name!r}"
        elif node.op == "output":
            continue
        else:
            spec = f"  # {node.meta['spec']}" if "spec" in node.meta else ""
            yield f"{node.name}: {describe(node.meta.get('val'))} = {_call_text(node)}{spec}"
    for slot in program.outputs:
        yield f"return {slot.kind.value} {slot.name!r} = {slot.node}"
    for repeat in program.repeats:
        yield f"repeat {repeat}"


def _call_text(node: fx.Node) -> str:
    arguments = [_argument_text(argument) for argument in node.args]
    arguments += [f"{key}={_argument_text(value)}" for key, value in node.kwargs.items()]
    return f"{_target_text(node)}({', '.join(arguments)})"


def _target_text(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return f"{node.op} {target}"
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def _argument_text(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_argument_text(item) for item in argument)}]"
    return str(argument)
