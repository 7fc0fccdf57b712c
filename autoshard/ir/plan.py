"""Plans: the choice for a whole program, with its predicted cost.

A plan names, for every node of a traced program, the specs of its operands and results. It is saved as
JSON that a person can read: specs are written as `P('data', None)`, sizes in bytes and times in seconds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_type_hints

from autoshard.errors import AutoshardError, FormulaError, NotAvailableError, PlanMismatchError
from autoshard.ir.answers import Comparison, Explanation, Limits, WhyNot
from autoshard.ir.brought_back import by_module
from autoshard.ir.files import read_text, write_text
from autoshard.ir.garbage import seldom_collecting
from autoshard.ir.mesh import Mesh
from autoshard.ir.offload import NO_OFFLOAD, Offload
from autoshard.ir.pipeline_order import PipelineOrder
from autoshard.ir.plan_parts import NodePlan, OperatorCoverage, ParameterPlan, Prediction
from autoshard.ir.precision import PRECISIONS
from autoshard.ir.read_json import check_keys, is_required, parse, read
from autoshard.ir.recipe import Recipe
from autoshard.ir.recompute import NO_RECOMPUTE, Recompute
from autoshard.ir.repeat import Repeat
from autoshard.ir.runtime import AUTOSHARD
from autoshard.ir.show import page_of, text_of
from autoshard.ir.spec import PartitionSpec
from autoshard.ir.trace import Trace

if TYPE_CHECKING:
    import sympy

_T = TypeVar("_T")

SCHEMA_VERSION = 9
"""The version that files have; a file of another version is refused."""

_Specs = tuple[PartitionSpec, ...]
_OF_OTHER_FORM: Mapping[str, Any] = {
    "mesh": Mapping[str, int],
    "nodes": Mapping[str, tuple[_Specs, _Specs]],
    "memory_budget": float | None,
}
"""Fields that a file has in another form."""

_VERSION, _TIMELINE = "autoshard_plan", "timeline"
_NOT_IN_FILES = ("formulas", "alternatives")
_OF_STAGES = ("stages", "order")
"""Fields that read themselves."""


class Formulas(Protocol):
    """What makes a plan's formulas; it has the model at hand, and does nothing until it is asked."""

    def formula(
        self,
        plan: Plan,
        name: str,
        *,
        dims: Mapping[str, int | Mapping[str, int]] | None,
        fixed: Collection[str],
        even: bool,
    ) -> sympy.Expr:
        """Find a formula; see `Plan.formula`."""
        ...


