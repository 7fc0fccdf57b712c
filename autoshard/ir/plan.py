"""Plans: the layout of a whole program, with its predicted cost.

A plan gives the specs of operands and results for every node of a traced program. The file is readable JSON: specs are
text such as `P('data', None)`, sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

from autoshard.errors import AutoshardError, FormulaError, NotAvailableError, PlanMismatchError
from autoshard.ir.answers import Comparison, Explanation, Limits, WhyNot, side_by_side
from autoshard.ir.files import read_text, write_text
from autoshard.ir.garbage import seldom_collecting
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import NO_OFFLOAD, Offload
from autoshard.ir.pipeline_order import PipelineOrder
from autoshard.ir.plan_parts import NodePlan, OperatorCoverage, ParameterPlan, Prediction
from autoshard.ir.precision import check_precision
from autoshard.ir.read_json import check_keys, check_version, is_required, parse, read
from autoshard.ir.recipe import Recipe
from autoshard.ir.recompute import NO_RECOMPUTE, Recompute
from autoshard.ir.repeat import Repeat
from autoshard.ir.restored_nodes import by_module
from autoshard.ir.run_estimate import RunEstimate, bytes_of_checkpoint, estimate_run, steps_of
from autoshard.ir.runtime import AUTOSHARD
from autoshard.ir.show import page_of, text_of
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.trace import Trace

if TYPE_CHECKING:
    import sympy

SCHEMA_VERSION = 10
"""Schema version of saved files. `Plan.load` raises `PlanMismatchError` for a file of another version."""

BEFORE = "the plan before"
"""The name in `Plan.baselines` of the plan that `autoshard.plan(previous=)` was given."""

_Specs = tuple[PartitionSpec, ...]
_OF_OTHER_FORM: Mapping[str, Any] = {
    "mesh": Mapping[str, int],
    "nodes": Mapping[str, tuple[_Specs, _Specs]],
    "memory_budget": float | None,
}
"""Fields whose value in JSON has another type than the attribute, with their type in JSON."""

_VERSION, _TIMELINE = "autoshard_plan", "timeline"
_NOT_IN_FILES = ("formulas", "alternatives")
_OF_STAGES = ("stages", "order")
"""Fields that `from_json` reads with functions of their own."""


class Formulas(Protocol):
    """Object that makes the formulas of a plan; the first request traces the model at further sizes."""

    def formula(
        self,
        plan: Plan,
        name: str,
        *,
        dims: Mapping[str, int | Mapping[str, int]] | None,
        fixed: Collection[str],
        even: bool,
    ) -> sympy.Expr:
        """Return the cost `name` of `plan` as an expression, with the arguments of `Plan.formula`."""
        ...


class Alternatives(Protocol):
    """Object that answers questions about a plan by planning the same program again, under other conditions."""

    def why_not(self, plan: Plan, feature: str) -> WhyNot:
        """Return the best plan for each way to have `feature`, the answer of `Plan.why_not`."""
        ...

    def limits(self, plan: Plan) -> Limits:
        """Return the time that more memory or faster hardware would save, the answer of `Plan.limits`."""
        ...

    def explain(self, plan: Plan, name: str) -> Explanation:
        """Return each possible spec of the value `name` with its best plan, the answer of `Plan.explain`."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """A program's layout on a mesh, with its predicted cost.

    Args:
        mesh: axes and sizes of the mesh, with the axis of the pipeline.
        program_digest: digest of the traced program that the plan belongs to.
        inputs: for each input name, the text `dtype[shape]`, such as "f32[2, 8]". Error messages compare a call's
            inputs with these texts.
        nodes: specs of operands and results of every node of the traced program, by node name.
        outputs: spec of every result of the program, by "kind name" ("gradient wte.weight", "output output:0").
        parameters: layout of each parameter, by qualified name.
        predicted: predicted time and memory of a step.
        objective: the sum that the search minimised, in seconds; `lower_bound`: its proven bound, or None.
        search_time_s: wall time of the search, in seconds.
        baselines: predicted step of known recipes, in seconds, each on its fastest mesh; None where the recipe fits on
            no mesh. The step of a recipe far slower than the plan is computed when it is first read.
        hardware: name of the cluster for which the plan's times are predicted.
        memory_budget: memory limit of a device in bytes, or None.
        precision: "bf16", "f16" or "f32" where the program casts wider parameters; None where the model computes in its
            own types.
        recompute: nodes of the forward that the backward computes a second time. `nodes` has both copies.
        offload: nodes of the forward whose values wait in host memory for the backward. `nodes` has their copies to the
            host and back.
        replicated_operators: operators without a sharding rule, as pairs (operator, source line). They run whole on
            every rank.
        operators: layout and time of each operator on each source line, the most expensive first; see `coverage`.
        repeats: blocks that the plan's program leaves out because they equal the blocks that follow. `nodes`,
            `recompute` and `offload` omit the nodes of these blocks; all other fields describe the whole model.
        recipe: the recipe that restricted the search or was priced; None where all specs were searched.
        runtime: "autoshard" for plans that `compile` runs. A plan under another `Runtime` only predicts costs.
        micro_batches: micro-batches of a step; `inputs` and `nodes` describe one micro-batch.
        was_interrupted: Ctrl-C ended the search; the plan is the best found until then.
        was_cut: `time_budget_s` ended the search; more time or a faster machine may find another plan.
        stages: on a mesh with an axis "pipeline", the plan of each stage on the other axes. `nodes` is then empty, and
            the figures are those of the whole step.
        order: tasks of each pipeline rank in a step, in running order; None without stages.
        schedule: name of the order ("1F1B"); "" without stages.
        cuts: for each stage after the first, the name of its first node in the traced forward.
        formulas, alternatives: objects that answer `formula`, and `explain`, `why_not` and `limits`. None for plans
            from files, other processes, `autoshard.price` or `compile`. `formulas` is None under any other runtime.
    """

    mesh: Mesh
    program_digest: str
    inputs: Mapping[str, str]
    nodes: Mapping[str, NodePlan]
    outputs: Mapping[str, PartitionSpec]
    parameters: Mapping[str, ParameterPlan]
    predicted: Prediction
    objective: float
    lower_bound: float | None
    search_time_s: float
    hardware: str
    memory_budget: int | None = None
    precision: str | None = None
    recompute: Recompute = NO_RECOMPUTE
    offload: Offload = NO_OFFLOAD
    baselines: Mapping[str, float | None] = field(default_factory=dict)
    replicated_operators: tuple[tuple[str, str], ...] = ()
    operators: tuple[OperatorCoverage, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    recipe: Recipe | None = None
    runtime: str = AUTOSHARD
    micro_batches: int = 1
    was_interrupted: bool = False
    was_cut: bool = False
    stages: tuple[Plan, ...] = ()
    order: PipelineOrder | None = None
    schedule: str = ""
    cuts: tuple[str, ...] = ()
    formulas: Formulas | None = field(default=None, repr=False, compare=False)
    alternatives: Alternatives | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> list[Any]:
        """Return the fields to pickle, with None for `formulas` and `alternatives`, which hold the model."""
        return [None if item.name in _NOT_IN_FILES else getattr(self, item.name) for item in fields(self)]

    @property
    def coverage(self) -> Mapping[str, tuple[OperatorCoverage, ...]]:
        """Entries of `operators` by layout, the most expensive first.

        The keys are "split" (over some axis), "replicated" (whole on every rank, by choice) and "without rule" (whole,
        for want of a sharding rule).
        """
        return {
            "split": tuple(item for item in self.operators if item.is_split),
            "replicated": tuple(item for item in self.operators if item.has_rule and not item.is_split),
            "without rule": tuple(item for item in self.operators if not item.has_rule),
        }

    @property
    def speedup_over_previous(self) -> float | None:
        """Predicted step time of the plan `previous`, divided by that of this plan, both for this plan's hardware.

        Above 1, this plan is faster. None if the plan was made without `previous`, or if `previous` does not fit.
        """
        before_s, own_s = self.baselines.get(BEFORE), self.predicted.step_time_s
        return before_s / own_s if before_s is not None and own_s > 0 else None

    @property
    def updates(self) -> bool:
        """Whether the planned program includes the optimizer's update."""
        return any(name.startswith("parameter_update ") for name in self.outputs)

    @property
    def runs(self) -> bool:
        """Whether `compile` can run the plan; False for a price under another runtime."""
        return self.runtime == AUTOSHARD

    @property
    def layouts(self) -> Mapping[str, int]:
        """Number of parameter elements under each layout, the largest number first; empty without an update.

        A layout says in words where parameter, gradient and optimizer state lie, as in `{"ZeRO-3 over data; split over
        model": 8000000000, "copied over data, model": 4096}`.
        """
        counts: dict[str, int] = {}
        for item in self.parameters.values():
            if item.layout:
                counts[item.layout] = counts.get(item.layout, 0) + math.prod(item.shape)
        return dict(sorted(counts.items(), key=lambda pair: -pair[1]))

    @property
    def recomputed(self) -> Mapping[str, tuple[str, ...]]:
        """Names of forward nodes that the backward computes again, by module path, left-out blocks included."""
        return by_module(self.recompute.nodes, self.repeats)

    @property
    def offloaded(self) -> Mapping[str, tuple[str, ...]]:
        """Names of forward nodes whose values wait in host memory, by module path, left-out blocks included."""
        return by_module(self.offload.nodes, self.repeats)

    @property
    def gap(self) -> float | None:
        """Relative gap between objective and proven bound, `1 - lower_bound / objective`; None without a bound.

        The objective is a sum of predicted seconds; in a plan under another runtime, a predicted step time.
        """
        if self.lower_bound is None:
            return None
        return 0.0 if self.objective <= 0 else max(0.0, 1.0 - self.lower_bound / self.objective)

    def save(self, path: str | Path) -> None:
        """Write the plan as a JSON file. Raises `NotAvailableError` if the file cannot be written."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanMismatchError: the file is missing, is no plan, or has another schema version.
        """
        text, refused = read_text(path), f"{os.fspath(path)!r} is not a plan that autoshard wrote"
        try:
            data = parse(text)
        except ValueError as error:
            raise PlanMismatchError(f"{refused}: {error}.") from error
        if not isinstance(data, dict):
            raise PlanMismatchError(f"{refused}: it holds {type(data).__name__}, and a plan is an object.")
        try:
            return cls.from_json(data)
        except AutoshardError as error:
            raise PlanMismatchError(f"{path}: {error}") from error

    def trace(self, path: str | Path) -> None:
        """Write the timeline of the predicted step as a file for ui.perfetto.dev and chrome://tracing.

        Ranks with equal timelines share one process; each stream is a thread.

        Raises:
            NotAvailableError: the plan has no timeline, because it only predicts costs under another runtime.
        """
        if self.predicted.timeline is None:
            raise NotAvailableError(
                "this plan has no timeline: it is a price, which compile does not run; "
                "plan with runtime='autoshard' to get one."
            )
        self.predicted.timeline.write(path)

    def report(self, path: str | Path) -> None:
        """Write the plan as one page of HTML, which opens without a network.

        The page draws the parts of the step's time, the memory at its peak, and the timeline. Tables list the known
        recipes, the layouts of parameters, the operators and every spec.
        """
        write_text(path, page_of(self))

    def formula(
        self,
        name: str,
        *,
        dims: Mapping[str, int | Mapping[str, int]] | None = None,
        fixed: Collection[str] = (),
        even: bool = False,
    ) -> sympy.Expr:
        """Return a cost of this plan as an expression in sizes of inputs, numbers of blocks and sizes of mesh axes.

        The first call traces and lowers the model at a few more sizes. Specs stay the plan's own. The formulas are
        explained in docs/reference/formulas.md.

        Args:
            name: "step_flops", "rank_flops", "communication_bytes" (of one axis: "communication_bytes_data"),
                "parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes" or "tokens".
            dims: for each symbol, the dim whose size it stands for: one index for all inputs, or a dict from input to
                index (`{"height": {"input:0": 2}}`). Default: `batch` is dim 0, `sequence` is dim 1 of inputs that look
                like sequences.
            fixed: symbols that keep the plan's own sizes.
            even: leave out the ceilings of uneven splits. The expression then holds where all splits are even.

        Returns:
            An expression in symbols such as `sympy.Symbol("batch")`. `autoshard.vectorise` turns the expression into a
            numpy function.

        Raises:
            FormulaError: no formula has this name, the cost is no polynomial in a size, or the plan has no model at
                hand.
        """
        if self.formulas is None:
            raise FormulaError(
                f"formula({name!r}) traces the model at more sizes, and this plan has no model at hand. It comes from "
                "a file, from `compile` or from another process. Call autoshard.plan or autoshard.price with the model."
            )
        return self.formulas.formula(self, name, dims=dims, fixed=fixed, even=even)

    @seldom_collecting
    def explain(self, name: str) -> Explanation:
        """Explain the spec of a value: each possible spec, with the cost of the best plan that has it.

        Each alternative is planned as `autoshard.plan` would with the spec as a constraint, within the plan's memory
        limit and constraints. All other specs may change. With pipeline stages, only specs of the value's own stage may
        change. Print the result.

        Args:
            name: qualified name of a parameter or buffer, "input:0", "output:0", "exp_avg:w" (optimizer state), or a
                node of `nodes`.

        Raises:
            InvalidSpecError: the plan has no value of this name.
            NotAvailableError: the plan has no model at hand, because it came from a file, `autoshard.price` or
                `compile`; or the plan only predicts costs under another runtime.
        """
        return self._alternatives(f"explain({name!r})").explain(self, name)

    @seldom_collecting
    def why_not(self, feature: str) -> WhyNot:
        """Explain why the plan lacks a feature: the cost of the best plan for each way to have the feature.

        Each figure is the predicted step of a plan made for the question, within the same memory limit and constraints.
        A feature that needs another mesh, such as a pipeline, is planned on other meshes of the same devices and batch.
        Print the result.

        Args:
            feature: one of "data" (parameters copied over an axis), "zero-1", "zero-2", "fsdp", "hsdp", "tensor",
                "sequence", "context", "expert", "pipeline", "recompute", "offload". Usual synonyms work too: "ddp",
                "zero-3", "tp", "sp", "cp", "ep", "pp", "checkpointing". If the plan has the
                feature already, the answer is the best plan without it.

        Raises:
            InvalidSpecError: no feature has this name.
            NotAvailableError: the plan has no model at hand, because it came from a file, `autoshard.price` or
                `compile`. Also if the question needs other meshes, and the plan has constraints or no optimizer. The
                message names the call to make instead.
        """
        return self._alternatives(f"why_not({feature!r})").why_not(self, feature)

    @seldom_collecting
    def limits(self) -> Limits:
        """Find the resource that limits the plan: the time saved by more memory, or by a faster part of the hardware.

        Each change is planned by a new search. Print the result; `binding` names the change that saves the most time.

        Raises:
            NotAvailableError: the plan has no model at hand, because it came from a file, `autoshard.price` or
                `compile`.
        """
        return self._alternatives("limits()").limits(self)

    def _alternatives(self, question: str) -> Alternatives:
        if self.alternatives is None:
            raise NotAvailableError(
                f"{question} plans the model again, and this plan has no model at hand: it comes from a file, from "
                "autoshard.price or from `compile`. Call autoshard.plan with the model."
            )
        return self.alternatives

    def compare(self, other: Plan) -> Comparison:
        """Compare with another plan of the model: times, memory, and differing specs. Print the result.

        Raises:
            PlanMismatchError: `other` is no plan.
        """
        if not isinstance(other, Plan):
            raise PlanMismatchError(
                f"compare({other!r}): a {type(other).__name__} is no plan; pass an autoshard.Plan, such as "
                "Plan.load(path) reads."
            )
        return side_by_side(self, other)

    def run(
        self,
        *,
        tokens: float | None = None,
        steps: int | None = None,
        mtbf_hours: float = math.inf,
        checkpoint_bytes: int | None = None,
        save_s: float | None = None,
        restart_s: float | None = None,
    ) -> RunEstimate:
        """Predict a whole run: days, device-hours, best distance of checkpoints, time lost to failures. Print it.

        The distance is by Daly 2006 (`cost_models/restarts.py`); docs/reference/plans.md explains the figures.

        Args:
            tokens: number of tokens to train on. Pass `steps` instead if the inputs of the model are no tokens.
            steps: number of steps.
            mtbf_hours: mean hours between failures of the whole cluster that stop the run. Default: no failures.
            checkpoint_bytes: bytes of a checkpoint. Default: parameters, and each state as large as its parameter.
            save_s: seconds that training waits for a save. Default: all devices write at 122 MB/s each.
            restart_s: seconds from a failure to the first new step. Default: 600.

        Raises:
            NotAvailableError: an argument is no number above 0, or failures come too fast. Or the plan counts no
                tokens, or has no optimizer and `checkpoint_bytes` is missing.
        """
        count, of_tokens = steps_of(self.predicted, tokens, steps)
        given = {"mtbf_hours": mtbf_hours, "save_s": save_s, "restart_s": restart_s}
        size = bytes_of_checkpoint(self.parameters, self.mesh, checkpoint_bytes, updates=self.updates)
        return estimate_run(self.predicted, self.hardware, self.mesh.size, count, of_tokens, size, **given)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data, with specs as text.

        The keys are the fields of this class without `formulas` and `alternatives`, the schema version and the
        timeline.
        """
        return {
            _VERSION: SCHEMA_VERSION,
            "mesh": dict(self.mesh.axes),
            "hardware": self.hardware,
            "memory_budget": self.memory_budget,
            "precision": self.precision,
            "program_digest": self.program_digest,
            "inputs": dict(self.inputs),
            "predicted": self.predicted.to_json(),
            "objective": self.objective,
            "lower_bound": self.lower_bound,
            "search_time_s": self.search_time_s,
            "recompute": asdict(self.recompute),
            "offload": asdict(self.offload),
            "baselines": dict(self.baselines),
            "recipe": None if self.recipe is None else asdict(self.recipe),
            "runtime": self.runtime,
            "micro_batches": self.micro_batches,
            "was_interrupted": self.was_interrupted,
            "was_cut": self.was_cut,
            "schedule": self.schedule,
            "order": None if self.order is None else self.order.to_json(),
            "cuts": list(self.cuts),
            "stages": [stage.to_json() for stage in self.stages],
            "replicated_operators": [list(item) for item in self.replicated_operators],
            "operators": [asdict(item) for item in self.operators],
            "repeats": [asdict(item) for item in self.repeats],
            "parameters": {name: item.to_json() for name, item in self.parameters.items()},
            "outputs": {name: repr(spec) for name, spec in self.outputs.items()},
            "nodes": {name: node.to_json() for name, node in self.nodes.items()},
            _TIMELINE: None if self.predicted.timeline is None else self.predicted.timeline.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Read the data that `to_json` returns. Missing optional fields take their defaults.

        Raises:
            PlanMismatchError: the data is no plan or has another schema version, or a field is missing, unknown or of
                the wrong type. The message names the field.
        """
        check_version(data.get(_VERSION), SCHEMA_VERSION)
        kinds = {**get_type_hints(cls), **_OF_OTHER_FORM}
        known = [item for item in fields(cls) if item.name not in _NOT_IN_FILES]
        check_keys(
            data,
            [_VERSION, _TIMELINE, *(item.name for item in known)],
            [item.name for item in known if is_required(item)],
        )
        found = {
            item.name: read(kinds[item.name], data[item.name], (item.name,))
            for item in known
            if item.name in data and item.name not in _OF_STAGES
        }
        found["stages"] = _read_stages(data.get("stages", []))
        found["order"] = PipelineOrder.of_plan(data.get("order"), len(found["stages"]))
        check_precision(found.get("precision"))
        timeline = data.get(_TIMELINE)
        trace = None if timeline is None else Trace.from_json(timeline)
        nodes = {name: NodePlan(*specs) for name, specs in found["nodes"].items()}
        predicted = replace(found["predicted"], timeline=trace)
        return cls(**{**found, "mesh": Mesh(found["mesh"]), "nodes": nodes, "predicted": predicted})

    def __str__(self) -> str:
        return text_of(self)


def _read_stages(data: object) -> tuple[Plan, ...]:
    if not isinstance(data, list | tuple) or not all(isinstance(item, dict) for item in data):
        raise PlanMismatchError(f"'stages' is {type(data).__name__} in the plan; it must be a list of plans.")
    return tuple(Plan.from_json(item) for item in data)
