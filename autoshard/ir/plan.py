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
    """A program's layout on a mesh, with its predicted cost. `autoshard.plan` makes it; it prints as tables.

    Args:
        mesh: axes and sizes of the mesh, including the axis "pipeline".
        program_digest: digest of the traced program that the plan belongs to.
        inputs: for each input name, the text `dtype[shape]`, such as "f32[2, 8]". A call that runs the plan must match.
        nodes: specs of operands and results of every node of the traced program, by node name.
        outputs: spec of every result of the program, by kind and name: "gradient wte.weight", or "output output:0" for
            the first output of the model.
        parameters: layout of each parameter, by qualified name.
        predicted: predicted time and memory of a step, with overlap of communication and computation.
        objective: the sum that the search minimised, in seconds: operators, reshards, recompute and offload, without
            overlap. With `stages` or another `runtime`, the predicted step time.
        lower_bound: proven lower bound of the objective within the searched space, in seconds; None without a proof.
        search_time_s: wall time of the search, in seconds.
        baselines: predicted step of known recipes, in seconds, each on its fastest mesh; None for a recipe that fits on
            no mesh. The step of a recipe far slower than the plan is computed when it is first read.
        hardware: name of the cluster for which the plan's times are predicted.
        memory_budget: memory limit of a device in bytes; None if there was no limit.
        precision: "bf16", "f16" or "f32": the program computes in this type. None: in the model's own types.
        recompute: forward nodes that the backward recomputes. `nodes` has specs of the node and of its copy.
        offload: forward nodes whose values wait in host memory for the backward. `nodes` has specs of both copies.
        replicated_operators: pairs (operator, source line) of operators without a sharding rule, which run whole on
            every rank.
        operators: layout and time of each operator on each source line, the most expensive of each stage first.
        repeats: blocks that the plan's program leaves out because they equal the blocks that follow. `nodes`,
            `recompute` and `offload` omit the nodes of these blocks; all other fields describe the whole model.
        recipe: the recipe that restricted the search or was priced; None if all specs were searched.
        runtime: "autoshard" for plans that `compile` runs. A plan under another `Runtime` only predicts costs.
        micro_batches: number of micro-batches of a step. `inputs` and `nodes` describe one micro-batch.
        was_interrupted: Ctrl-C ended the search; the plan is the best found until then.
        was_cut: `time_budget_s` ended the search; more time or a faster machine may find another plan.
        stages: on a mesh with an axis "pipeline", the plan of each pipeline stage on the other axes. `nodes` is then
            empty, and all figures are those of the whole step. Empty without a pipeline.
        order: tasks of each pipeline rank in a step, in running order; None without stages.
        schedule: name of the pipeline schedule ("1F1B"); "" without stages.
        cuts: for each stage after the first, the name of its first node in the traced forward.
        formulas, alternatives: objects behind `formula`, and behind `explain`, `why_not` and `limits`. None for plans
            from files, other processes or `compile`. `alternatives` is None for a price of a given recipe too.
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
        """Entries of `operators`, in the same order, under the keys "split", "replicated" and "without rule".

        An axis splits "split" operators. All others run whole on every rank: by the planner's choice, or because no
        sharding rule exists. A key without operators has an empty tuple.
        """
        return {
            "split": tuple(item for item in self.operators if item.is_split),
            "replicated": tuple(item for item in self.operators if item.has_rule and not item.is_split),
            "without rule": tuple(item for item in self.operators if not item.has_rule),
        }

    @property
    def speedup_over_previous(self) -> float | None:
        """Predicted step time of the plan passed as `previous=`, divided by this plan's. Above 1, this plan is faster.

        Both times are for this plan's hardware. None if `previous` was not given or does not fit, and for plans with
        `global_batch=` on a cluster or with pipeline stages.
        """
        before_s, own_s = self.baselines.get(BEFORE), self.predicted.step_time_s
        return before_s / own_s if before_s is not None and own_s > 0 else None

    @property
    def updates(self) -> bool:
        """Whether the planned program includes the optimizer's update."""
        return any(name.startswith("parameter_update ") for name in self.outputs)

    @property
    def runs(self) -> bool:
        """Whether `compile(plan=)` can run the plan; False if it only predicts costs under another `runtime`."""
        return self.runtime == AUTOSHARD

    @property
    def layouts(self) -> Mapping[str, int]:
        """Number of parameter elements under each layout, the largest first; empty for a plan without an optimizer.

        A layout says in words how parameter, gradient and optimizer state are sharded: `{"ZeRO-3 over data; split over
        model": 8000000000, "copied over data, model": 4096}`.
        """
        counts: dict[str, int] = {}
        for item in self.parameters.values():
            if item.layout:
                counts[item.layout] = counts.get(item.layout, 0) + math.prod(item.shape)
        return dict(sorted(counts.items(), key=lambda pair: -pair[1]))

    @property
    def recomputed(self) -> Mapping[str, tuple[str, ...]]:
        """Module path → its forward nodes that the backward recomputes, in all stages."""
        return by_module((each.recompute.nodes, each.repeats) for each in self.stages or (self,))

    @property
    def offloaded(self) -> Mapping[str, tuple[str, ...]]:
        """Module path → its forward nodes whose values wait in host memory, in all stages."""
        return by_module((each.offload.nodes, each.repeats) for each in self.stages or (self,))

    @property
    def gap(self) -> float | None:
        """Distance of `objective` from `lower_bound`, a fraction of `objective` from 0 to 1; None without a bound.

        It is `1 - lower_bound / objective`. At 0, no plan of the searched space has a smaller objective.
        """
        if self.lower_bound is None:
            return None
        return 0.0 if self.objective <= 0 else max(0.0, 1.0 - self.lower_bound / self.objective)

    def save(self, path: str | Path) -> None:
        """Write the plan as a JSON file, for `load`. Raises `NotAvailableError` if the file cannot be written."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanMismatchError: the file is missing, is not a plan, or has the schema version of another release.
        """
        text, refused = read_text(path), f"{os.fspath(path)!r} is not a plan that autoshard wrote"
        try:
            data = parse(text)
        except ValueError as error:
            raise PlanMismatchError(f"{refused}: {error}.") from error
        try:
            return cls.from_json(data)
        except AutoshardError as error:
            raise PlanMismatchError(f"{path}: {error}") from error

    def trace(self, path: str | Path) -> None:
        """Write the timeline of the predicted step as a file, to open at ui.perfetto.dev or chrome://tracing.

        Ranks with equal timelines are shown as one process, and each stream as a thread.

        Raises:
            NotAvailableError: the plan only predicts costs under another runtime, or the file cannot be written.
        """
        if self.predicted.timeline is None:
            raise NotAvailableError(
                "this plan has no timeline: it is a price, which compile does not run; "
                "plan with runtime='autoshard' to get one."
            )
        self.predicted.timeline.write(path)

    def report(self, path: str | Path) -> None:
        """Write the plan as one HTML file that a browser shows offline.

        Charts show the parts of the step time, the peak memory and the timeline. Tables list known recipes, layouts of
        parameters, operators and specs. Raises `NotAvailableError` if the file cannot be written.
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

        The first call traces the model at a few more sizes. Specs stay as planned; see docs/reference/formulas.md.

        Args:
            name: "step_flops" (of a step on all ranks), "rank_flops" (of one rank), "communication_bytes" (over one
                axis: "communication_bytes_data"), "parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes",
                "activation_bytes" or "tokens".
            dims: symbol → the dim of the inputs with this size: one index for all inputs, or a dict from input to index
                (`{"height": {"input:0": 2}}`). By default, `batch` is dim 0, and `sequence` is dim 1 of integer or
                three-dimensional inputs.
            fixed: names of symbols to replace by the plan's own sizes, such as `("sequence",)`.
            even: leave out the ceilings of uneven splits. The expression then holds only if all splits are even.

        Returns:
            An expression in symbols such as `sympy.Symbol("batch")`, for `autoshard.vectorise`.

        Raises:
            FormulaError: an argument is unknown, or the cost is not a polynomial in a size. Or the plan does not hold
                its model, because it came from a file, another process or `compile`.
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

        Each other spec takes a new search of at most the plan's `time_budget_s`, with the same mesh, memory limit and
        constraints. All other specs may change; with pipeline stages, only those of the value's stage. The returned
        object prints as a table.

        Args:
            name: qualified name of a parameter or buffer, "input:0", "output:0", "exp_avg:w" (optimizer state of `w`),
                or a key of `nodes`.

        Raises:
            InvalidSpecError: the plan has no value of this name.
            NotAvailableError: the plan does not hold its model, because it came from a file, another process,
                `autoshard.price` or `compile`. Or it only predicts costs under another runtime.
        """
        return self._alternatives(f"explain({name!r})").explain(self, name)

    @seldom_collecting
    def why_not(self, feature: str) -> WhyNot:
        """Explain why the plan lacks a feature: the cost of the best plan for each way to have the feature.

        Each way takes a new search within the same memory limit and constraints. A feature that needs another mesh,
        such as a pipeline, is planned on other meshes of the same devices and batch. If the plan has the feature, the
        answer is the best plan without it. The returned object prints as a table.

        Args:
            feature: "data" (plain data parallelism, as in DDP), "zero-1", "zero-2", "fsdp", "hsdp", "tensor",
                "sequence", "context", "expert", "pipeline", "recompute" or "offload". Usual synonyms work too: "ddp",
                "zero-3", "tp", "sp", "cp", "ep", "pp", "checkpointing".

        Raises:
            InvalidSpecError: no feature has this name.
            NotAvailableError: the plan does not hold its model, because it came from a file, another process,
                `autoshard.price` or `compile`. Also if the question needs another mesh, and the plan has constraints or
                no optimizer. The message names the call to make instead.
        """
        return self._alternatives(f"why_not({feature!r})").why_not(self, feature)

    @seldom_collecting
    def limits(self) -> Limits:
        """Find the resource that limits the plan: the time saved by more memory, or by a faster part of the hardware.

        Each change takes a new search: 10 % more, twice or unlimited memory, and 10 % faster matrix products, device
        memory, links or network. The result prints as a table; `binding` names the change that saves most time.

        Raises:
            NotAvailableError: the plan does not hold its model, because it came from a file, another process,
                `autoshard.price` or `compile`.
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
        """Compare with another plan of the same model: times, memory and differing specs. The result prints as tables.

        A plan of another model is not refused. Raises `PlanMismatchError` if `other` is not a `Plan`.
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
        """Estimate a whole training run: days, device-hours, steps between checkpoints, time lost to failures.

        Pass exactly one of `tokens` and `steps`. The returned object prints as a table; see docs/reference/plans.md.

        Args:
            tokens: number of tokens to train on, for a model with an integer input.
            steps: number of steps.
            mtbf_hours: mean hours between failures of the whole cluster that stop the run. Default: no failures.
            checkpoint_bytes: bytes of a checkpoint. Default: the parameters, and as many for each optimizer state.
            save_s: seconds that training waits for a save. Default: all devices write at 122 MB/s each.
            restart_s: seconds from a failure to the first new step. Default: 600.

        Raises:
            NotAvailableError: `tokens` and `steps` are both given or both missing, a number is not above 0, or failures
                are too frequent. Also if the model has no integer input to count `tokens`, or if the plan has no
                optimizer and `checkpoint_bytes` is missing.
        """
        count, of_tokens = steps_of(self.predicted, tokens, steps)
        given = {"mtbf_hours": mtbf_hours, "save_s": save_s, "restart_s": restart_s}
        size = bytes_of_checkpoint(self.parameters, self.mesh, checkpoint_bytes, updates=self.updates)
        return estimate_run(self.predicted, self.hardware, self.mesh.size, count, of_tokens, size, **given)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data, with specs as text.

        The keys are the fields of this class except `formulas` and `alternatives`, and two more: "autoshard_plan" (the
        schema version) and "timeline".
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
            PlanMismatchError: the data is not a plan or has another schema version, or a field is missing, unknown or
                of the wrong type. The message names the field.
        """
        check_version(data, _VERSION, SCHEMA_VERSION)
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