class Alternatives(Protocol):
    """What searches again for other plans; it has the program at hand, and does nothing until it is asked."""

    def why_not(self, plan: Plan, feature: str) -> WhyNot:
        """See `Plan.why_not`."""
        ...

    def limits(self, plan: Plan) -> Limits:
        """See `Plan.limits`."""
        ...

    def explain(self, plan: Plan, name: str) -> Explanation:
        """See `Plan.explain`."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How a program runs on a mesh.

    Args:
        mesh: the mesh.
        program_digest: digest of the traced program that the plan is for.
        inputs: name of each input to `dtype[shape]`, to say what a mismatching call differs in.
        nodes: specs of every node of the program, by node name.
        outputs: spec of every result of the program, by "kind name" ("gradient wte.weight", "output output:0").
        parameters: where each parameter lies, by qualified name.
        predicted: cost of the plan.
        objective: what the search minimised, seconds; `lower_bound`: proven bound of it, or None.
        search_time_s: wall time of the search.
        baselines: predicted step of known recipes, seconds, each on the mesh where it is fastest; None where it fits on
            none. Recipes that are far slower than the plan are lowered when their step is first read.
        hardware: name of the cluster that priced the plan.
        memory_budget: bytes per device that the plan had to fit in, or None.
        precision: "bf16", "f16" or "f32" where the program casts wider parameters; None where it computes in the
            model's own types.
        recompute: what of the forward is computed again in the backward; such nodes are in `nodes` twice.
        offload: what of the forward lies on the host until the backward; its copies there and back are in `nodes` too.
        replicated_operators: operators that run whole on every rank for want of a rule: (operator, source line).
        operators: all operators with what the plan does with them, the most expensive first; see `coverage`.
        repeats: blocks that are not among `nodes`, nor among those of `recompute` and `offload`, as they lie like the
            ones behind them; all else is of the whole model. The plan's program is the one without these blocks.
        recipe: the recipe within which it was searched, or that it prices; None: all specs were searched.
        runtime: what runs it: "autoshard", that is `compile`; otherwise the plan is a price, see `autoshard.Runtime`.
        micro_batches: how many a step has; `inputs` and `nodes` are of one.
        was_interrupted: whether Ctrl-C ended the search: it is the best until then.
        was_cut: whether time_budget_s did: with more time, or on a faster machine, it may be another.
        stages: of a mesh with an axis "pipeline", the plan of each stage, on the mesh of the other axes. The figures
            of such a plan are those of the step; `nodes` is empty, as each stage has its own.
        order: what each rank of the pipeline does in a step, and how many micro-batches that has.
        schedule: the name of the order ("1F1B").
        cuts: the nodes of the traced forward that the second stage and those behind it begin with.
        formulas: what makes `formula`; None for a plan without its model (one from a file, or of another process).
        alternatives: what answers `explain`; None likewise.
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
        """The fields as they are pickled: without the model, which `formulas` and `alternatives` hold."""
        return [None if item.name in _NOT_IN_FILES else getattr(self, item.name) for item in fields(self)]

    @property
    def coverage(self) -> Mapping[str, tuple[OperatorCoverage, ...]]:
        """The program's operators by what the plan does with them, the most expensive first.

        "split" over some axis; "replicated": run whole on every rank by choice; "without rule": run whole for want of
        a sharding rule.
        """
        return {
            "split": tuple(item for item in self.operators if item.is_split),
            "replicated": tuple(item for item in self.operators if item.has_rule and not item.is_split),
            "without rule": tuple(item for item in self.operators if not item.has_rule),
        }

    @property
    def updates(self) -> bool:
        """Whether it is the plan of a whole training step, an optimizer's update included."""
        return any(name.startswith("parameter_update ") for name in self.outputs)

    @property
    def runs(self) -> bool:
        """Whether `compile` runs it; else it is a price, of what another runtime would do."""
        return self.runtime == AUTOSHARD

    @property
    def layouts(self) -> Mapping[str, int]:
        """Elements of parameters by the words for where they, their gradients and their state lie, most first.

        {"ZeRO-3 over data; split over model": 8000000000, "copied over data, model": 4096}; empty without an update.
        """
        counts: dict[str, int] = {}
        for item in self.parameters.values():
            if item.layout:
                counts[item.layout] = counts.get(item.layout, 0) + math.prod(item.shape)
        return dict(sorted(counts.items(), key=lambda pair: -pair[1]))

    @property
    def recomputed(self) -> Mapping[str, tuple[str, ...]]:
        """The nodes of the forward that the backward computes again, by the module that issued them.

        Blocks that the plan leaves out (`repeats`) have the nodes of the blocks that stand for them.
        """
        return by_module(self.recompute.nodes, self.repeats)

    @property
    def offloaded(self) -> Mapping[str, tuple[str, ...]]:
        """The nodes of the forward whose values lie on the host until the backward, by the module that issued them."""
        return by_module(self.offload.nodes, self.repeats)

    @property
    def gap(self) -> float | None:
        """Relative distance of this plan's objective to its proven lower bound, or None where there is no bound.

        Both are sums that the search minimises, and not predicted steps, but for the price of a recipe.
        """
        if self.lower_bound is None:
            return None
        return 0.0 if self.objective <= 0 else max(0.0, 1.0 - self.lower_bound / self.objective)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanMismatchError: there is no such file, it is no plan, or of another schema version.
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
        """Write the predicted step as a file that ui.perfetto.dev and chrome://tracing open.

        One process per rank that differs from the others, one thread per stream.

        Raises:
            NotAvailableError: the plan has no timeline: it is a price, which `compile` does not run.
        """
        if self.predicted.timeline is None:
            raise NotAvailableError(
                "this plan has no timeline: it is a price, which compile does not run; "
                "plan with runtime='autoshard' to get one."
            )
        self.predicted.timeline.write(path)

    def report(self, path: str | Path) -> None:
        """Write the plan as one page of HTML, which opens without a network.

        It draws where the time of a step goes, what fills the memory at its peak, and the timeline; and lists the known
        recipes, where parameters lie, the operators, and every spec.
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
        """A cost of this plan as an expression in sizes of the inputs, numbers of blocks, and sizes of mesh axes.

        The first call traces and lowers the model at a few more sizes; specs stay those of the plan. See
        docs/reference/formulas.md.

        Args:
            name: "step_flops", "rank_flops", "communication_bytes" (of one axis: "communication_bytes_data"),
                "parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes" or "tokens".
            dims: symbol to the dim of the inputs that it is the size of, or to such dims by input
                (`{"height": {"input:0": 2}}`); default: `batch` is dim 0, and `sequence` dim 1 of inputs that look like
                sequences.
            fixed: symbols to hold at the plan's own sizes.
            even: leave out the ceilings of uneven splits; it then holds where all splits are even.

        Returns:
            In symbols `sympy.Symbol("batch")` and so on; `autoshard.vectorise` makes it a numpy function.

        Raises:
            FormulaError: no such formula, the cost is no polynomial in a size, or the plan has no model at hand.
        """
        if self.formulas is None:
            raise FormulaError(
                f"formula({name!r}) traces the model at more sizes, and this plan has no model at hand: it is from a "
                "file, from `compile` or from another process. Call autoshard.plan or autoshard.price with the model."
            )
        return self.formulas.formula(self, name, dims=dims, fixed=fixed, even=even)

    @seldom_collecting
    def explain(self, name: str) -> Explanation:
        """Why a value lies as it does: each spec that it could have, and what the best plan with it costs.

        Each alternative is planned anew, within the plan's own memory limit and constraints: its figures are those of
        `autoshard.plan` with the spec as a constraint. All else is free to change; of a plan with stages, all else of
        the stage that has the value. Print the result.

        Args:
            name: qualified name of a parameter or buffer, "input:0", "output:0", "exp_avg:w" (optimizer state), or a
                node of `nodes`.

        Raises:
            InvalidSpecError: no such name.
            NotAvailableError: the plan has no model at hand, as it is from a file or `compile` made it; or it is the
                price of a recipe under another runtime.
        """
        return self._alternatives(f"explain({name!r})").explain(self, name)

    @seldom_collecting
    def why_not(self, feature: str) -> WhyNot:
        """Why the plan does not do something: what the best plan that does it costs, in each way. Print the result.

        Each figure is the predicted step of a plan that is made anew, within the same memory limit and constraints. A
        feature that no axis of the mesh can have, a pipeline say, is planned on other meshes of the same devices, for
        the same batch.

        Args:
            feature: "data" (parameters copied over an axis), "zero-1", "zero-2", "fsdp", "hsdp", "tensor", "sequence",
                "context", "expert", "pipeline", "recompute" or "offload", or what else people call these ("ddp",
                "zero-3", "tp", "sp", "cp", "ep", "pp", "checkpointing"). Where a plan does it already, the best that
                does not.

        Raises:
            InvalidSpecError: no such feature.
            NotAvailableError: the plan has no model at hand, as for `explain`; or other meshes are asked for, and the
                plan has no optimizer, or constraints. The message says what to call instead.
        """
        return self._alternatives(f"why_not({feature!r})").why_not(self, feature)

    @seldom_collecting
    def limits(self) -> Limits:
        """What limits the plan: what more memory, or a part of the hardware that is faster, would be worth.

        Each figure is that of a plan that is searched for anew with it. Print the result; `binding` names the change
        that is worth most.

        Raises:
            NotAvailableError: the plan has no model at hand, as for `explain`.
        """
        return self._alternatives("limits()").limits(self)

    def _alternatives(self, question: str) -> Alternatives:
        """What searches again; raises `NotAvailableError` where there is no model to search for."""
        if self.alternatives is None:
            raise NotAvailableError(
                f"{question} plans again, and this plan has no model at hand: it is from a file, from "
                "autoshard.price, or `compile` made it. Call autoshard.plan with the model."
            )
        return self.alternatives

    def compare(self, other: Plan) -> Comparison:
        """This plan beside another one of the model: times, memory, and the specs that differ. Print the result.

        Raises:
            PlanMismatchError: the other is no plan.
        """
        if not isinstance(other, Plan):
            raise PlanMismatchError(
                f"compare({other!r}): a {type(other).__name__} is no plan; pass an autoshard.Plan, such as "
                "Plan.load(path) reads."
            )
        return _side_by_side(self, other)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON data; the schema is the fields of this class, specs as text."""
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
        """The inverse of `to_json`; fields that are not there have their defaults.

        Raises:
            PlanMismatchError: it is no plan, or of another schema version; names the field that is missing,
                unknown, or not what it must be.
        """
        _check_version(data.get(_VERSION))
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
        found["order"] = None if data.get("order") is None else PipelineOrder.from_json(data["order"])
        _check_precision(found.get("precision"))
        timeline = data.get(_TIMELINE)
        trace = None if timeline is None else Trace.from_json(timeline)
        nodes = {name: NodePlan(*specs) for name, specs in found["nodes"].items()}
        predicted = replace(found["predicted"], timeline=trace)
        return cls(**{**found, "mesh": Mesh(found["mesh"]), "nodes": nodes, "predicted": predicted})

    def __str__(self) -> str:
        return text_of(self)


