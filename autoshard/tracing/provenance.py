"""Finds the module and the user's line of code that made each node.

While the model runs, a function mode sees each call of a torch function. It annotates the nodes made by the call with
the innermost running module, and with the innermost frame outside torch and autoshard. Backward nodes carry the
sequence number of their forward operator, and take its annotation.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.fx import traceback as fx_traceback
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

_MODULE, _SOURCE = "autoshard_module", "autoshard_source"
PACKAGES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)
"""Folders of torch and of this package, whose code is not the user's."""
_PLANNER = str(Path(__file__).resolve().parents[2] / "passes") + os.sep
"""Folder of the code that starts a trace. Frames that called this code are no part of the model."""


class ProvenanceMode(TorchFunctionMode):
    """Annotates each new node with the running module and the user's line while the mode is active."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(module): name for name, module in reversed(list(model.named_modules()))}
        self._stack: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return func(*args, **(kwargs or {}))
        note = {_MODULE: self._stack[-1] if self._stack else "", _SOURCE: user_line(sys._getframe(1))}
        with fx_traceback.annotate(note):
            return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def follow_modules(self) -> Iterator[None]:
        """Within the context, record which module of the model runs, so that nodes can be annotated with it."""

        def enter(module: nn.Module, _: Any) -> None:
            if id(module) in self._names:
                self._stack.append(self._names[id(module)])

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if id(module) in self._names and self._stack:
                self._stack.pop()

        self._stack.clear()
        before = register_module_forward_pre_hook(enter)
        after = register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()


@contextlib.contextmanager
def attributed_to(module: str) -> Iterator[None]:
    """Within the context, annotate new nodes with the path `module`, and with no line of the user."""
    with fx_traceback.annotate({_MODULE: module, _SOURCE: ""}):
        yield


def user_line(frame: FrameType | None) -> str:
    """Return the user's innermost line among `frame` and its callers, such as "model.py:12 in forward", or ""."""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PLANNER):
            return ""
        if not path.startswith(PACKAGES) and not path.startswith("<"):
            return f"{os.path.basename(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def line_of_error(error: BaseException) -> str:
    """Return the user's innermost line in the traceback of `error`, such as "model.py:12 in forward", or ""."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if not path.startswith(PACKAGES) and not path.startswith("<"):
            code = trace.tb_frame.f_code
            lines.append(f"{os.path.basename(path)}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    return lines[-1] if lines else ""


def module_of_error(error: BaseException, model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return name and module of the innermost submodule in the traceback of `error`; None if no submodule is in it."""
    names = {id(module): name for name, module in model.named_modules() if name}
    found, trace = None, error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            found = names[id(owner)], owner
        trace = trace.tb_next
    return found


def attribute_nodes(graph: fx.Graph) -> None:
    """Set `meta["module"]` and `meta["source"]` on every node: a module's path, and the user's line.

    A backward node takes the path and line of its forward operator. If this operator is unknown, it takes its own
    annotation, or the path and line of its first operand.
    """
    by_sequence: dict[int, tuple[str, str]] = {}
    for node in graph.nodes:
        note = _annotation(node)
        if note is not None and "seq_nr" in node.meta and not _is_backward(node):
            by_sequence.setdefault(node.meta["seq_nr"], note)
    for node in graph.nodes:
        node.meta["module"], node.meta["source"] = _provenance(node, by_sequence)


def _provenance(node: fx.Node, by_sequence: dict[int, tuple[str, str]]) -> tuple[str, str]:
    if node.op in ("placeholder", "output"):
        return "", ""
    if not _is_backward(node):
        return _annotation(node) or _inherited(node)
    if "Gradient addition node" in (node.meta.get("stack_trace") or ""):
        return _inherited(node, last=True)  # the first operand may already be a sum of later modules' gradients
    return by_sequence.get(node.meta.get("seq_nr", -1)) or _annotation(node) or _inherited(node)


def _inherited(node: fx.Node, *, last: bool = False) -> tuple[str, str]:
    """Return module path and user's line of the node's first operand that is no placeholder; ("", "") without one.

    With `last`, the last such operand is taken.
    """
    for operand in reversed(node.all_input_nodes) if last else node.all_input_nodes:
        if operand.op != "placeholder":
            return operand.meta.get("module", ""), operand.meta.get("source", "")
    return "", ""


def _annotation(node: fx.Node) -> tuple[str, str] | None:
    custom = node.meta.get("custom") or {}
    return (custom[_MODULE], custom[_SOURCE]) if _MODULE in custom else None


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward" or bool(node.meta.get("autograd_backward"))
