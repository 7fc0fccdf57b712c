"""Trainers of other libraries on compiled steps. A library is imported at its first use."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoshard.integrations import lightning as lightning
    from autoshard.integrations import transformers as transformers

__all__ = ["lightning", "transformers"]


def __getattr__(name: str) -> ModuleType:
    """Import the module of a library at its first use."""
    if name in __all__:
        return import_module(f"autoshard.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
