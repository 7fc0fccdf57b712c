"""Predicted times of attention by a fused kernel and by separate operators, for comparison with measurements."""

from __future__ import annotations

from cost_models.compute import ITEMSIZE, matmul_time, memory_time, work_time
from cost_models.device import Device
from cost_models.work import AttentionShape, Kind, MatmulShape, Work

SCORE_PASSES = {False: 4, True: 7}  # see `unfused_attention_time`


def attention_time(shape: AttentionShape, dtype: str, device: Device) -> float:
    """Return the seconds of a fused attention with launch; `device.with_attention("flash3")` chooses the kernel."""
    itemsize, per_head = ITEMSIZE[dtype], shape.depth + shape.value_depth
    moved = itemsize * shape.heads * (shape.queries + shape.keys) * per_head * (2 if shape.backward else 1)
    return work_time(Work(shape.flops, moved, 0, Kind.ATTENTION, dtype, attention=shape), device)


def unfused_attention_time(shape: AttentionShape, dtype: str, device: Device) -> float:
    """Return the seconds of attention with scores in memory: products, and passes over heads * queries * keys elements.

    The forward has 4 passes: the scores are written, read and written by softmax, and read. A filled causal mask adds
    two passes. The backward has 7 passes. The gradient of the probabilities is written and read with the probabilities.
    The gradient of the scores is written and read twice, and the probabilities are read once more. All products run in
    full, causal or not.

    Reference: "standard attention" of Shah et al. 2024 (FlashAttention-3, figures 5 and 6). At head dim 128 and 8192
    keys without causality, 139 and 181 TFLOP/s were measured, forward and backward.
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
