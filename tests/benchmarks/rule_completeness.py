"""How many of the placements that brute force finds valid our rules admit, and how many DTensor's do.

Run: python -m tests.benchmarks.rule_completeness [--samples 6] [--only NAME ...]

The calls are those that PyTorch's own samples (op_db) make below autograd, forward and backward, each once: operators
with and without a rule. `tests.rules.oracle` finds the valid placements on one axis of two ranks. Both columns
are counted in one run over the same placements; DTensor admits one if it moves no operand for it.

Each operator runs in a process of its own: brute force gives operators indices that do not fit their operands, which
some do not check. Writes the figures to tests/benchmarks/results/rule_completeness.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from autoshard.ir.mesh import Mesh
from autoshard.rules import has_rule
from autoshard.rules.enumeration import enumerate_strategies
from autoshard.rules.registry import bound_rule
from tests.rules.dtensor_rules import admitted_outputs, fake_mesh
from tests.rules.oracle import NotJudgedError, Strategy, ValidPlacement, find_valid_placements
from tests.rules.recording import Call, database_calls, even_samples, is_functional
from tests.rules.run_strategy import results_of

RESULTS = Path(__file__).with_name("results") / "rule_completeness.json"
AXIS_SIZE = 2
_SECONDS_PER_OPERATOR = 600
_SHOWN = 25


@dataclass(slots=True)
class Count:
    """Figures of one operator.

    Args:
        calls: calls that were judged.
        valid: valid placements that are not trivial, over all calls.
        ours, dtensors: how many of them our rules admit, and DTensor's.
        left_out: combinations of input placements that were too many to try.
        not_judged: why calls were not judged, and how many.
        missed: placements that ours miss, as text, and how many calls have each.
    """

    calls: int = 0
    valid: int = 0
    ours: int = 0
    dtensors: int = 0
    left_out: int = 0
    not_judged: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)

    def add(self, call: Call, mesh: DeviceMesh) -> None:
        """Judge one call."""
        try:
            search = find_valid_placements(call.op, call.args, call.kwargs, AXIS_SIZE)
        except NotJudgedError as reason:
            self.not_judged[str(reason).removeprefix(f"{call.op} ")] += 1
            return
        self.calls += 1
        self.left_out += search.left_out
        self.valid += len(search.valid)
        listed = _listed(call)
        for found in search.valid:
            is_ours = found.is_admitted_by(listed)
            self.ours += is_ours
            self.dtensors += _is_dtensors(call, found, mesh)
            if not is_ours:
                self.missed[describe(found)] += 1


def _listed(call: Call) -> list[Strategy]:
    """The strategies of `autoshard.rules.strategies`, also where the size of a result depends on values."""
    mesh = Mesh({"axis": AXIS_SIZE})
    rule = bound_rule(call.op, call.args, call.kwargs, results_of(call.op, call.args, call.kwargs))
    found = [] if rule is None else enumerate_strategies(rule, mesh)
    return [
        (
            tuple(spec.to_placements(mesh)[0] for spec in strategy.inputs),
            tuple(spec.to_placements(mesh)[0] for spec in strategy.outputs),
        )
        for strategy in found
    ]


def _is_dtensors(call: Call, found: ValidPlacement, mesh: DeviceMesh) -> bool:
    answers = ((inputs, admitted_outputs(call.op, call.args, call.kwargs, inputs, mesh)) for inputs in found.inputs)
    return any(found.is_admitted_by([(inputs, outputs)]) for inputs, outputs in answers if outputs is not None)


def describe(found: ValidPlacement) -> str:
    """A placement as text: `R, P(max) -> P(max)`."""
    return f"{', '.join(map(_short, found.inputs[0]))} -> {', '.join(_short(_first(x)) for x in found.outputs)}"


def _first(labels: Collection[Placement]) -> Placement:
    """The label of the same pieces that says most."""
    return min(labels, key=lambda place: ("RSP".index(type(place).__name__[0]), str(place)))


def _short(place: Placement) -> str:
    return str(place) if place.is_partial() else "R" if place.is_replicate() else f"S({place.dim})"  # type: ignore[attr-defined]


def count_calls(calls: Iterable[Call], mesh: DeviceMesh) -> Count:
    """The figures of some calls, in this process."""
    count = Count()
    for call in calls:
        count.add(call, mesh)
    return count


def counts_by_operator(names: Collection[str] | None, samples: int, mesh: DeviceMesh) -> Iterator[tuple[str, Count]]:
    """The figures of each operator that samples for `names` (None: all) call, each counted in a process of its own."""
    calls: dict[str, list[Call]] = {}
    with even_samples():
        for _, call in database_calls(names, samples, is_functional):
            calls.setdefault(str(call.op), []).append(call)
    for operator, same in sorted(calls.items()):
        yield operator, _in_own_process(same, mesh)


def _in_own_process(calls: Sequence[Call], mesh: DeviceMesh) -> Count:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send_count, args=(sender, calls, mesh))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(_SECONDS_PER_OPERATOR) else _gave_up(calls, "takes too long.")
    except EOFError:
        process.join()
        if (process.exitcode or 0) > 0:
            raise RuntimeError(f"{calls[0].op} was not counted; the reason is above.") from None
        return _gave_up(calls, "does not survive operands that do not fit each other.")
    finally:
        process.kill()
        process.join()


def _send_count(sender: Connection, calls: Sequence[Call], mesh: DeviceMesh) -> None:
    """Send the count; drop a library's messages about pieces that do not fit, and print Python errors of ours."""
    warnings.simplefilter("ignore")
    terminal = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        sender.send(count_calls(calls, mesh))
    except Exception:
        os.dup2(terminal, 2)
        raise


