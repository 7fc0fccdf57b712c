"""A module with the members and attributes of a user's model."""

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
    """A module that stands for a user's model. What it has once it calls `_become` is its own.

    Its class is then one of its own too, for the sake of the signature of `forward`.
    """

    _original: tuple[nn.Module]
    """The model, in a tuple, so that it is no submodule."""

    @abstractmethod
    def whole_parameters(self) -> AbstractContextManager[None]:
        """Within, the user's own code runs beside plain tensors."""

    def _become(self, model: nn.Module) -> None:
        """Have the members of `model`, also those that it is given or loses later; and its attributes."""
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._original = (model,)
        self.__class__ = _class_for(type(self), type(model))  # pyright: ignore[reportAttributeAccessIssue]

    def __reduce__(self) -> Any:
        """See `pickle`: the class is made anew."""
        (kind, *_), (model,) = type(self).__bases__, self._original
        return _new_for, (kind, type(model)), self.__getstate__()

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which calls this."""
        refuse_capture(f"{type(self).__name__} (the compiled {type(self._original[0]).__qualname__})")

    def __getattr__(self, name: str) -> Any:
        """Members of this module, then attributes of the user's model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_original")
            if original is None:
                raise
            found = getattr(original[0], name)
            return self._of_own_code(found) if isinstance(found, MethodType) else found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what this module itself has; any other attribute is the user's model's."""
        if self._is_own(name):
            super().__setattr__(name, value)
        if "_original" in vars(self) and (name == "training" or not self._is_own(name)):
            setattr(self._original[0], name, value)

    def __delattr__(self, name: str) -> None:
        """See `__setattr__`."""
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._original[0], name)

    def _is_own(self, name: str) -> bool:
        own = vars(self)
        return "_original" not in own or name in own or hasattr(type(self), name)

    def _of_own_code(self, method: MethodType) -> Callable[..., Any]:
        """A method of the user's model, which runs on whole parameters."""

        @wraps(method)
        def run_method(*args: Any, **kwargs: Any) -> Any:
            with self.whole_parameters():
                return method(*args, **kwargs)

        return run_method


def _class_for(kind: type[OfModel], model_class: type[nn.Module]) -> type[OfModel]:
    """A class as `kind`, whose `forward` has the signature of the model's: transformers' Trainer asks the class.

    `torch.compile` of the module, or of code that calls it, leaves the call as it is.
    """

    @wraps(model_class.forward)
    def forward(self: OfModel, *args: Any, **kwargs: Any) -> Any:
        if is_under_trace():
            raise TraceError(
                f"The traced code calls a {kind.__name__}, the compiled {model_class.__qualname__}, and a program "
                "cannot call another one. Compile the whole alone, with the module that the part was made of."
            )
        if torch.jit.is_tracing() or torch.compiler.is_exporting():
            refuse_capture(f"{kind.__name__} (the compiled {model_class.__qualname__})")
        return kind.forward(self, *args, **kwargs)

    whole = torch.compiler.disable(forward, reason="autoshard has compiled the module: leave fullgraph=True out")
    return type(kind.__name__, (kind,), {"forward": whole, "__module__": kind.__module__})


def refuse_capture(what: str) -> NoReturn:
    """Raise `TraceError`: torch records or compiles what autoshard has compiled."""
    raise TraceError(
        f"torch.jit.script, torch.jit.trace and torch.export cannot capture a {what}, which runs a program of its own "
        "on a mesh. Capture the module that it was made of; .export(folder) writes the weights for it."
    )


def _new_for(kind: type[OfModel], model_class: type[nn.Module]) -> OfModel:
    made = _class_for(kind, model_class)
    return made.__new__(made)