def _side_by_side(first: Plan, second: Plan) -> Comparison:
    """The differences between two plans."""
    mine, others = first.predicted, second.predicted
    specs = [{name: item.spec for name, item in plan.parameters.items()} for plan in (first, second)]
    return Comparison(
        step_time_s=(mine.step_time_s, others.step_time_s),
        peak_memory_bytes=(mine.peak_memory_bytes, others.peak_memory_bytes),
        breakdown=_parts(mine.breakdown, others.breakdown, 0.0),
        hidden=_parts(mine.hidden, others.hidden, 0.0),
        memory_breakdown=_parts(mine.memory_breakdown, others.memory_breakdown, 0),
        parameters=_differing(*specs),
        outputs=_differing(first.outputs, second.outputs),
        meshes=(str(first.mesh), str(second.mesh)),
        tokens_per_s=(mine.tokens_per_s, others.tokens_per_s),
        recipes=(first.recipe, second.recipe),
    )


def _parts(first: Mapping[str, _T], second: Mapping[str, _T], absent: _T) -> dict[str, tuple[_T, _T]]:
    return {name: (first.get(name, absent), second.get(name, absent)) for name in {**first, **second}}


def _differing(
    first: Mapping[str, PartitionSpec], second: Mapping[str, PartitionSpec]
) -> dict[str, tuple[PartitionSpec | None, PartitionSpec | None]]:
    pairs = {name: (first.get(name), second.get(name)) for name in {**first, **second}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _read_stages(data: object) -> tuple[Plan, ...]:
    if not isinstance(data, list | tuple) or not all(isinstance(item, dict) for item in data):
        raise PlanMismatchError(f"'stages' is {type(data).__name__} in the plan; it must be a list of plans.")
    return tuple(Plan.from_json(item) for item in data)


def _check_version(version: object) -> None:
    if isinstance(version, bool) or version != SCHEMA_VERSION:
        way_out = "Upgrade autoshard, or plan again." if isinstance(version, int) else "Plan again."
        raise PlanMismatchError(
            f"the plan has schema version {version!r}; this release reads {SCHEMA_VERSION}. {way_out}"
        )


def _check_precision(precision: str | None) -> None:
    if precision not in (None, *PRECISIONS):
        known = ", ".join(map(repr, PRECISIONS))
        raise PlanMismatchError(f"'precision' is {precision!r} in the plan; it must be null or of {known}.")
