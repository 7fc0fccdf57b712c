"""The parts of peft that autoshard asks, written by hand for machines without peft: LoRA of linear layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .tuners.tuners_utils import BaseTuner, BaseTunerLayer
from .utils.other import AuxiliaryTrainingWrapper


@dataclass
class LoraConfig:
    """How a model is adapted."""

    r: int = 8
    lora_alpha: int = 8
    target_modules: Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    task_type: str | None = None
    peft_type: str = "LORA"
    base_model_name_or_path: str | None = None
    inference_mode: bool = False
    is_prompt_learning: bool = False

    def save_pretrained(self, folder: Path, auto_mapping_dict: Any = None) -> None:
        """Write the configuration."""
        Path(folder).mkdir(exist_ok=True)
        text = json.dumps({**asdict(self), "auto_mapping": auto_mapping_dict})
        Path(folder, "adapter_config.json").write_text(text)


class Linear(BaseTunerLayer):
    """A linear layer with a low-rank product beside it."""

    def __init__(self, base_layer: nn.Linear, config: LoraConfig) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.scaling = config.lora_alpha / config.r
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, config.r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(config.r, base_layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling

    def get_base_layer(self) -> nn.Module:
        """The adapted layer."""
        return self.base_layer

    def merge(self, safe_merge: bool, adapter_names: Any) -> None:
        """Add the product to the weight."""
        assert not safe_merge
        assert adapter_names is None
        first, second = (part.get_parameter("default.weight") for part in (self.lora_A, self.lora_B))
        self.base_layer.weight.data += second @ first * self.scaling


class ModulesToSaveWrapper(AuxiliaryTrainingWrapper):
    """A module with a trained copy."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.original_module = module.requires_grad_(False)
        copied = nn.Linear(module.in_features, module.out_features, module.bias is not None)  # type: ignore[arg-type]
        copied.load_state_dict(module.state_dict())
        self.modules_to_save = nn.ModuleDict({"default": copied})

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: Any) -> nn.Module:
        """The trained copy, or the module from before."""
        return self.modules_to_save["default"] if merge else self.original_module


class LoraModel(BaseTuner):
    """A model whose layers are replaced."""

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        for name, module in list(model.named_modules()):
            leaf = name.rpartition(".")[2]
            if leaf in config.target_modules:
                model.set_submodule(name, Linear(module, config))  # type: ignore[arg-type]
            elif leaf in config.modules_to_save:
                model.set_submodule(name, ModulesToSaveWrapper(module))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class PeftModel(nn.Module):
    """An adapted model."""

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        super().__init__()
        self.base_model = model if config.is_prompt_learning else LoraModel(model, config)
        self.peft_config = {"default": config}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def get_base_model(self) -> nn.Module:
        """The adapted model."""
        return self.base_model.model if isinstance(self.base_model, LoraModel) else self.base_model


class PeftMixedModel(nn.Module):
    """Not here: a model with adapters of several types."""


def get_peft_model(model: nn.Module, config: LoraConfig) -> PeftModel:
    """Adapt a model."""
    return PeftModel(model, config)


def get_peft_model_state_dict(model: Any, state_dict: dict[str, Tensor], adapter_name: str) -> dict[str, Any]:
    """An adapter's tensors under the names in its file."""
    found = {}
    for name, tensor in state_dict.items():
        if ".lora_" in name:
            found[name.replace(f".{adapter_name}", "")] = tensor
        if ".modules_to_save." in name:
            found[name.replace(f"modules_to_save.{adapter_name}.", "")] = tensor
    if model.peft_config[adapter_name].peft_type == "computed":
        return {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    return found
