"""Which attributes a traced call reads: those that a program depends on, and no others.

While the call runs, looking an attribute up in any module is noted, and so is setting one. An attribute that the call
sets before it reads it does not depend on what it was. Dynamo reads bytecode instead of running it; then all that
modules hold counts as read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from autoshard.ir.python_guards import PythonReads

_NOT_READ = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"})
"""Members and modes: a program is looked up by parameters, buffers and modes; submodules are always guarded."""

_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip


class Accesses:
    """The attributes of modules that a call read before setting them, and those that it set."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[nn.Module, set[str]]] = {}
        self.written: dict[int, tuple[nn.Module, set[str]]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within, a run of the call is noted; what it reads adds to what runs before it read."""
        read, written = _Noted(), _Noted()
        set_attribute = nn.Module.__setattr__

        def get(module: nn.Module, name: str) -> Any:
            if name not in written.names(module):
                read.names(module).add(name)
            return object.__getattribute__(module, name)

        def put(module: nn.Module, name: str, value: Any) -> None:
            written.names(module).add(name)
            set_attribute(module, name, value)

        nn.Module.__getattribute__ = get  # type: ignore[method-assign]
        nn.Module.__setattr__ = put  # type: ignore[method-assign]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]
            _add(self._read, read)
            _add(self.written, written)

    def reads(self, model: nn.Module, besides: frozenset[tuple[str, str]]) -> PythonReads:
        """What was read; `besides` are attributes that do not matter, by the module's name and their own."""
        titles = {id(module): name for name, module in reversed(list(model.named_modules()))}
        names = []
        for module, found in self._read.values():
            if type(module).__module__.startswith("autoshard.tracing"):
                continue
            title = titles.get(id(module), type(module).__qualname__)
            names.append((title, module, tuple(sorted(n for n in found if _matters(n) and (title, n) not in besides))))
        classes = _class_attributes(names)
        members = [(f"{title}._modules", module._modules) for title, module, _ in names]
        return PythonReads((*names, *classes), (*members, *_global_hooks()))


class _Noted(dict[int, tuple[nn.Module, set[str]]]):
    """Names by the `id` of a module, which is kept alive with them."""

    def names(self, module: nn.Module) -> set[str]:
        found = self.get(id(module))
        if found is None:
            found = self[id(module)] = (module, set())
        return found[1]


def _add(all_runs: dict[int, tuple[nn.Module, set[str]]], run: _Noted) -> None:
    for key, (module, names) in run.items():
        all_runs.setdefault(key, (module, set()))[1].update(names)


def all_reads(model: nn.Module) -> PythonReads:
    """All that the modules of a model hold."""
    names = [
        (title, module, tuple(name for name in vars(module) if _matters(name)))
        for title, module in model.named_modules()
    ]
    members = [(f"{title}._modules", module._modules) for title, module, _ in names]
    return PythonReads(tuple(names), (*members, *_global_hooks()))


def _matters(name: str) -> bool:
    return name not in _NOT_READ and not (name.startswith("__") and name.endswith("__"))


def _class_attributes(names: list[tuple[str, nn.Module, tuple[str, ...]]]) -> list[tuple[str, type, tuple[str, ...]]]:
    """The attributes that were found in classes, by the class that has them."""
    found: dict[type, set[str]] = {}
    for kind, looked_up in {(type(module), name) for _, module, names in names for name in names}:
        owner = next((base for base in kind.__mro__ if looked_up in vars(base)), None)
        if owner is not None:
            found.setdefault(owner, set()).add(looked_up)
    return [(kind.__qualname__, kind, tuple(sorted(held))) for kind, held in found.items()]


def _global_hooks() -> list[tuple[str, Any]]:
    return [(name.removeprefix("_"), getattr(torch_module, name)) for name in _GLOBAL_HOOKS]
