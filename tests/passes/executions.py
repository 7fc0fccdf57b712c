"""Executions of recipes under runtimes with unequal features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoshard.ir.execution import Execution


def under(execution: Execution, **fields: Any) -> Execution:
    """The same under a runtime with other fields."""
    return replace(execution, runtime=replace(execution.runtime, **fields))