def _gave_up(calls: Sequence[Call], reason: str) -> Count:
    return Count(not_judged=Counter({reason: len(calls)}))


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of all operators."""

    operators: int
    with_rule: int
    calls: int
    valid: int
    ours: int
    dtensors: int
    ours_mean: float
    dtensors_mean: float
    left_out: int
    not_judged: int


def summarise(counts: dict[str, Count]) -> Summary:
    """Totals over all placements, and means over operators, in which each operator weighs the same."""
    judged = {operator: count for operator, count in counts.items() if count.valid}
    return Summary(
        operators=len(judged),
        with_rule=sum(map(_has_rule, judged)),
        calls=sum(count.calls for count in counts.values()),
        valid=sum(count.valid for count in judged.values()),
        ours=sum(count.ours for count in judged.values()),
        dtensors=sum(count.dtensors for count in judged.values()),
        ours_mean=sum(count.ours / count.valid for count in judged.values()) / max(len(judged), 1),
        dtensors_mean=sum(count.dtensors / count.valid for count in judged.values()) / max(len(judged), 1),
        left_out=sum(count.left_out for count in counts.values()),
        not_judged=sum(sum(count.not_judged.values()) for count in counts.values()),
    )


def _has_rule(operator: str) -> bool:
    namespace, packet, overload = operator.split(".")
    return has_rule(getattr(getattr(getattr(torch.ops, namespace), packet), overload))


def tables(summary: Summary, counts: dict[str, Count]) -> Iterator[Table]:
    """The figures, the operators that miss most, and what was not judged."""
    yield _totals(summary)
    misses = Table(title="Operators whose valid placements our rules miss", title_justify="left")
    for column in ("operator", "calls", "valid", "ours", "DTensor", "most missed"):
        misses.add_column(column, justify="left" if column in ("operator", "most missed") else "right")
    worst = sorted(counts.items(), key=lambda item: item[1].ours - item[1].valid)
    for operator, count in worst[:_SHOWN]:
        if count.missed:
            (example, times), *_ = count.missed.most_common(1)
            figures = (count.calls, count.valid, count.ours, count.dtensors)
            misses.add_row(operator, *map(str, figures), f"{example} ({times})")
    yield misses
    reasons: Counter[str] = sum((count.not_judged for count in counts.values()), Counter())
    unjudged = Table("not judged: the operator", "calls", title_justify="left")
    for reason, calls in reasons.most_common():
        unjudged.add_row(reason, str(calls))
    yield unjudged


def _totals(summary: Summary) -> Table:
    title = (
        f"{summary.valid:,} valid placements of {summary.calls:,} calls of {summary.operators} operators "
        f"({summary.with_rule} with a rule of ours)"
    )
    table = Table("", "autoshard", "DTensor", title=title, title_justify="left")
    table.add_row("admitted", f"{summary.ours:,}", f"{summary.dtensors:,}")
    shares = (summary.ours / max(summary.valid, 1), summary.dtensors / max(summary.valid, 1))
    table.add_row("share of placements", *(f"{share:.1%}" for share in shares))
    table.add_row("mean share over operators", f"{summary.ours_mean:.1%}", f"{summary.dtensors_mean:.1%}")
    return table


def write(path: Path, summary: Summary, counts: dict[str, Count], samples: int) -> None:
    """Keep the figures with what they were measured on."""
    path.parent.mkdir(exist_ok=True)
    missed = {operator: dict(count.missed) for operator, count in counts.items() if count.missed}
    content = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "axis_size": AXIS_SIZE,
        "samples_per_operator": samples,
        **asdict(summary),
        "share": round(summary.ours / max(summary.valid, 1), 4),
        "dtensors_share": round(summary.dtensors / max(summary.valid, 1), 4),
        "missed": missed,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str]) -> None:
    """Judge every call and show the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=6, help="samples of op_db per operator")
    parser.add_argument("--only", nargs="*", help="names in op_db; nothing is written then")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    counts: dict[str, Count] = {}
    with fake_mesh(AXIS_SIZE) as mesh:
        for operator, count in counts_by_operator(options.only, options.samples, mesh):
            counts[operator] = count
    summary = summarise(counts)
    for table in tables(summary, counts):
        Console().print(table)
    if options.only is None:
        write(RESULTS, summary, counts, options.samples)


if __name__ == "__main__":
    main(sys.argv[1:])
