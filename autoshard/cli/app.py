"""The commands of `autoshard`: plan, explain, report, price, verify, calibrate and doctor.

With `--json`, a command prints JSON instead of text for a person. The exit status is 0 after success, and 1 after an
error, which one clear sentence describes. It is 2 if the command or an option does not exist or lacks its value. It is
130 if Ctrl-C ends the command before it has a result to print.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from typer.exceptions import TyperException

from autoshard import __version__, api
from autoshard.cli.calibrate import calibration_json, calibration_table, measure_machine
from autoshard.cli.coverage import coverage_json, coverage_rows, coverage_summary, coverage_table
from autoshard.cli.doctor import diagnose
from autoshard.cli.models import load_model
from autoshard.cli.places import parse_cluster, place_of
from autoshard.cli.recipes import parse_constraints, parse_recipe
from autoshard.cli.run import commands, start
from autoshard.errors import AutoshardError, NotAvailableError
from autoshard.ir.files import check_can_write
from autoshard.ir.plan import Plan
from autoshard.ir.runtime import MEGATRON
from autoshard.ir.text import table
from cost_models.errors import CostModelError

app = typer.Typer(
    name="autoshard",
    help="Plan, on a laptop, how a PyTorch model trains on a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False, markup=False, emoji=False)

_PRODUCTS = {"f32": torch.float32, "f16": torch.float16}
"""Value of `--precision` → dtype of a model that is priced in another framework. All other values mean bfloat16."""

_WRONG_USAGE = 2
"""Exit status for a command line that cannot be understood. Unix's own commands use it too."""

_INTERRUPTED = 130
"""Exit status after a KeyboardInterrupt in typer, and after SIGINT in shells."""

_Cluster = Annotated[str, typer.Option(help="NODE_TYPE:NODESxDEVICES, e.g. h100_sxm:8x8, or a .toml file.")]
_Axes = Annotated[str | None, typer.Option(help="Axes, e.g. data=8,model=8; else the planner picks them.")]
_Batch = Annotated[int, typer.Option(min=1, help="Sequences per step over the whole cluster.")]
_Seq = Annotated[int, typer.Option(min=1, help="Tokens per sequence.")]
_GlobalBatch = Annotated[
    int | None,
    typer.Option(help="Sequences per step, which the planner cuts into micro-batches; else a step is --batch."),
]
_Runtime = Annotated[
    str,
    typer.Option(help="With --global-batch: autoshard, whose plans compile runs; or megatron, fsdp2, deepspeed."),
]
_Backend = Annotated[str, typer.Option(help="triton: price the program, or recipes, with our Triton kernels.")]
_TimeBudget = Annotated[float, typer.Option(help="Seconds that the search may take.")]
_Precision = Annotated[str, typer.Option(help="bf16, f16 or f32: type of computation of wider models.")]
_Optimizer = Annotated[str | None, typer.Option(help="adamw, sgd, or none.")]
_MemoryGib = Annotated[float | None, typer.Option(help="Limit per device; else the device's own.")]
_Constrain = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=VALUE,VALUE: a recipe's field and its allowed values (pipeline=1,2,4), with --global-batch; or a "
        "parameter's name and spec, \"up.weight=P('data', None)\". May be given more than once."
    ),
]
_TrustCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with hf:CONFIG, and kernels that it names."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main() -> None:
    """Run the command line. A user's mistake prints one sentence; the exit status is then 1, or 2 for wrong usage."""
    try:
        if app(standalone_mode=False) == _INTERRUPTED:
            _fail("interrupted before there was anything to print.", _INTERRUPTED)
    except (AutoshardError, CostModelError) as error:
        _fail(str(error))
    except TyperException as error:
        _fail(error.format_message() or "name a command, as listed above.", _WRONG_USAGE)


