"""The command line prints output, JSON, exit status, and one sentence for a mistake."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import autoshard
from autoshard import cli
from passes.lowering.lower import Lower
from tests.passes.mutations import copy_of, scale_value

_FILE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()

def build(batch, seq):
    return Model(), (torch.randn(batch, seq, 64),)
"""


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process, and return the exit status."""
    monkeypatch.setattr(sys, "argv", ["autoshard", *arguments])
    try:
        cli.main()
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "cli_model.py"
    path.write_text(_FILE)
    return f"{path}:build"


def test_plan_prints_a_table(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """`plan` prints the parameters and the cost of a step."""
    status = _run(monkeypatch, "plan", model, "--cluster", "h100_sxm:1x4", "--batch", "8", "--seq", "16")
    text = capsys.readouterr().out
    assert status == 0
    assert "up.weight" in text
    assert "Cost of one step" in text


def test_plan_searches_recipes_for_a_global_batch(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With `--global-batch`, the JSON has a recipe of this batch, and the runtime that `--runtime` names."""
    arguments = ("--cluster", "h100_sxm:1x4", "--global-batch", "8", "--seq", "16", "--json")
    for runtime in ("autoshard", "megatron"):
        assert _run(monkeypatch, "plan", model, *arguments, "--runtime", runtime) == 0
        found = json.loads(capsys.readouterr().out)
        batch = found["recipe"]["data"] * found["recipe"]["micro_batch"] * found["micro_batches"]
        assert (batch, found["runtime"]) == (8, runtime)


