"""`OfModel`: the base class of modules that show the members and attributes of a user's model as their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from autoshard.errors import TraceError
from autoshard.ir.under_trace import is_under_trace


class OfModel(nn.Module, ABC):
    """A module in place of a user's model, with the same members and attributes.

    Attributes set before `_become` belong to the module itself. Each instance gets a class of its own, whose `forward`
    has the signature of the model's.
    """

    _original: tuple[nn.Module]
    """The model, in a tuple, so that it is not registered as a submodule."""

    @abstractmethod
    def whole_parameters(self) -> AbstractContextManager[None]:
        """Within the context, parameters are plain whole tensors for the user's own code."""

    def _become(self, model: nn.Module) -> None:
        """Share the members, attributes and state dict hooks of `model`: a change of either module shows in both."""
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        vars(self).update({name: vars(model)[name] for name in _HOOKS_ON_STATE})
        self._original = (model,)
        self.__class__ = _class_for(type(self), type(model))  # pyright: ignore[reportAttributeAccessIssue]

    def __reduce__(self) -> Any:
        """Pickle the module by its base class, because its own class is made at run time."""
        (kind, *_), (model,) = type(self).__bases__, self._original
        return _new_for, (kind, type(model)), self.__getstate__()

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise `TraceError`: `torch.jit.script`, which calls this method, cannot compile this module."""
        refuse_capture(f"{type(self).__name__} (the compiled {type(self._original[0]).__qualname__})")

    def __getattr__(self, name: str) -> Any:
        """Look up members of this module, then attributes of the user's model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None:
                raise
            found = getattr(original[0], name)
            return self._of_own_code(found) if isinstance(found, MethodType) else found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the module's own attributes on itself, any other attribute on the user's model, `training` on both."""
        if self._is_own(name):
            super().__setattr__(name, value)
        if "_original" in vars(self) and (name == "training" or not self._is_own(name)):
            setattr(self._original[0], name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._original[0], name)

    def _is_own(self, name: str) -> bool:
        own = vars(self)
        return "_original" not in own or name in own or hasattr(type(self), name)

    def _of_own_code(self, method: MethodType) -> Callable[..., Any]:
        @wraps(method)
        def run_method(*args: Any, **kwargs: Any) -> Any:
            with self.whole_parameters():
                return method(*args, **kwargs)

        return run_method


_HOOKS_ON_STATE = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Names of the dicts in which a module keeps its hooks on state dicts."""


def _class_for(kind: type[OfModel], model_class: type[nn.Module]) -> type[OfModel]:
    """Return a subclass of `kind` whose `forward` has the signature of the model's `forward`.

    The Trainer of transformers inspects this signature. `torch.compile` does not compile the call.
    """

    @wraps(model_class.forward)
    def forward(self: OfModel, *args: Any, **kwargs: Any) -> Any:
        if is_under_trace():
            raise TraceError(
                f"The traced code calls a {kind.__name__}, the compiled {model_class.__qualname__}, and a program "
                "cannot call another one. Compile the whole, with the original module in place of the compiled part."
            )
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            refuse_capture(f"{kind.__name__} (the compiled {model_class.__qualname__})")
        return kind.forward(self, *args, **kwargs)

    whole = torch.compiler.disable(forward, reason="autoshard has compiled the module: leave fullgraph=True out")
    of_container = {name: _of_original(name) for name in _OF_CONTAINERS if hasattr(model_class, name)}
    return type(kind.__name__, (kind,), {"forward": whole, "__module__": kind.__module__, **of_container})


_OF_CONTAINERS = ("__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__", "__reversed__")
"""Special methods of containers such as `nn.Sequential`. Python looks them up on the class, not by `__getattr__`."""


def _of_original(name: str) -> Callable[..., Any]:
    def call(self: OfModel, *args: Any) -> Any:
        return getattr(self._original[0], name)(*args)

    return call


def refuse_capture(captured: str) -> NoReturn:
    """Raise `TraceError`: `torch.jit` and `torch.export` cannot capture the object that `captured` describes."""
    raise TraceError(
        f"torch.jit.script, torch.jit.trace and torch.export cannot capture a {captured}, which runs a program of its "
        "own on a mesh. Capture the original module instead; .export(folder) writes the weights for it."
    )


def _new_for(kind: type[OfModel], model_class: type[nn.Module]) -> OfModel:
    made = _class_for(kind, model_class)
    return made.__new__(made)