def _fail(sentence: str, status: int = 1) -> None:
    Console(stderr=True, highlight=False, markup=False, emoji=False).print(f"autoshard: {sentence}", soft_wrap=True)
    sys.exit(status)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        console.print(f"autoshard {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Plan, on a laptop, how a PyTorch model trains on a cluster."""


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(help="path/to/file.py:build, package.module:build, or hf:CONFIG (file or folder)."),
    ],
    cluster: _Cluster,
    mesh: _Axes = None,
    batch: _Batch = 8,
    seq: _Seq = 1024,
    precision: _Precision = "bf16",
    optimizer: _Optimizer = "adamw",
    memory_gib: _MemoryGib = None,
    global_batch: _GlobalBatch = None,
    runtime: _Runtime = "autoshard",
    constrain: _Constrain = None,
    backend: _Backend = "auto",
    time_budget_s: _TimeBudget = 60.0,
    previous: Annotated[
        Path | None,
        typer.Option(help="A saved plan, where the search begins; with --global-batch, one of a recipe."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    trust_remote_code: _TrustCode = False,
    as_json: _Json = False,
) -> None:
    """Find the fastest plan that fits in memory, and print it."""
    if out is not None:
        check_can_write(out)
    result = _plan(
        model, cluster, mesh, batch, seq, precision, optimizer, memory_gib,
        global_batch=global_batch, runtime=runtime, constrain=constrain, backend=backend,
        time_budget_s=time_budget_s, trust_remote_code=trust_remote_code,
        previous=None if previous is None else Plan.load(_existing(str(previous))),
    )  # fmt: skip
    if out is not None:
        result.save(out)
    _show(result.to_json() if as_json else str(result))


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="As for plan.")],
    name: Annotated[str, typer.Argument(help="A parameter or buffer, input:0, output:0, or optimizer state.")],
    cluster: _Cluster,
    mesh: _Axes = None,
    batch: _Batch = 8,
    seq: _Seq = 1024,
    precision: _Precision = "bf16",
    optimizer: _Optimizer = "adamw",
    memory_gib: _MemoryGib = None,
    global_batch: _GlobalBatch = None,
    runtime: _Runtime = "autoshard",
    constrain: _Constrain = None,
    backend: _Backend = "auto",
    time_budget_s: _TimeBudget = 60.0,
    trust_remote_code: _TrustCode = False,
    as_json: _Json = False,
) -> None:
    """Plan as plan does, and list the possible specs of a value with the best plan for each."""
    result = _plan(
        model, cluster, mesh, batch, seq, precision, optimizer, memory_gib,
        global_batch=global_batch, runtime=runtime, constrain=constrain, backend=backend,
        time_budget_s=time_budget_s, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    found = result.explain(name)
    _show(found.to_json() if as_json else str(found))


def _plan(
    model: str,
    cluster: str,
    mesh: str | None,
    batch: int,
    seq: int,
    precision: str,
    optimizer: str | None,
    memory_gib: float | None,
    *,
    global_batch: int | None = None,
    runtime: str = "autoshard",
    constrain: list[str] | None = None,
    backend: str = "auto",
    time_budget_s: float = 60.0,
    trust_remote_code: bool = False,
    previous: Plan | None = None,
) -> Plan:
    is_price = global_batch is not None and runtime != "autoshard"
    dtype = _PRODUCTS.get(precision, torch.bfloat16) if is_price else None
    loaded = load_model(model, batch=batch, seq=seq, dtype=dtype, trust_remote_code=trust_remote_code)
    return api.plan(
        loaded.model,
        place_of(cluster, mesh),
        example_inputs=loaded.inputs,
        optimizer=_named(optimizer),
        precision=precision,
        memory_budget=_bytes(memory_gib),
        global_batch=global_batch,
        runtime=runtime,
        constraints=parse_constraints(constrain or ()),
        backend=backend,
        time_budget_s=time_budget_s,
        previous=previous,
    )


@app.command()
def report(
    source: Annotated[str, typer.Argument(help="A plan that was saved (a .json file), or a model, as for plan.")],
    out: Annotated[Path, typer.Option(help="Write the page here.")] = Path("plan.html"),
    cluster: Annotated[str | None, typer.Option(help="For a model: as for plan.")] = None,
    mesh: _Axes = None,
    batch: _Batch = 8,
    seq: _Seq = 1024,
    precision: _Precision = "bf16",
    optimizer: _Optimizer = "adamw",
    memory_gib: _MemoryGib = None,
    global_batch: _GlobalBatch = None,
    runtime: _Runtime = "autoshard",
    constrain: _Constrain = None,
    backend: _Backend = "auto",
    time_budget_s: _TimeBudget = 60.0,
    trust_remote_code: _TrustCode = False,
    as_json: _Json = False,
) -> None:
    """Write a plan as one page of HTML: where time and memory go, the timeline, and every spec."""
    check_can_write(out)
    if source.endswith(".json") and not source.startswith("hf:"):
        found = Plan.load(_existing(source))
    elif cluster is None:
        raise AutoshardError(f"report {source}: a model is planned for a cluster; pass --cluster, or a saved plan.")
    else:
        found = _plan(
            source, cluster, mesh, batch, seq, precision, optimizer, memory_gib,
            global_batch=global_batch, runtime=runtime, constrain=constrain, backend=backend,
            time_budget_s=time_budget_s, trust_remote_code=trust_remote_code,
        )  # fmt: skip
    found.report(out)
    _show({"page": str(out), "step_time_s": found.predicted.step_time_s} if as_json else f"wrote {out}")


def _bytes(memory_gib: float | None) -> int | None:
    if memory_gib is None:
        return None
    if not 0 < memory_gib * 2**30 < math.inf:
        raise NotAvailableError(f"--memory-gib {memory_gib:g} must be a number above 0, of GiB that a device may have.")
    return max(1, int(memory_gib * 2**30))


def _named(optimizer: str | None) -> str | None:
    return None if optimizer == "none" else optimizer


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise AutoshardError(f"there is no file {path}; pass a plan that `autoshard plan --out` or Plan.save wrote.")
    return Path(path)


@app.command()
def price(
    model: Annotated[str, typer.Argument(help="As for plan.")],
    cluster: _Cluster,
    recipe: Annotated[str, typer.Option(help="FIELD=VALUE,... (data=8,tensor=8,zero=1), or a JSON file.")],
    seq: _Seq = 1024,
    runtime: Annotated[
        str, typer.Option(help="Whose run is priced: megatron, fsdp2 or deepspeed. For ours: plan.")
    ] = MEGATRON,
    precision: Annotated[str, typer.Option(help="Of products: bf16, f16, f8 or f32.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd or sgd_momentum.")] = "adamw",
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences of a step; default: one micro-batch of each replica.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
    trust_remote_code: _TrustCode = False,
    as_json: _Json = False,
) -> None:
    """Predict an expert's recipe under another framework's runtime: step time, memory, breakdown."""
    if out is not None:
        check_can_write(out)
    dtype = _PRODUCTS.get(precision, torch.bfloat16)
    loaded = load_model(model, batch=1, seq=seq, dtype=dtype, trust_remote_code=trust_remote_code)
    result = api.price(
        loaded.model,
        parse_cluster(cluster),
        parse_recipe(recipe),
        example_inputs=loaded.inputs,
        runtime=runtime,
        optimizer=optimizer,
        precision=precision,
        global_batch=global_batch,
    )
    if out is not None:
        result.save(out)
    _show(result.to_json() if as_json else str(result))


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="As for plan.")],
    cluster: Annotated[
        str | None, typer.Option(help="Plan for this cluster, as plan does, and prove the plan.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Prove this plan, which plan --out or Plan.save wrote.")] = None,
    mesh: _Axes = None,
    batch: _Batch = 8,
    seq: _Seq = 1024,
    precision: _Precision = "bf16",
    optimizer: _Optimizer = "adamw",
    memory_gib: _MemoryGib = None,
    time_budget_s: _TimeBudget = 60.0,
    trust_remote_code: _TrustCode = False,
    as_json: _Json = False,
) -> None:
    """Prove that the program of a plan computes the model's results on all ranks. Nothing runs."""
    if (cluster is None) == (plan is None):
        raise AutoshardError(f"verify {model}: pass --cluster, to plan and prove that, or --plan with a saved plan.")
    loaded = load_model(model, batch=batch, seq=seq, trust_remote_code=trust_remote_code)
    found = api.prove(
        loaded.model,
        Plan.load(_existing(str(plan))) if cluster is None else place_of(cluster, mesh),
        example_inputs=loaded.inputs,
        optimizer=_named(optimizer),
        precision=precision,
        memory_budget=_bytes(memory_gib),
        time_budget_s=time_budget_s,
    )
    _show(found.to_json() if as_json else str(found))


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="Write the measured cluster here; use it as --cluster FILE.")],
    ranks: Annotated[int | None, typer.Option(help="Local processes; default: one a GPU, or two on a CPU.")] = None,
    budget_s: Annotated[float, typer.Option(help="Seconds that the measurements may take, about.")] = 30.0,
    as_json: _Json = False,
) -> None:
    """Measure this machine (under torchrun: the ranks of the run) and write it as a cluster to plan for."""
    check_can_write(out)
    found = measure_machine(ranks, budget_s)
    if found is None:
        return
    try:
        found.save(out)
    except OSError as error:
        raise AutoshardError(f"--out {out} cannot be written: {error.strerror}.") from error
    _show(calibration_json(found) if as_json else calibration_table(found, out))


