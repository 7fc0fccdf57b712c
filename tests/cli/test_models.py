"""Models that are named on the command line: functions in files, and configs of transformers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, T5Config, ViTConfig

from autoshard.cli.models import ModelReferenceError, load_model

_FILE = """
import torch
from torch import nn

def build(batch):
    return nn.Linear(4, 2), (torch.randn(batch, 4),)

def unfinished():
    return nn.Linear(4, 2)

def sized(batch, width):
    return nn.Linear(width, 2), (torch.randn(batch, width),)

def failing():
    raise KeyError("nothing")
"""


_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _load(reference: str, dtype: torch.dtype | None = None, trust_remote_code: bool = False):
    return load_model(reference, batch=3, seq=8, dtype=dtype, trust_remote_code=trust_remote_code)


def _write_config(folder: Path, **changes: Any) -> str:
    """Write a config, and beside it code that leaves a file when run."""
    (folder / "config.json").write_text(json.dumps(_LLAMA | changes))
    (folder / "beside.py").write_text(_BESIDE.format(trace=str(folder / "ran")))
    return f"hf:{folder}"


_BESIDE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({trace!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "drawn_own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
_AUTO_MAP = {"AutoConfig": "beside.OwnConfig", "AutoModelForCausalLM": "beside.OwnModel"}


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "drawn_model.py"
    path.write_text(_FILE)
    return path


def test_a_function_in_a_file_is_built_on_meta(model_file: Path) -> None:
    """The function gets the batch, and the model is built on the meta device in the given type."""
    for dtype, found in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        named = _load(f"{model_file}:build", dtype)
        weight = named.model.get_parameter("weight")
        assert (weight.device.type, weight.dtype) == ("meta", found)
        assert named.inputs[0].shape == (3, 4)


def test_a_transformers_config_gives_a_causal_language_model(tmp_path: Path) -> None:
    """A folder with config.json, or the file itself, becomes a model on the meta device with labels
    among its inputs."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        dtype=torch.bfloat16,
    )
    config.save_pretrained(tmp_path)
    for reference in (f"hf:{tmp_path}", f"hf:{tmp_path / 'config.json'}"):
        named = _load(reference)
        assert named.inputs["labels"].shape == (3, 8)
        assert {(item.is_meta, item.dtype) for item in named.model.parameters()} == {(True, torch.float32)}


def test_a_config_of_an_encoder_and_decoder(tmp_path: Path) -> None:
    """The config of an encoder-decoder becomes a model that returns a loss for its inputs."""
    T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=32, decoder_start_token_id=0
    ).save_pretrained(tmp_path)
    named = _load(f"hf:{tmp_path}")
    assert named.model(**named.inputs).loss.shape == ()


def test_a_config_of_no_language_model(tmp_path: Path) -> None:
    """A config of a model that predicts no tokens is refused, and so is a file that is no config."""
    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelReferenceError, match=r"model_type='vit' is none. Write a function"):
        _load(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelReferenceError, match=r"config.json, which MODEL 'hf:.*' names, is no config"):
        _load(f"hf:{tmp_path / 'config.json'}")


