"""Write a PyTorch model for one device, and run the model on many devices.

`autoshard.compile(model, mesh)` makes a model run on a mesh; `autoshard.plan(model, cluster)` predicts how the model
would run.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from autoshard import data, report, trackers
from autoshard.api import compile, plan, price, prove, verify
from autoshard.calibration import calibrate
from autoshard.call import Options
from autoshard.checkpoints import Checkpoints
from autoshard.cluster import Cluster
from autoshard.errors import (
    AutoshardError,
    ChangedInPlaceError,
    CheckpointError,
    DoesNotFitError,
    FormulaError,
    InvalidSpecError,
    LostRankError,
    MeshError,
    NonFiniteError,
    NoShardingRuleError,
    NotAvailableError,
    OperatorError,
    PlanMismatchError,
    RankMismatchError,
    RecipeError,
    RuleInferenceError,
    TraceError,
    UnknownHardwareError,
    VerificationError,
)
from autoshard.ir.loss_scaling import LossScaling
from autoshard.ir.mesh import Mesh
from autoshard.ir.plan import Plan
from autoshard.ir.recipe import Recipe
from autoshard.ir.runtime import Runtime
from autoshard.ir.spec import P, PartitionSpec
from autoshard.joined_optimizer import JoinedOptimizer
from autoshard.kernels.tuning_switch import tune_kernels
from autoshard.restarts import Run, run
from autoshard.rules import Rule, infer_rule, sharding_rule
from autoshard.runtime.sharded_module import ShardedModule
from autoshard.runtime.train_step import TrainStep
from autoshard.trackers import track
from cost_models.formulas import vectorise

if TYPE_CHECKING:
    from autoshard import integrations as integrations
    from autoshard import testing as testing

__version__ = "0.1.0.dev0"

__all__ = [
    "AutoshardError",
    "ChangedInPlaceError",
    "CheckpointError",
    "Checkpoints",
    "Cluster",
    "DoesNotFitError",
    "FormulaError",
    "InvalidSpecError",
    "JoinedOptimizer",
    "LossScaling",
    "LostRankError",
    "Mesh",
    "MeshError",
    "NoShardingRuleError",
    "NonFiniteError",
    "NotAvailableError",
    "OperatorError",
    "Options",
    "P",
    "PartitionSpec",
    "Plan",
    "PlanMismatchError",
    "RankMismatchError",
    "Recipe",
    "RecipeError",
    "Rule",
    "RuleInferenceError",
    "Run",
    "Runtime",
    "ShardedModule",
    "TraceError",
    "TrainStep",
    "UnknownHardwareError",
    "VerificationError",
    "__version__",
    "calibrate",
    "compile",
    "data",
    "infer_rule",
    "plan",
    "price",
    "prove",
    "report",
    "run",
    "sharding_rule",
    "track",
    "trackers",
    "tune_kernels",
    "vectorise",
    "verify",
]


def __getattr__(name: str) -> ModuleType:
    """Import `autoshard.integrations` or `autoshard.testing` at its first use."""
    if name in ("integrations", "testing"):
        return import_module(f"autoshard.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
