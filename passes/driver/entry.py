"""The functions that `autoshard.api` calls."""

from passes.driver.compile_model import compile_model
from passes.driver.plan_model import plan_model
from passes.driver.pricing import price
from passes.driver.proofs import prove_model, verify_compiled

__all__ = ["compile_model", "plan_model", "price", "prove_model", "verify_compiled"]
