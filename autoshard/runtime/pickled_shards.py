"""Pickle DTensors (`torch.save`) of a compiled model only if this rank holds them whole.

For `if rank == 0: torch.save(model.state_dict(), path)`, torch writes only the shards of rank 0 into the file. So a
tensor that this rank holds whole is written as a plain tensor. For any other DTensor, `NotAvailableError` is raised.
Copies, other processes of this rank (such as that of `torch.distributed.checkpoint.async_save`), and DTensors of other
libraries are pickled as torch does.
"""

from __future__ import annotations

import copy
import copyreg
import sys
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.errors import NotAvailableError
from autoshard.runtime.split_output import SplitOutput
from autoshard.runtime.stages.stage_meshes import OtherStageTensor

_PROTOCOL = 2
"""The pickle protocol that is passed to torch. Torch treats this protocol and all later ones alike."""

_OURS: WeakSet[DeviceMesh] = WeakSet()
"""Meshes for which models were compiled. DTensors on any other mesh are pickled as torch does."""


def pickle_wholes_alone(meshes: Iterable[DeviceMesh]) -> None:
    """From now on, raise an error if a DTensor on one of `meshes` is pickled and this rank does not hold it whole."""
    _OURS.update(meshes)
    for kind in (DTensor, SplitOutput, OtherStageTensor):
        copyreg.pickle(kind, _reduced)  # type: ignore[arg-type]  # typeshed knows fewer forms than pickle takes
        ForkingPickler.register(kind, _as_torch_does)


def _reduced(tensor: DTensor) -> Any:
    """Return the pickled form of a DTensor.

    Raises:
        NotAvailableError: the DTensor is of a compiled model, and this rank does not hold it whole.
    """
    is_copied = sys._getframe(1).f_code is copy.copy.__code__
    if is_copied or tensor.device_mesh not in _OURS:
        return _as_torch_does(tensor)
    if isinstance(tensor, OtherStageTensor):
        tensor.redistribute()
    if not _is_whole(tensor):
        raise NotAvailableError(
            f"A tensor of shape {tuple(tensor.shape)} is sharded on {tensor.device_mesh} ({tensor.placements}), and "
            "pickle (torch.save, say) would write only this rank's part. On every rank, gather with "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True, cpu_offload=True)), which gives rank 0 the whole, for torch.save. Or use "
            "sharded.export(path), autoshard.Checkpoints, torch.distributed.checkpoint, or full_tensor() of a tensor."
        )
    whole = tensor.to_local().detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(whole, requires_grad=tensor.requires_grad).__reduce_ex__(_PROTOCOL)
    return whole.requires_grad_(tensor.requires_grad).__reduce_ex__(_PROTOCOL)


def _is_whole(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    pairs = zip(tensor.placements, mesh.shape, strict=True)
    return all(it.is_replicate() or size == 1 for it, size in pairs)


def _as_torch_does(tensor: torch.Tensor) -> Any:
    return tensor.__reduce_ex__(_PROTOCOL)
