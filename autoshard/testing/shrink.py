"""Shrink a program that computes other numbers than one device to a few calls, written as a script.

1. The failing program runs on one device, and each value is recorded.
2. A part is a list of the program's calls; values that it reads from other calls are its inputs. Bisection finds the
   shortest beginning of the program that differs, and then the shortest ending of this beginning. Then calls are
   removed one by one while the rest differs.
3. To try a part, the source of a module that makes its calls is written, as it will be printed. The module is traced,
   planned with the specs of the failing plan, lowered, run on the simulator, and compared with the module itself.
"""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from autoshard.errors import AutoshardError
from autoshard.ir.plan import Plan
from autoshard.ir.program import InputKind, Program
from autoshard.ir.spec import PartitionSpec
from autoshard.rules.fan_out import fan_out
from autoshard.rules.local import stride_free
from autoshard.rules.registry import author_of_rule
from autoshard.testing.calls import check_calls
from autoshard.testing.one_device import OneDevice
from autoshard.testing.source import run_code
from autoshard.tracing.operators import defining_module
from passes.strategies.enumerate_strategies import resolve

_LITERAL_ELEMENTS = 64
"""A tensor of at most this many integers is printed element by element. A larger tensor is drawn from its range."""

Given = Mapping[tuple[str, str], Tensor]
"""The values of a program's inputs, by kind and name. Inputs that are missing here are drawn."""


def find_small_failure(program: Program, plan: Plan, given: Given) -> str:
    """Return a short script in which a few calls of a program differ from one device under the specs of `plan`.

    Return "" if no such calls are found.

    Args:
        program: the traced program as it was lowered, with the plan's recomputed values.
        plan: the plan whose run differed.
        given: values of the program's inputs.
    """
    values = _record(program, given)
    calls = [node for node in program.graph.nodes if _is_call(node)]
    if not calls:
        return ""
    shrinking = _Shrinking(values, plan)
    return shrinking.source(shrinking.smallest(calls)) if shrinking.differs(calls) else ""


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem and node.target is not fan_out


def _record(program: Program, given: Given) -> Mapping[fx.Node, Any]:
    drawing = torch.Generator().manual_seed(0)
    values = [
        given[slot.kind, slot.name] if (slot.kind, slot.name) in given else _draw(slot.kind, node.meta["val"], drawing)
        for slot, node in zip(program.inputs, program.graph.find_nodes(op="placeholder"), strict=True)
    ]
    interpreter = OneDevice(program.graph_module, garbage_collect_values=False)
    with torch.no_grad():
        interpreter.run(*values)
    return interpreter.env


def _draw(kind: InputKind, like: Tensor, drawing: torch.Generator) -> Tensor:
    """Draw an input whose value is not given.

    Tangents (gradients of outputs) are normal, other floats lie between 0 and 1, and integers are 1.
    """
    if not like.is_floating_point():
        return torch.ones(like.shape, dtype=like.dtype)
    draw = torch.randn if kind is InputKind.TANGENT else torch.rand
    return draw(like.shape, generator=drawing, dtype=torch.float64).to(like.dtype)


@dataclass(slots=True)
class _Shrinking:
    values: Mapping[fx.Node, Any]
    plan: Plan
    known: dict[str, bool] = field(default_factory=dict)

    def smallest(self, calls: Sequence[fx.Node]) -> Sequence[fx.Node]:
        end = _first(len(calls), lambda count: self.differs(calls[: count + 1])) + 1
        start = _first(end, lambda count: self.differs(calls[end - count - 1 : end])) + 1
        found = list(calls[end - start : end])
        for call in found[:-1]:
            without = [item for item in found if item is not call]
            if self.differs(without):
                found = without
        return found

    def differs(self, calls: Sequence[fx.Node]) -> bool:
        """Whether `calls` alone, under the plan's specs on the simulator, compute other numbers than on one device."""
        source = self.source(calls)
        if source not in self.known:
            self.known[source] = _fails(source)
        return self.known[source]

    def source(self, calls: Sequence[fx.Node]) -> str:
        """Return a script that runs `calls` by `check_calls` under the plan's specs.

        Its inputs are drawn like the recorded values.
        """
        part = _Statements(calls)
        specs = [self._spec(node) for node in part.inputs]
        lines = [
            "import torch",
            "from torch import nn",
            "",
            "import autoshard",
            "from autoshard import Mesh, P",
            "from autoshard.testing import check_calls",
            *_imports(calls),
            "",
            "",
            "class Small(nn.Module):",
            f"    def forward(self, {', '.join(map(str, part.inputs))}):",
            *(f"        {line}" for line in part.lines),
            f"        return {_tuple_text(map(str, part.results))}",
            "",
            "",
            "torch.manual_seed(0)",
            "model = Small()",
            f"inputs = {_tuple_text(_value_text(self.values[node]) for node in part.inputs)}",
            f"mesh = Mesh({dict(self.plan.mesh.axes)})",
            f"given = {_tuple_text(map(str, specs))}  # the specs of the inputs",
            "calls = (  # the specs of each call's operands and results",
            *(f"    ({self.plan.nodes[node.name].inputs}, {self.plan.nodes[node.name].outputs})," for node in calls),
            ")",
            'if __name__ == "__main__":',
            "    check_calls(model, mesh, inputs, given, calls).raise_if_different()",
            "",
        ]
        return "\n".join(lines)

    def _spec(self, node: fx.Node) -> PartitionSpec:
        source, result = resolve(node)
        return PartitionSpec() if source.op == "get_attr" else self.plan.nodes[source.name].outputs[result]


