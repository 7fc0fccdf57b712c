"""Compile, plan and verify: what stands between a user's call and the passes."""

from passes.driver.compile_model import compile_model
from passes.driver.plan_model import plan_model
from passes.driver.pricing import price
from passes.driver.proofs import prove_model, verify_compiled

__all__ = ["compile_model", "plan_model", "price", "prove_model", "verify_compiled"]