def test_code_beside_a_config_is_not_run(tmp_path: Path) -> None:
    """Code beside a config is not run: a known model type is built by transformers, and an unknown one is refused."""
    named = _load(_write_config(tmp_path, auto_map=_AUTO_MAP))
    assert type(named.model).__module__.startswith("transformers.models.llama")
    reference = _write_config(tmp_path, auto_map=_AUTO_MAP, model_type="drawn_own")
    with pytest.raises(ModelReferenceError, match=r"model_type='drawn_own'.*is not run.*pass --trust-remote-code"):
        _load(reference)
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_config_is_run_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--trust-remote-code`, code beside a config makes the model."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    named = _load(_write_config(tmp_path, auto_map=_AUTO_MAP, model_type="drawn_own"), trust_remote_code=True)
    assert type(named.model).__name__ == "OwnModel"
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("value", ["kernels-community/flash-mla", "paged|someone/kernel@main:go", "flash_attention_2"])
def test_kernels_of_a_hub_are_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    """A config that names kernels of a hub is refused before a model is made."""

    def fetch(*arguments: object, **options: object) -> None:
        pytest.fail("a kernel was fetched")

    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", fetch)
    with pytest.raises(ModelReferenceError, match=r"implementation='.*' ?, which transformers may fetch and run"):
        _load(_write_config(tmp_path, **{key: value}))
    _load(_write_config(tmp_path, attn_implementation="eager"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (json.dumps(_LLAMA | {"num_hidden_layers": 10**9}), "num_hidden_layers=1000000000; a model is built layer by"),
        (json.dumps(_LLAMA | {"vocab_size": 10**30}), "raised "),
        (json.dumps(_LLAMA | {"hidden_size": None}), "raised .*hidden_size"),
        ("[" * 100_000, "is no config: maximum recursion depth"),
        ("[]", "is no config"),
    ],
)
def test_an_absurd_config_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    """A config with absurd numbers or text is refused in one sentence."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelReferenceError, match=sentence):
        _load(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("model", "must read path/to/file.py:build"),
        ("nowhere.py:build", "there is no file nowhere.py"),
        ("no_such_package.models:build", "there is no module 'no_such_package'"),
        ("torch.nn:build", "has no function 'build'"),
        ("torch:zeros", "torch:zeros is no function of Python"),
        ("hf:nowhere", "there is no config file or folder nowhere"),
    ],
)
def test_a_wrong_reference_says_what_is_missing(reference: str, sentence: str) -> None:
    """A reference without a function, file, module or attribute is refused with the missing part."""
    with pytest.raises(ModelReferenceError, match=sentence):
        _load(reference)


def test_a_function_must_return_a_model_with_inputs(model_file: Path) -> None:
    """A function that returns a module without inputs is refused."""
    with pytest.raises(ModelReferenceError, match=r"must return \(model, example_inputs\)"):
        _load(f"{model_file}:unfinished")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("sized", r"drawn_model.py:sized needs 'width', but is told only 'batch' and 'seq'; give the others defaults"),
        ("failing", r"drawn_model.py:failing raised KeyError: 'nothing' \(drawn_model.py:15 in failing\)"),
    ],
)
def test_a_function_that_cannot_be_called_is_named(model_file: Path, name: str, sentence: str) -> None:
    """A function that cannot be called is refused in one sentence with its line."""
    with pytest.raises(ModelReferenceError, match=sentence):
        _load(f"{model_file}:{name}")


def test_a_file_named_like_a_module_of_python_does_not_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a model from `queue.py` leaves Python's module `queue` as it is."""
    (tmp_path / "queue.py").write_text("from torch import nn\ndef build(): return nn.Linear(2, 2), ()\n")
    monkeypatch.chdir(tmp_path)
    before = sys.modules["queue"]
    _load("queue.py:build")
    assert sys.modules["queue"] is before


def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing import or a syntax error inside the file is reported as such, with the line."""
    (tmp_path / "drawn_importer.py").write_text("import torch\nimport nothing_there\n")
    (tmp_path / "drawn_typo.py").write_text("def build(:")
    monkeypatch.chdir(tmp_path)
    lacking = r"raised ModuleNotFoundError: No module named 'nothing_there' \(drawn_importer.py:2 in <module>\)"
    for reference in ("drawn_importer.py:build", "drawn_importer:build"):
        with pytest.raises(ModelReferenceError, match=f"drawn_importer.* {lacking}"):
            _load(reference)
    with pytest.raises(ModelReferenceError, match=r"drawn_typo.py raised SyntaxError: .*drawn_typo.py, line 1"):
        _load("drawn_typo.py:build")
    with pytest.raises(ModelReferenceError, match=r"there is no module 'no', which MODEL names"):
        _load("no.such.module:build")
