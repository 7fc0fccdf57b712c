"""Every example runs as a user would run it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.examples.scripts import ROOT, run_python

_SMALL = ("--steps", "3", "--layers", "1", "--width", "32", "--heads", "4", "--length", "16", "--measure-s", "2")
_ON_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
_TORCHRUN = (*_ON_RANKS, "2")


def _example(name: str) -> str:
    return str(ROOT / "examples" / name)


def test_quickstart_equals_one_device(tmp_path: Path) -> None:
    """The two losses that the quickstart prints, of one device and of the mesh, are equal."""
    losses = re.findall(r"loss (\S+)", run_python(_example("quickstart.py"), folder=tmp_path))
    assert len(losses) == 2
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-5)


def test_quickstart_is_short() -> None:
    """The quickstart has fewer than 30 lines."""
    assert len(Path(_example("quickstart.py")).read_text().splitlines()) < 30


@pytest.mark.parametrize("launcher", [(), _TORCHRUN], ids=["simulator", "torchrun"])
def test_train_gpt_equals_one_device(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """The loss curve equals one device's, and the plan is written to a file."""
    text = run_python(*launcher, _example("train_gpt.py"), *_SMALL, folder=tmp_path)
    difference = re.search(r"Largest difference of the loss curve to one device: (\S+)", text)
    assert difference is not None, text
    assert float(difference[1]) < 1e-4
    assert (tmp_path / "plan.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), (*_ON_RANKS, "8")], ids=["simulator", "torchrun"])
def test_pretraining_along_four_axes_equals_one_device(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """On eight ranks, losses of steps and evaluation equal one device's, and the page has a picture of the stages."""
    text = run_python(*launcher, _example("pretrain_4d.py"), "--steps", "3", folder=tmp_path)
    difference = re.search(r"Largest relative difference of a loss to one device: (\S+)", text)
    assert difference is not None, text
    assert float(difference[1]) < 1e-5
    assert len(re.findall(r"step \d+: loss|held out: loss", text)) == 4
    page = (tmp_path / "plan_4d.html").read_text()
    for drawn in ("<h2>Stages</h2>", "pipeline rank 1: compute", "<title>0F0: ", "<title>1B3: "):
        assert drawn in page


@pytest.mark.slow
def test_plan_llama_prints_a_plan(tmp_path: Path) -> None:
    """The example prints a plan for 64 devices."""
    text = run_python(_example("plan_llama.py"), "--layers", "2", folder=tmp_path)
    assert "model.layers.*.mlp.up_proj.weight" in text
    assert "Cost of one step" in text


@pytest.mark.slow
def test_finetune_goes_on_on_another_rank_count(tmp_path: Path) -> None:
    """A training that stops on two ranks and continues on one has the losses of an uninterrupted run on one device."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).train()
    model.save_pretrained(tmp_path / "start")
    runs = [
        run_python(*_ON_RANKS, ranks, _example("finetune.py"), "start", steps, folder=tmp_path)
        for ranks, steps in (("2", "4"), ("1", "7"))
    ]
    found = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", "".join(runs))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    for number, loss_found in enumerate(found):
        words = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(number))
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        assert loss_found == pytest.approx(loss.item(), abs=2e-6), number
    assert len(found) == 7
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "trained").state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_the_page_on_resuming_is_the_example() -> None:
    """The page on resuming contains the code of the example."""
    _, code = Path(_example("finetune.py")).read_text().split('"""\n\n', 1)
    assert f"```python\n{code}```" in (ROOT / "docs" / "tutorials" / "stop_and_resume.md").read_text()
