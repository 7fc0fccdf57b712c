"""Plan the training of Llama-3 8B on 64 H100s, on a laptop, in bfloat16 over float32 master weights.

The model lives on the meta device.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard

LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    use_cache=False,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64, help="sequences per step over the whole cluster")
    parser.add_argument("--length", type=int, default=8192, help="tokens per sequence")
    parser.add_argument("--layers", type=int, default=32, help="fewer layers plan faster")
    options = parser.parse_args()

    LLAMA_3_8B.num_hidden_layers = options.layers
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA_3_8B)
        tokens = torch.zeros(options.batch, options.length, dtype=torch.int64)

    cluster = autoshard.Cluster("h100_sxm", nodes=8, devices_per_node=8)
    inputs = {"input_ids": tokens, "labels": tokens}
    print(autoshard.plan(model, cluster, example_inputs=inputs, optimizer="adamw"))


if __name__ == "__main__":
    main()
