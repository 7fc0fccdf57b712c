"""Errors of the cost models, as users see them.

`cost_models` imports nothing of `autoshard`, so it has error classes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autoshard.errors import NotAvailableError, UnknownHardwareError
from cost_models import errors

_OF_HARDWARE = (errors.UnknownHardwareError, errors.HardwareFileError, errors.TopologyError)


@contextmanager
def errors_of_ours() -> Iterator[None]:
    """Within the context, raise an `AutoshardError` with the same message in place of an error of `cost_models`.

    Errors about hardware become `UnknownHardwareError`, all others `NotAvailableError`.
    """
    try:
        yield
    except errors.CostModelError as error:
        kind = UnknownHardwareError if isinstance(error, _OF_HARDWARE) else NotAvailableError
        raise kind(str(error)) from error