@app.command("run")
def run_script(
    script: Annotated[str, typer.Argument(help="The Python file to run on all ranks.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, after --.")] = None,
    hosts: Annotated[Path | None, typer.Option(help="A hostfile, with lines such as node1 slots=8.")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes of each host; default: slots, or GPUs.")] = None,
    min_hosts: Annotated[int | None, typer.Option(min=1, help="Run with fewer hosts too, but at least these.")] = None,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts of all processes after failures.")] = 0,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the first host, where ranks meet.")] = 29400,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command of each host; start nothing.")] = False,
    as_json: _Json = False,
) -> None:
    """Start torchrun on this machine, or by ssh on each host of a hostfile."""
    found = commands(
        script, arguments or (), hosts=hosts, processes=nproc, min_hosts=min_hosts, max_restarts=max_restarts, port=port
    )
    if as_json and not dry_run:
        raise NotAvailableError("--json prints the commands of --dry-run; pass --dry-run too.")
    if dry_run:
        lines = [{"host": item.host.name, "command": item.line} for item in found]
        _show(lines if as_json else "\n".join(f"{line['host']}: {line['command']}" for line in lines))
    elif status := start(found, needed=min_hosts or len(found)):
        _fail(f"the run ended with exit status {status}.", status)


@app.command()
def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="A model, as for plan: report on its operators. Without: report on this machine."),
    ] = None,
    cluster: Annotated[str, typer.Option(help="NODE_TYPE:NODESxDEVICES to plan the model for.")] = "h100_sxm:1x4",
    mesh: _Axes = None,
    batch: _Batch = 8,
    seq: _Seq = 1024,
    precision: _Precision = "bf16",
    trust_remote_code: _TrustCode = False,
    as_json: _Json = False,
) -> None:
    """Report on this machine, or on a model's operators that run whole on every device, and their time."""
    if model is None:
        _examine_machine(as_json)
        return
    loaded = load_model(model, batch=batch, seq=seq, trust_remote_code=trust_remote_code)
    result = api.plan(loaded.model, place_of(cluster, mesh), example_inputs=loaded.inputs, precision=precision)
    if as_json:
        _show(coverage_json(result))
        return
    _show(coverage_summary(result))
    if rows := coverage_rows(result):
        _show(coverage_table(rows))


def _examine_machine(as_json: bool) -> None:
    """Print a report on this machine; raise `AutoshardError` if autoshard cannot work here."""
    findings = diagnose()
    if as_json:
        _show([{"name": item.name, "found": item.found, "is_good": item.is_good} for item in findings])
    else:
        rows = [(item.name, item.found, "ok" if item.is_good else "PROBLEM") for item in findings]
        _show(table(("", "found", ""), rows))
    bad = [item.name for item in findings if not item.is_good]
    if bad:
        raise AutoshardError(f"this machine is not ready: {', '.join(bad)} (see above).")


def _show(content: Any) -> None:
    if isinstance(content, (dict, list)):
        content = json.dumps(content, indent=1)
    if isinstance(content, str):
        console.print(content, soft_wrap=True)
    else:
        console.print(content)
