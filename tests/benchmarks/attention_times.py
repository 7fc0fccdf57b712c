"""Predicted times of one attention, of a fused kernel and of separate operators, to hold beside measurements."""

from __future__ import annotations

from cost_models.compute import ITEMSIZE, matmul_time, memory_time, work_time
from cost_models.device import Device
from cost_models.work import AttentionShape, Kind, MatmulShape, Work

SCORE_PASSES = {False: 4, True: 7}  # see `unfused_attention_time`


def attention_time(shape: AttentionShape, dtype: str, device: Device) -> float:
    """Seconds of a fused attention, launch included. For another kernel: `device.with_attention("flash3")`."""
    itemsize, per_head = ITEMSIZE[dtype], shape.depth + shape.value_depth
    moved = itemsize * shape.heads * (shape.queries + shape.keys) * per_head * (2 if shape.backward else 1)
    return work_time(Work(shape.flops, moved, 0, Kind.ATTENTION, dtype, attention=shape), device)


def unfused_attention_time(shape: AttentionShape, dtype: str, device: Device) -> float:
    """Seconds of attention whose scores go through memory: products, and passes over heads * queries * keys elements.

    Forward, the scores are written, read and written by softmax, and read: 4 passes; two more when a causal mask is
    filled in. Backward, the gradient of the probabilities is written, it and they are read and the gradient of the
    scores is written, which is read twice, as are the probabilities once more: 7. All products run in full, causal or
    not. Against "standard attention" of Shah et al. 2024 (FlashAttention-3, figures 5 and 6, head dim 128, 8192
    keys, not causal): 139 and 181 TFLOP/s measured, forward and backward.
    """
    rows, keys = shape.queries, shape.keys
    inner, outer = (
        MatmulShape(rows, keys, shape.depth, shape.heads),
        MatmulShape(rows, shape.value_depth, keys, shape.heads),
    )
    products = (inner, inner, outer, outer) if shape.backward else (inner, outer)
    passes = SCORE_PASSES[shape.backward] + (2 if shape.causal and not shape.backward else 0)
    scores = memory_time(passes * ITEMSIZE[dtype] * shape.heads * rows * keys, device)
    return sum(matmul_time(*each, dtype, device) for each in products) + device.launch_latency_s + scores