def test_the_plan_for_a_global_batch_runs_the_model_as_it_is(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A plan for a global batch takes the float32 inputs of `build`, and has the precision bf16."""
    path = tmp_path / "plan.json"
    arguments = ("--cluster", "h100_sxm:1x2", "--global-batch", "8", "--seq", "16", "--out", str(path))
    assert _run(monkeypatch, "plan", model, *arguments) == 0
    plan = autoshard.Plan.load(path)
    assert (plan.precision, dict(plan.inputs)) == ("bf16", {"input:0": "f32[8, 16, 64]"})


def test_plan_begins_with_the_recipe_of_another_plan(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`--previous` with a plan for another cluster gives the recipe that is found without it."""
    arguments = ("--global-batch", "8", "--runtime", "megatron", "--seq", "16", "--json")
    old, found = str(tmp_path / "old.json"), []
    assert _run(monkeypatch, "plan", model, "--cluster", "h100_sxm:1x2", *arguments, "--out", old) == 0
    for previous in ((), ("--previous", old)):
        capsys.readouterr()
        assert _run(monkeypatch, "plan", model, "--cluster", "h100_sxm:1x4", *arguments, *previous) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["recipe"] == found[1]["recipe"]


@pytest.mark.parametrize("precision", ["f32", "f16", "bf16"])
def test_price_confirms_a_plan_in_any_precision(
    precision: str, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """`price` of a plan's recipe and precision gives the plan's prediction."""
    cluster = ("--cluster", "h100_sxm:1x4", "--seq", "16")
    assert (
        _run(
            monkeypatch,
            "plan",
            model,
            *cluster,
            "--global-batch",
            "8",
            "--runtime",
            "megatron",
            "--precision",
            precision,
            "--json",
        )
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    (tmp_path / "recipe.json").write_text(json.dumps(plan["recipe"]))
    asked = ("--recipe", str(tmp_path / "recipe.json"), "--global-batch", "8", "--precision", precision)
    assert _run(monkeypatch, "price", model, *cluster, *asked, "--json") == 0
    assert json.loads(capsys.readouterr().out)["predicted"] == plan["predicted"]


def test_plan_json_is_the_plan(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`--json` prints the file that `--out` writes."""
    out = tmp_path / "plan.json"
    arguments = ("plan", model, "--cluster", "h100_sxm:1x4", "--mesh", "data=2,model=2", "--json")
    assert _run(monkeypatch, *arguments, "--out", str(out)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["precision"] == "bf16"
    assert autoshard.Plan.load(out).mesh == autoshard.Mesh({"data": 2, "model": 2})


def test_plan_without_an_optimizer(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """With `--optimizer none` the plan has no update of parameters."""
    arguments = ("plan", model, "--cluster", "h100_sxm:1x2", "--optimizer", "none", "--seq", "8", "--json")
    assert _run(monkeypatch, *arguments) == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert not any(name.startswith("parameter_update") for name in outputs)


def test_doctor_finds_this_machine_ready(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """`doctor` reports no fault on this machine."""
    assert _run(monkeypatch, "doctor", "--json") == 0
    findings = json.loads(capsys.readouterr().out)
    assert all(item["is_good"] for item in findings)
    assert "compile on the simulator" in {item["name"] for item in findings}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("plan", "nowhere.py:build", "--cluster", "h100_sxm:1x4"), "there is no file nowhere.py"),
        (("plan", "MODEL", "--cluster", "abacus:1x4"), "abacus"),
        (("plan", "MODEL", "--cluster", "h100_sxm:4"), "must read NODE_TYPE:NODESxDEVICES"),
        (("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--mesh", "data"), "must read AXIS=SIZE"),
        (("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--precision", "f12"), "precision='f12' is unknown"),
        (
            ("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--precision", "f16", "--optimizer", "none"),
            "needs a training step, which scales the loss",
        ),
        (("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--memory-gib", "0.00001"), "are enough"),
        (
            ("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--memory-gib", "-1"),
            "--memory-gib -1 must be a number above",
        ),
        (("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--memory-gib", "nan"), "--memory-gib nan must be a number"),
        (("verify", "MODEL", "--cluster", "h100_sxm:1x4", "--memory-gib", "inf"), "--memory-gib inf must be a number"),
        (("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--mesh", "data=2,data=2"), "names axis 'data' twice; give"),
        (("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--time-budget-s", "-1"), "must be a number of seconds"),
        (("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--mesh", "data=3"), "has 3 ranks, and the cluster"),
        (("plan", "MODEL", "--cluster", "nowhere.toml"), "no file nowhere.toml of hardware"),
        (("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--out", "nowhere/plan.json"), "cannot be written"),
        (("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--out", "/"), "'/' cannot be written: Is a directory"),
        (("calibrate", "--out", "/"), "'/' cannot be written: Is a directory"),
        (("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--memory-gib", "1e300"), "of GiB that a device may have"),
        (("price", "MODEL", "--cluster", "h100_sxm:1x4", "--recipe", "nowhere.json"), "there is no file nowhere.json"),
        (("report", "MODEL", "--cluster", "h100_sxm:1x4", "--out", "nowhere/plan.html"), "cannot be written"),
        (("plan", "MODEL", "--cluster", "h100_sxm:1x4", "--previous", "nowhere.json"), "there is no file nowhere.json"),
    ],
)
def test_a_mistake_is_one_sentence(
    model: str,
    arguments: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """A mistake has exit status 1 and one line on standard error, without a traceback."""
    status = _run(monkeypatch, *(model if word == "MODEL" else word for word in arguments))
    error = capsys.readouterr().err
    assert status == 1
    assert sentence in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("plan", "mine.py:build", "--clusters", "h100_sxm"), "--clusters"),
        (("plan", "mine.py:build"), "--cluster"),
        (("plan", "mine.py:build", "--cluster", "h100_sxm:1x4", "--batch", "-3"), "--batch"),
        ((), "name a command"),
        (("dance",), "dance"),
    ],
)
def test_wrong_usage_has_a_status_of_its_own(
    arguments: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong command line is refused in one sentence with exit status 2."""
    assert _run(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert len(error.strip().splitlines()) == 1


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints `autoshard.__version__`."""
    assert _run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == f"autoshard {autoshard.__version__}"


def test_price_says_whose_run_it_prices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """`price` names the runtime that `--runtime` gives, and refuses autoshard's own runtime with a
    pointer to `plan`."""
    command = ("price", model, "--cluster", "h100_sxm:1x2", "--seq", "8", "--recipe", "data=2")
    assert _run(monkeypatch, *command) == 0
    assert "runtime='megatron'" in capsys.readouterr().out
    assert _run(monkeypatch, *command, "--runtime", "fsdp2") == 0
    assert "runtime='fsdp2'" in capsys.readouterr().out
    assert _run(monkeypatch, *command, "--runtime", "autoshard") == 1
    assert "autoshard.plan" in capsys.readouterr().err


def test_ctrl_c_before_there_is_a_plan_is_one_sentence(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C during planning prints one sentence, with exit status 130."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoshard.api.plan", interrupted)
    assert _run(monkeypatch, "plan", model, "--cluster", "h100_sxm:1x2") == 130
    assert "interrupted before there was anything to print" in capsys.readouterr().err


def test_a_recipe_is_priced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str) -> None:
    """`price` prints the plan of a recipe, prices the given optimizer's state, and refuses a mistake
    in one sentence."""
    command = ("price", model, "--cluster", "h100_sxm:1x2", "--seq", "8")
    assert _run(monkeypatch, *command, "--recipe", "data=2,zero=1", "--json") == 0
    adamw = json.loads(capsys.readouterr().out)
    assert adamw["mesh"] == {"data": 2}
    assert _run(monkeypatch, *command, "--recipe", "data=2,zero=1", "--optimizer", "sgd", "--json") == 0
    states = [
        each["predicted"]["memory_breakdown"]["optimizer state"]
        for each in (adamw, json.loads(capsys.readouterr().out))
    ]
    assert states[0] == 3 * states[1]
    assert _run(monkeypatch, *command, "--recipe", "data=2", "--optimizer", "none") == 1
    assert "optimizer='none' is unknown; use one of" in capsys.readouterr().err
    assert _run(monkeypatch, *command, "--recipe", "data=4") == 1
    assert "the cluster has 2" in capsys.readouterr().err


def test_the_package_runs_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m autoshard` runs the command line."""
    monkeypatch.setattr("sys.argv", ["python -m autoshard", "price", "--help"])
    runpy.run_module("autoshard", run_name="__main__")
    assert "--optimizer" in capsys.readouterr().out


def test_explain(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """`explain` prints every spec of a parameter as a table or as JSON, and refuses an unknown name in a sentence."""
    arguments = ("--cluster", "h100_sxm:1x2", "--mesh", "data=2", "--batch", "8", "--seq", "16")
    assert _run(monkeypatch, "explain", model, "up.weight", *arguments) == 0
    assert "chosen" in capsys.readouterr().out
    assert _run(monkeypatch, "explain", model, "up.weight", *arguments, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["others"]) >= 2
    assert _run(monkeypatch, "explain", model, "middle.weight", *arguments) == 1
    assert "there are up.weight" in capsys.readouterr().err


def test_explain_of_recipes(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """`explain` of recipes follows the given constraints, and refuses an unknown field in a sentence."""
    cluster = ("--cluster", "h100_sxm:1x4", "--global-batch", "8", "--seq", "16")
    assert _run(monkeypatch, "explain", model, "up.weight", *cluster, "--constrain", "tensor=2", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["chosen"]["recipe"]["tensor"] == 2
    assert data["others"]
    assert _run(monkeypatch, "explain", model, "up.weight", *cluster, "--constrain", "layers=2") == 1
    assert "a recipe has no such field" in capsys.readouterr().err
    assert _run(monkeypatch, "explain", model, "up.weight", *cluster, "--runtime", "megatron") == 1
    assert "this plan is the price of a recipe" in capsys.readouterr().err


def test_plan_takes_specs_as_constraints(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`plan` takes specs as constraints without a global batch."""
    arguments = ("--cluster", "h100_sxm:1x2", "--mesh", "data=2", "--seq", "16", "--json")
    assert _run(monkeypatch, "plan", model, *arguments, "--constrain", "up.weight=P(None, 'data')") == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["up.weight"]["spec"] == "P(None, 'data')"


def test_report(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`report` writes one page for a model's plan and for its file, and refuses mistakes in a sentence."""
    page, saved = tmp_path / "plan.html", tmp_path / "plan.json"
    options = ("--cluster", "h100_sxm:1x2", "--mesh", "data=2", "--seq", "16")
    assert _run(monkeypatch, "report", model, *options, "--out", str(page)) == 0
    assert "up.weight" in page.read_text()
    assert _run(monkeypatch, "plan", model, *options, "--out", str(saved)) == 0
    capsys.readouterr()
    assert _run(monkeypatch, "report", str(saved), "--out", str(page), "--json") == 0
    assert json.loads(capsys.readouterr().out)["page"] == str(page)
    for arguments, sentence in (
        ((model,), "pass --cluster"),
        (("nowhere.json",), "there is no file nowhere.json"),
        ((str(saved), "--out", str(tmp_path / "nowhere" / "plan.html")), "cannot be written"),
    ):
        assert _run(monkeypatch, "report", *arguments) == 1
        assert sentence in capsys.readouterr().err


def test_verify_prints_the_proof(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """`verify` proves the plan of a whole training step for a cluster."""
    assert _run(monkeypatch, "verify", model, "--cluster", "h100_sxm:1x4", "--mesh", "data=4", "--seq", "16") == 0
    text = capsys.readouterr().out
    assert text.startswith("verified: ")
    assert "4 parameter_update" in text


def test_verify_reads_a_plan(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """`verify` proves a saved plan as JSON, and refuses a plan of other inputs with status 1."""
    saved = str(tmp_path / "plan.json")
    arguments = ("--seq", "16", "--optimizer", "sgd")
    assert _run(monkeypatch, "plan", model, "--cluster", "h100_sxm:1x4", *arguments, "--out", saved) == 0
    capsys.readouterr()
    assert _run(monkeypatch, "verify", model, "--plan", saved, *arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == dict(autoshard.Plan.load(saved).mesh.axes)
    assert found["results"]["parameter_update"] == 4
    assert found["assumptions"] == []
    assert _run(monkeypatch, "verify", model, "--plan", saved, "--seq", "32", "--optimizer", "sgd") == 1
    assert "The plan is for inputs" in capsys.readouterr().err


def test_verify_that_fails_has_status_1(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """If a pass lowers the program wrongly, `verify` fails with exit status 1."""
    right = Lower.__call__

    def wrong(self: Lower, program: Any) -> Any:
        lowered = right(self, program)
        module = copy_of(lowered.graph_module)
        assert scale_value(module.graph, Random(0), lowered.mesh)
        return replace(lowered, graph_module=module)

    monkeypatch.setattr(Lower, "__call__", wrong)
    assert _run(monkeypatch, "verify", model, "--cluster", "h100_sxm:1x4", "--mesh", "data=4", "--seq", "16") == 1
    assert "is part of no proof" in capsys.readouterr().err


def test_verify_is_told_what_to_prove(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`verify` without a cluster and without a plan is refused."""
    assert _run(monkeypatch, "verify", model) == 1
    assert "pass --cluster, to plan and prove that, or --plan with a saved plan." in capsys.readouterr().err
