"""Records the attributes of modules that a traced call reads before setting them, and the attributes that it sets.

A program depends on the attributes that its trace read. Code that uses `vars` reads all attributes of a module. After
Dynamo, which analyses bytecode instead of running it, all attributes count as read.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from autoshard.ir.python_guards import PythonUse
from autoshard.ir.python_values import PLAIN
from autoshard.ir.watched_numbers import plain_number
from autoshard.tracing.provenance import PACKAGES

_NOT_READ = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"})
"""Attributes that get no guards when they are read: later calls do not compare them.

A program is looked up by its parameters, buffers and modes, and submodules have guards in any case.
"""

_INNER = (*PACKAGES, functools.__file__)
"""Folders and files of code that reads a module's `__dict__` but not the values in it."""

_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip


class Accesses:
    """Records attributes of modules that a call read before setting them, and attributes that the call set."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[nn.Module, set[str]]] = {}
        self._set: list[tuple[nn.Module, str, Any]] = []

    def has_read(self, module: nn.Module, name: str) -> bool:
        """Whether some run of the call read attribute `name` of a module before setting it."""
        return id(module) in self._read and name in self._read[id(module)][1]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the attributes that a run of the call, within the context, reads and sets.

        The reads are added to those of earlier runs, and the set attributes replace those of earlier runs.
        """
        read, written = _Noted(), _Noted()
        set_attribute = nn.Module.__setattr__

        def get(module: nn.Module, name: str) -> Any:
            if name == "__dict__" and not sys._getframe(1).f_code.co_filename.startswith(_INNER):
                held = object.__getattribute__(module, name)
                read.names(module).update(held.keys() - written.names(module))
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
            for key, (module, names) in read.items():
                self._read.setdefault(key, (module, set()))[1].update(names)
            self._set = [
                (module, name, plain_number(module.__dict__[name]))
                for module, names in written.values()
                for name in sorted(names)
                if isinstance(module.__dict__.get(name, self), PLAIN)
            ]

    def use(self, model: nn.Module, counting: frozenset[tuple[str, str]]) -> PythonUse:
        """Return the attributes that any run of the call read, and the plain values that the last run set.

        Later calls compare these attributes with the model, except `counting`, which every call changes. `counting` has
        pairs of a module's name and an attribute's path.
        """
        titles = {id(module): name for name, module in reversed(list(model.named_modules()))}
        names = []
        for module, found in self._read.values():
            if type(module).__module__.startswith("autoshard.tracing"):
                continue
            title = titles.get(id(module), type(module).__qualname__)
            names.append((title, module, tuple(sorted(filter(_matters, found)))))
        classes = _class_attributes(names)
        members = [(f"{title}._modules", module._modules) for title, module, _ in names]
        outside = [(title, module) for title, module, _ in names if id(module) not in titles]  # such as a loss
        settings = tuple(
            (module, name, value)
            for module, name, value in self._set
            if id(module) in titles and _matters(name) and (titles[id(module)], name) not in counting
        )
        ignored = frozenset(f"{title}.{name}".removeprefix(".") for title, name in counting)
        containers = (*members, *_tensors_of(outside), *_global_hooks())
        return PythonUse((*names, *classes), containers, settings, counting=ignored)


class _Noted(dict[int, tuple[nn.Module, set[str]]]):
    """A dict from the `id` of a module to (the module, names of attributes). The module is thereby kept alive."""

    def names(self, module: nn.Module) -> set[str]:
        found = self.get(id(module))
        if found is None:
            found = self[id(module)] = (module, set())
        return found[1]


def all_reads(model: nn.Module) -> PythonUse:
    """Return the record of a call that read every attribute of the model's modules."""
    names = [
        (title, module, tuple(name for name in vars(module) if _matters(name)))
        for title, module in model.named_modules()
    ]
    members = [(f"{title}._modules", module._modules) for title, module, _ in names]
    return PythonUse(tuple(names), (*members, *_global_hooks()))


def _matters(name: str) -> bool:
    return name not in _NOT_READ and not (name.startswith("__") and name.endswith("__"))


def _class_attributes(names: list[tuple[str, nn.Module, tuple[str, ...]]]) -> list[tuple[str, type, tuple[str, ...]]]:
    """Return (class's name, class, names of attributes) for each class in which the named attributes are defined."""
    found: dict[type, set[str]] = {}
    for kind, looked_up in {(type(module), name) for _, module, names in names for name in names}:
        owner = next((base for base in kind.__mro__ if looked_up in vars(base)), None)
        if owner is not None:
            found.setdefault(owner, set()).add(looked_up)
    return [(kind.__qualname__, kind, tuple(sorted(held))) for kind, held in found.items()]


def _tensors_of(named: list[tuple[str, nn.Module]]) -> list[tuple[str, Any]]:
    """Return (path, dict) for each dict of parameters or buffers of the modules."""
    return [(f"{title}.{kind}", vars(module)[kind]) for title, module in named for kind in ("_parameters", "_buffers")]


def _global_hooks() -> list[tuple[str, Any]]:
    return [(name.removeprefix("_"), getattr(torch_module, name)) for name in _GLOBAL_HOOKS]
