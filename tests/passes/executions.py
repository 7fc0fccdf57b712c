"""Change the runtime of a recipe's execution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoshard.ir.execution import Execution


def under(execution: Execution, **fields: Any) -> Execution:
    """Return the execution with the given fields of its runtime replaced."""
    return replace(execution, runtime=replace(execution.runtime, **fields))
