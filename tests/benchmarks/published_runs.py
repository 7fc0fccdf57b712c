"""The published runs as models, recipes and clusters, with their frameworks' defaults for missing fields.

Each default is a fact about the source's framework at the time, not a fit; see `FRAMEWORKS`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard import Cluster, Runtime
from autoshard.ir.execution import Execution
from cost_models.hardware import assemble_node, node_type
from passes.search.pipeline_stages import even_blocks
from tests.benchmarks.decoder import DecoderShape, Experts, Latent

Row = Mapping[str, Any]
DATA = Path(__file__).parents[1] / "data"
ROWS = DATA / "published_runs.jsonl"
MORE = DATA / "published_runs_more.jsonl"
"""Rows of further sources, in no part of the fit."""
VTRAIN = (DATA / "vtrain_single.csv", DATA / "vtrain_multi.csv")
"""Iterations of Megatron-DeepSpeed on A100 nodes, likewise."""


@dataclass(frozen=True, slots=True)
class Framework:
    """Behaviour of a source's software.

    Args:
        dropout: dropout of hidden states and attention (Megatron-LM's default is 0.1; later recipes set 0).
        fused: chains of pointwise operators are fused (Megatron's kernels), or run one by one (plain PyTorch).
        bias: bias of linear layers in models with learned positions or LayerNorm.
        overlap_gradients, overlap_parameters, overlap_tensor, overlap_pipeline: see `Runtime`. InternEvo's rows are of
            July 2023, when it waited for updated parameters by `broadcast_params(overlap=False)`
            (@0aa6d26e, internlm/solver/optimizer/hybrid_zero_optim.py).
        gradient_dtype: type of gradients; None: the model's type.
        early_stop, attention: see `Runtime`. llm-foundry's benchmarks run attn_impl=triton and checkpoints that are not
            reentrant (scripts/train/benchmarking/submit_benchmarks.py @12a63191).
        bucket_bytes: see `Runtime`. FSDP gathers a block at a time; InternEvo reduces buckets of 512 Mi elements.
        blocking_launches: see `Runtime` (bigscience train/tr11-176B-ml/setup-test-n2.slurm @7148d3e0 and all scripts
            beside it: without it the training hung).
        separate_experts: see `Runtime` (Megatron-LM @1d9edcf8, docs/discussions/deepseek-v3-gb200-optimization: grouped
            products are "multi-stream + cuBLAS"). A graph of the whole iteration needs kernels that read counts on the
            device.
        wide_logits: the loss reads a copy of the logits in float32, as Megatron-LM's does. Two other losses read the
            head's own logits. They are llm-foundry's (llmfoundry/models/mpt/modeling_mpt.py: fused_crossentropy, of
            flash-attn, not in place) and Transformer Engine's (Megatron-Bridge, scripts/performance,
            cross_entropy_fusion_impl "te").
    """

    dropout: float = 0.0
    fused: bool = True
    bias: bool = True
    overlap_gradients: bool = True
    overlap_parameters: bool = True
    overlap_tensor: bool = True
    overlap_pipeline: bool = False
    gradient_dtype: str | None = "f32"
    bucket_bytes: int = 200_000_000
    early_stop: bool = False
    attention: str | None = None
    blocking_launches: bool = False
    separate_experts: bool = False
    wide_logits: bool = True


_MEGATRON_2020 = Framework(
    dropout=0.1, overlap_gradients=False, overlap_parameters=False, overlap_tensor=False, gradient_dtype=None
)
_MEGATRON_2022 = Framework(dropout=0.1, overlap_gradients=False, overlap_parameters=False, gradient_dtype=None)
_MEGATRON_CORE = Framework(overlap_pipeline=True, separate_experts=True)
_FSDP2 = Framework(fused=False, bias=False, bucket_bytes=10**12, early_stop=True)
FRAMEWORKS: Mapping[str, Framework] = {
    "mosaicml": Framework(
        fused=False, bias=False, bucket_bytes=10**12, early_stop=True, attention="triton", wide_logits=False
    ),
    "bigscience": replace(_MEGATRON_2020, blocking_launches=True),
    "megatron-2020": _MEGATRON_2020,
    "sc21-table1": _MEGATRON_2020,
    "sc21-table2": replace(_MEGATRON_2020, bucket_bytes=900_000_000),
    "korthikanti": _MEGATRON_2022,
    "internevo": Framework(gradient_dtype="bf16", bucket_bytes=2**30, overlap_parameters=False),
    "nemo-launcher-a100": Framework(dropout=0.1, gradient_dtype="bf16"),
    "nemo-24.07": _MEGATRON_CORE,
    "mlm-llama-readme": _MEGATRON_CORE,
    "megatron-bridge": replace(_MEGATRON_CORE, gradient_dtype="bf16", wide_logits=False),
    "torchtitan": _FSDP2,
    "aws-torchtitan": _FSDP2,
    "ibm-fms-fsdp": replace(_FSDP2, gradient_dtype="bf16"),
    "nemo-automodel": replace(_FSDP2, fused=True),
    "nanotron": Framework(fused=False, bias=False),
    "paddlenlp": Framework(bias=False, overlap_tensor=False),
    "llama3-herd": Framework(bias=False, overlap_pipeline=True),
    "mt-nlg": _MEGATRON_2020,
    "alpa": Framework(overlap_tensor=False, gradient_dtype=None),
    "vtrain": _MEGATRON_2020,
}
_DEVICES = {
    "A100-80GB": "a100_sxm_80gb", "A100-40GB": "a100_sxm_40gb", "A800-80GB": "a100_sxm_80gb",
    "H100-80GB": "h100_sxm", "V100-32GB": "v100_sxm2_32gb", "B200-180GB": "b200", "B300-288GB": "b300",
    "GB200-186GB": "gb200", "GB300-288GB": "gb300", "H100-96GB-HBM2e": "h100_sxm_96gb", "H200-141GB": "h200",
    "V100-16GB": "v100_sxm2_16gb",
}  # fmt: skip
_FABRICS = {"A800-80GB": "nvlink3_nvswitch_a800", "V100-32GB": "nvlink2_nvswitch",
            "V100-16GB": "nvlink2_hybrid_cube_mesh",
            "GB200-186GB": "nvlink5_nvl72", "GB300-288GB": "nvlink5_nvl72"}  # fmt: skip
_SPLIT_ENDS = frozenset(
    f"bigscience-tr11-12288x106-h{heads}-n384-dp8tp4pp12-mb2-gb2048-L{line}" for heads, line in ((96, 891), (64, 892))
)
"""Rows that say nothing of their layout where their source does: "regex partition_method='type:transformer|embed'" is
in the heading of these two (bigscience train/tr11-176B-ml/chronicles-prequel.md @9e64edec). 106 + 2 divides by 12."""
_NETWORKS = {"A100": "infiniband_hdr200", "A800": "infiniband_hdr200", "V100": "infiniband_edr100"}


def read_rows(path: Path = ROWS) -> list[Row]:
    """Rows of quality A and B, the latest of each configuration."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["quality"] in "AB" and row["latest_in_group"] is not False]


def more_rows() -> list[Row]:
    """Rows of further sources that give the micro-batch."""
    known = [row for row in read_rows(MORE) if row["micro_batch"] is not None and row["source"]["key"] in FRAMEWORKS]
    return [*known, *(row for path in VTRAIN for row in _vtrain_rows(path))]


def _vtrain_rows(path: Path) -> Iterator[Row]:
    """The rows of a file of vTrain. Recomputation, which the file does not mention, is assumed full, because times
    then fit twice as well."""
    for number, cells in enumerate(csv.reader(path.read_text().splitlines())):
        if number == 0:
            continue
        *sizes, time_ms = cells[-11:]
        gpus, batch, micro_batch, hidden, heads, layers, sequence, tensor, data, pipeline = map(int, sizes)
        model = {
            "name": f"{hidden}x{layers}", "arch": "gpt", "layers": layers, "hidden": hidden, "heads": heads,
            "kv_heads": heads, "head_dim": hidden // heads, "ffn": 4 * hidden, "ffn_gated": False, "vocab": 50304,
            "seq_len": sequence, "tied_embeddings": True, "learned_pos_emb": True,
        }  # fmt: skip
        hardware = {"gpu": "A100-80GB", "n_gpus": gpus, "gpus_per_node": 8, "inter_gbps_per_gpu": 200}
        plan = {"tp": tensor, "dp": data, "pp": pipeline, "zero_stage": 0, "sp": False}
        plan |= dict.fromkeys(("cp", "ep", "vpp"), 1)
        yield {
            "id": f"{path.stem}-{number}", "source": {"key": "vtrain"}, "kind": "train_step", "task": "pretrain",
            "model": model, "hardware": {**hardware, "inter_link": None}, "plan": plan, "micro_batch": micro_batch,
            "global_batch": batch, "recompute": "full", "dtype": "fp16", "attention": None, "compile": False,
            "measured": {}, "derived": {"step_time_s": float(time_ms) / 1e3}, "noise_rel": 0.02,
        }  # fmt: skip


def framework_of(row: Row) -> Framework:
    """The behaviour of the framework that ran the row."""
    return FRAMEWORKS[row["source"]["key"]]


def is_16_bit(row: Row) -> bool:
    """Whether products ran in 16 bits."""
    return row["dtype"].startswith(("bf16", "fp16"))


def model_shape(row: Row) -> DecoderShape:
    """The shape of the row's model."""
    model, framework = row["model"], framework_of(row)
    moe, mla = model.get("moe"), model.get("mla")
    return DecoderShape(
        layers=model["layers"],
        hidden=model["hidden"],
        heads=model["heads"],
        kv_heads=model["heads"] if mla else model["kv_heads"],
        head_size=model["head_dim"],
        ffn=model["ffn"] or 0,
        gated=bool(model["ffn_gated"]),
        vocab=-(-model["vocab"] // 128) * 128,
        sequence=model["seq_len"],
        tied=bool(model["tied_embeddings"]),
        learned_positions=bool(model["learned_pos_emb"]),
        norm_bias=model["arch"] == "gpt",
        bias=framework.bias and model["arch"] == "gpt",
        dropout=framework.dropout if row["task"] == "pretrain" else 0.0,
        fused_attention=(row["attention"] or "").startswith("flash"),
        window=model["sliding_window"]["window"] if model.get("sliding_window") else None,
        experts=None if moe is None else Experts(
            moe["n_experts"], moe["topk"], moe["moe_ffn"], moe["shared_ffn"], moe["dense_layers"],
            biased=_is_biased(row),
        ),
        latent=None if mla is None else Latent(
            mla["q_lora"], mla["kv_lora"], mla["qk_nope"], mla["qk_rope"], mla["v_dim"]
        ),
        mtp_layers=(moe or {}).get("mtp_layers") or 0,
        wide_logits=framework.wide_logits,
    )  # fmt: skip


def _is_biased(row: Row) -> bool:
    """Whether the experts of the row's model have biases and clamps."""
    return row["model"]["name"].startswith("gpt-oss")


def recipe_of(row: Row) -> Execution:
    """Return the row's plan, in its framework's execution."""
    plan, framework = row["plan"], framework_of(row)
    context, pipeline = plan["cp"] or 1, plan["pp"] or 1
    layers = row["model"]["layers"] + ((row["model"].get("moe") or {}).get("mtp_layers") or 0)
    virtual = plan["vpp"] or 1
    layout = plan.get("pp_layout") or ""
    virtual = virtual if pipeline > 1 and layers >= virtual * pipeline else 1
    splits_ends = "embedding" in layout or layout.startswith("Et") or row["id"] in _SPLIT_ENDS
    return Execution(
        data=plan["dp"],
        zero=_zero(row),
        zero_group=plan.get("zero_group"),
        tensor=plan["tp"] or 1,
        sequence_parallel=bool(plan["sp"]) and (plan["tp"] or 1) > 1,
        context=context,
        expert=plan["ep"] or 1,
        pipeline=pipeline,
        virtual_stages=virtual,
        stage_layers=even_blocks(layers, virtual * pipeline, split_ends=True) if splits_ends else None,
        micro_batch=row["micro_batch"],
        global_batch=row["global_batch"],
        recompute=_recompute(row["recompute"]),
        precision=_precision(row),
        runtime=_runtime(row, framework),
    )


def _zero(row: Row) -> int:
    """The ZeRO stage of a row. With a pipeline, Llama 3 and NeMo Automodel gather parameters and reduce gradients
    once a step, as in stage 1.

    Automodel: components/distributed, defer_fsdp_grad_sync. Llama 3: its step has no time to reduce gradients of
    float32 for each micro-batch.
    """
    plan = row["plan"]
    once = row["source"]["key"] in ("llama3-herd", "nemo-automodel") and (plan["pp"] or 1) > 1
    return 1 if once else plan["zero_stage"] or 0


def _runtime(row: Row, framework: Framework) -> Runtime:
    """The runtime that the row's framework had."""
    plan = row["plan"]
    return Runtime(
        name=row["source"]["key"],
        gradient_dtype=_gradient_dtype(row, framework),
        overlap_gradients=framework.overlap_gradients,
        overlap_parameters=framework.overlap_parameters,
        overlap_tensor=framework.overlap_tensor,
        overlap_pipeline=framework.overlap_pipeline,
        separate_sum=row["source"]["key"] == "bigscience",
        bucket_bytes=_bucket_bytes(row, framework),
        listed_collectives=row["source"]["key"] == "sc21-table2" and plan["zero_stage"] == 3,
        early_stop=framework.early_stop,
        attention=framework.attention,
        overlap_expert=bool(plan.get("moe_a2a_overlap")),
        merged_dispatch=plan.get("moe_dispatcher") in ("deepep", "hybridep") or "DeepEP" in (plan.get("kernels") or ""),
        separate_experts=framework.separate_experts and plan.get("cuda_graph") != "full_iteration",
        fused=framework.fused or bool(row["compile"]),
        blocking_launches=framework.blocking_launches,
        cuda_graph=(plan.get("cuda_graph") or "none") != "none",
    )


def _bucket_bytes(row: Row, framework: Framework) -> int:
    """Return the bytes of a bucket of InternEvo's ZeRO-1, which gives whole tensors to ranks.

    Each rank broadcasts its own tensors, with a message for each rank or tensor (`broadcast_params` of @0aa6d26e,
    internlm/solver/optimizer/hybrid_zero_optim.py). Its gradients go to all ranks, twice the bytes of a reduce-scatter,
    and are priced as one reduce-scatter in such messages.
    """
    model, ranks = row["model"], row["plan"].get("zero_group")
    if row["source"]["key"] != "internevo" or not ranks:
        return framework.bucket_bytes
    hidden, layers = model["hidden"], model["layers"]
    elements = layers * hidden * (4 * hidden + 3 * model["ffn"]) + 2 * model["vocab"] * hidden
    messages = min(ranks, 9 * layers + 3)  # four matrices of attention, three of the gated layer, two norms; three ends
    return min(framework.bucket_bytes, 2 * elements // row["plan"]["tp"] // messages)


def _precision(row: Row) -> str:
    """Return the precision; `Execution` refuses four bits, which have no price."""
    if is_16_bit(row):
        return "f16" if row["dtype"].startswith("fp16") else "bf16"
    return "f4" if row["dtype"].startswith("nvfp4") else "f8"


def _recompute(said: str | None) -> str:
    """The recomputation that a row gives: "full", "selective", or "none" for other words, such as names of single
    modules."""
    return said if said in ("full", "selective") else "none"


def _gradient_dtype(row: Row, framework: Framework) -> str:
    said = row["dtype"]
    if "fp32 grad" in said or (said == "bf16" and row["source"]["key"] == "bigscience"):
        return "f32"  # DeepSpeed's bf16 optimizer knows no other sum
    if row["plan"].get("fsdp_mixed_precision"):
        return "bf16" if row["plan"]["fsdp_mixed_precision"] == "PURE" else "f32"
    own = "f16" if said.startswith("fp16") else "bf16"
    return framework.gradient_dtype or own


_HOSTS = {
    "A100-80GB": "a100_sxm_80gb", "A100-40GB": "a100_sxm_40gb", "A800-80GB": "a100_sxm_80gb", "H100-80GB": "h100_sxm",
    "V100-32GB": "aws_p3_16xlarge", "V100-16GB": "aws_p3_16xlarge", "H100-96GB-HBM2e": "h100_sxm",
    "H200-141GB": "h100_sxm", "B200-180GB": "b200", "B300-288GB": "b200", "GB200-186GB": "gb200_nvl72",
    "GB300-288GB": "gb200_nvl72",
}  # fmt: skip
"""The node type whose host memory for each device a row's nodes are taken to have: a reference design's."""
_JEAN_ZAY_HOST = {"A100-80GB": 64_000_000_000, "V100-32GB": 48_000_000_000}
"""Bytes for each device of bigscience's nodes (512 GB for eight, 192 GB for four; IDRIS, Jean Zay, hardware)."""


def _host_bytes(row: Row) -> float:
    """Bytes of host memory for each device of a row."""
    gpu = row["hardware"]["gpu"]
    if row["id"].startswith("bigscience"):
        return _JEAN_ZAY_HOST[gpu]
    reference = node_type(_HOSTS[gpu])
    assert reference.host_memory_bytes is not None, _HOSTS[gpu]
    return reference.host_memory_bytes / reference.devices_per_node


def cluster_of(row: Row) -> Cluster:
    """The row's machines, with the network of the vendor's reference design if no network is printed."""
    hardware = row["hardware"]
    gpu, count, per_node = hardware["gpu"], hardware["n_gpus"], hardware["gpus_per_node"]
    if gpu.startswith("GB"):
        per_node = 64  # NVLink joins the rack; 64 of its 72 devices hold powers of two
    node = assemble_node(_DEVICES[gpu], per_node, fabric=_FABRICS.get(gpu))
    node = replace(node, host_memory_bytes=round(per_node * _host_bytes(row)))
    if count <= per_node:
        return Cluster(node, 1, count)
    gbps = hardware["inter_gbps_per_gpu"]
    link = hardware["inter_link"] or ""
    network = "omni_path" if "Omni" in link else "roce_v2" if "RoCE" in link else None
    if network is None:
        network = _NETWORKS.get(gpu[:4], "infiniband_xdr800" if (gbps or 0) >= 800 else "infiniband_ndr400")
    node = node.with_network(network, bytes_per_s_per_device=None if gbps is None else gbps / 8 * 1e9)
    return Cluster(node, count // per_node, per_node)