_OWN_NAMESPACES = ("aten", "prims", "autoshard")


def _imports(calls: Sequence[fx.Node]) -> list[str]:
    """Return import lines for the modules that define users' operators and rules.

    An operator without a known module gives a comment.
    """
    found: dict[str, None] = {}
    for target in dict.fromkeys(call.target for call in calls):
        if not isinstance(target, OpOverload) or target.namespace in _OWN_NAMESPACES:
            continue
        modules = {name for name in (defining_module(target), author_of_rule(target)) if name is not None}
        known = sorted(name for name in modules if not name.startswith("autoshard.") and _may_be_imported(name))
        found.update(dict.fromkeys(f"import {name}  # defines {target}, or its rule" for name in known))
        if not known:
            found[f"# import the module that defines {target}, and the module of its rule, here"] = None
    return list(found)


def _may_be_imported(name: str) -> bool:
    """Whether another script can import the module `name`; a module that was run as a script cannot be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # the module's package is missing, or the module has no spec
        return False


def _first(count: int, holds: Callable[[int], bool]) -> int:
    """Return by bisection the smallest number below `count` for which `holds` is true.

    If `holds` is true for a number, it must be true for all larger ones. For the last number, `holds` is assumed to be
    true.
    """
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high


def _fails(source: str) -> bool:
    try:
        part = run_code(source)
        return not check_calls(*(part[name] for name in ("model", "mesh", "inputs", "given", "calls"))).is_equal
    except (AutoshardError, RuntimeError, TypeError, ValueError, IndexError):
        return False  # the calls cannot be made by themselves


@dataclass(slots=True)
class _Statements:
    """Calls as Python statements, with the values that they read and the results that no call reads."""

    calls: Sequence[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        read: set[fx.Node] = set()
        made: list[fx.Node] = []
        inside = set(self.calls)
        for call in self.calls:
            for operand in dict.fromkeys(map(_held, call.all_input_nodes)):
                read.add(operand)
                if resolve(operand)[0] not in inside and operand not in self.inputs:
                    self.inputs.append(operand)
            self.lines.append(f"{call} = {_call_text(call)}")
            selected = [user for user in call.users if user.target is operator.getitem]
            self.lines += [f"{user} = {call}[{user.args[1]}]" for user in selected]
            made += selected if selected else [call]
        self.results = [node for node in made if node not in read]


def _tuple_text(items: Iterable[str]) -> str:
    return f"({' '.join(f'{item},' for item in items)})"


def _held(node: fx.Node) -> fx.Node:
    """Return the node that computes the value of `node`, behind any identity nodes (`fan_out`)."""
    while node.target is fan_out:
        (node,) = node.all_input_nodes
    return node


def _call_text(node: fx.Node) -> str:
    target: Any = stride_free(node.target)
    assert isinstance(target, OpOverload), f"{target} is no operator"
    arguments = [_argument_text(item) for item in node.args]
    arguments += [f"{name}={_argument_text(item)}" for name, item in node.kwargs.items()]
    return f"torch.ops.{target}({', '.join(arguments)})"


def _argument_text(item: Any) -> str:
    if isinstance(item, fx.Node):
        return str(_held(item))
    if isinstance(item, (list, tuple)):
        return f"[{', '.join(map(_argument_text, item))}]"
    if isinstance(item, torch.device):
        return f"torch.{item!r}"
    return f"float({str(item)!r})" if isinstance(item, float) and not _is_finite(item) else repr(item)


def _is_finite(number: float) -> bool:
    return number - number == 0


def _value_text(value: Tensor) -> str:
    """Return code for a tensor with the shape and dtype of `value`.

    At most `_LITERAL_ELEMENTS` integers are written out; more integers are drawn from the range of `value`. Bools and
    floats are drawn. The floats are positive if those of `value` are.
    """
    shape = list(value.shape)
    if value.dtype is torch.bool:
        return f"torch.rand({shape}) > 0.5"
    if not value.is_floating_point():
        if value.numel() <= _LITERAL_ELEMENTS:
            return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
        return f"torch.randint({int(value.min())}, {int(value.max()) + 1}, {shape}, dtype={value.dtype})"
    draw = "torch.rand({}) + 0.5" if bool((value > 0).all()) else "torch.randn({})"
    return f"({draw.format(shape)}).to({value.dtype})"
