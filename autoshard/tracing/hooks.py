"""Watches the hooks of modules during a trace. The effect of hooks on tensors becomes part of the program.

A compiled call runs no hooks. A hook without effect on the program has another purpose: it stores activations, logs,
or counts. It would silently stop working, so `TraceError` is raised. Hooks of torch and transformers (weight norm,
pruning, captured outputs) serve only the call, and are not watched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from autoshard.errors import TraceError
from autoshard.ir.fingerprint import fingerprint
from autoshard.ir.program import Program

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TRUSTED = ("torch", "transformers", "autoshard")


@dataclass(slots=True)
class WatchedHook:
    """A hook that ran during a trace.

    Args:
        name: the hook's name, for messages.
        title: path of the first module that it ran on.
        acts: whether it returned a new value, or changed a tensor of the call or an attribute of the module.
    """

    name: str
    title: str
    acts: bool = False


Hooks = dict[Any, WatchedHook]
"""Code object of a hook → the hook that ran. Closures of one function share one entry."""


@contextlib.contextmanager
def watching_hooks(model: nn.Module, without: Collection[Any] = ()) -> Iterator[Hooks]:
    """Record the user's hooks that run within the context, on modules of `model` or globally; yield the record.

    Hooks whose code objects are in `without` do not run within the context.
    """
    watched: Hooks = {}
    replaced = []
    for title, table in _tables(model):
        for key, hook in list(table.items()):
            if not _is_trusted(hook):
                table[key] = _watch(hook, title, watched, without)
                replaced.append((table, key, hook))
    try:
        yield watched
    finally:
        for table, key, hook in replaced:
            if key in table:
                table[key] = hook


def refuse_idle_hooks(
    model: nn.Module, hooks: Hooks, program: Program, trace_without: Callable[[Collection[Any]], Program]
) -> None:
    """Raise `TraceError` if a hook has no effect on the program, because a compiled call would not run it.

    Args:
        model: the traced model.
        hooks: the hooks that ran during the trace.
        program: the program of the trace.
        trace_without: takes code objects of hooks, and returns the program of a trace without these hooks.
    """
    idle = [code for code, hook in hooks.items() if not hook.acts]
    if not idle:
        return
    expected = fingerprint(program)

    def changes_nothing(codes: Collection[Any]) -> bool:
        try:
            return fingerprint(trace_without(codes)) == expected
        except TraceError:
            return False  # the model needs the hook's result

    useless = idle if changes_nothing(idle) else [code for code in idle if len(idle) > 1 and changes_nothing([code])]
    if useless:
        names = " and ".join(_text(hooks[code]) for code in useless)
        raise TraceError(
            f"The call of {type(model).__qualname__} runs {names}, without which it computes the same. A compiled call "
            "would not do the hook's other work (keeping activations, logging, counting). Remove it, and return "
            "its values from forward; or call the model that is not compiled."
        )


def hooks_note(hooks: Hooks) -> Iterator[str]:
    """Yield a note for the user if the program contains the effect of hooks on tensors."""
    acting = [_text(hook) for hook in hooks.values() if hook.acts]
    if acting:
        yield (
            f"The effect of {' and '.join(acting)} on tensors is part of the compiled call. Its other effects "
            "(logging, keeping tensors) happen while a call is traced, not at each call."
        )


def _tables(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for title, module in model.named_modules():
        yield from ((title, getattr(module, name)) for name in _TABLES)
    yield from (("every module", getattr(torch_module, f"_global{name}")) for name in _TABLES)


def _is_trusted(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    owner = getattr(hook, "__module__", None) or type(hook).__module__
    return owner.partition(".")[0] in _TRUSTED


def _code(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    return getattr(hook, "__code__", type(hook))


def _watch(hook: Any, title: str, watched: Hooks, without: Collection[Any]) -> Callable[..., Any]:
    code = _code(hook)

    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return hook(module, *args, **kwargs)
        if code in without:
            return None
        before = _state(module, args, kwargs)
        result = hook(module, *args, **kwargs)
        note = watched.setdefault(code, WatchedHook(getattr(code, "co_name", None) or code.__qualname__, title))
        note.acts |= not _is_as_given(result, args) or _state(module, args, kwargs) != before
        return result

    return run


def _is_as_given(result: Any, args: tuple[Any, ...]) -> bool:
    if result is None:
        return True
    given = [*args, *(item[0] for item in args if isinstance(item, tuple) and len(item) == 1)]
    return any(result is item for item in given)


def _state(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Return numbers that change if a hook changes a tensor of the call or an attribute of the module."""
    tensors = [*pytree.tree_leaves((args, kwargs)), *module.parameters(recurse=False), *module.buffers(recurse=False)]
    return [*(item._version for item in tensors if isinstance(item, Tensor)), *map(id, vars(module).values())]


def _text(hook: WatchedHook) -> str:
    where = "the model" if not hook.title else hook.title if " " in hook.title else f"module {hook.title!r}"
    return f"hook {hook.name!r} on {where}"
