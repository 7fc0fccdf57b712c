"""Formulas of recipes' plans, and what they say at some sizes."""

from __future__ import annotations

import sympy
import torch

from autoshard import Cluster, Plan
from autoshard.ir.execution import Execution
from passes.driver.pricing import price_execution
from tests.passes.decoders import Decoder


def price_of(recipe: Execution, length: int, model: Decoder) -> Plan:
    """A recipe's plan, a price alone."""
    one = torch.zeros(1, length, dtype=torch.int64, device="meta")
    return price_execution(model, Cluster("h100_sxm", 1, recipe.devices), recipe, (one, one))


def value_of(plan: Plan, name: str, **sizes: int) -> sympy.Expr:
    """A plan's formula at some sizes."""
    formula = plan.formula(name)
    value = formula.subs({symbol: sizes[str(symbol)] for symbol in formula.free_symbols})
    assert not value.free_symbols
    return value
