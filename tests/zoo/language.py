"""Models of text: decoders, mixtures of experts, state-space and recurrent models."""

from __future__ import annotations

from typing import Any

from tests.zoo.architecture import Architecture, Family
from tests.zoo.inputs import labelled_tokens, padded_tokens

DECODER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALL = {**DECODER, "head_dim": 8}
GPT: dict[str, Any] = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {
    **DECODER, **LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip


def _decoder(name: str, model: str, config: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(name, Family.DECODER, model, config, more.pop("inputs", labelled_tokens()), **more)


def _mixture(name: str, model: str, config: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(name, Family.MIXTURE, model, config, more.pop("inputs", labelled_tokens()), **more)


DECODERS = (
    _decoder("gpt2", "GPT2LMHeadModel", GPT),
    _decoder("llama", "LlamaForCausalLM", DECODER, inputs=padded_tokens()),
    _decoder("llama-odd", "LlamaForCausalLM", {
        **DECODER, "vocab_size": 67, "hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 3,
        "num_key_value_heads": 3,
    }, inputs=labelled_tokens(3, 15, 67)),
    _decoder("mistral", "MistralForCausalLM", {**DECODER, "sliding_window": 8}),
    _decoder("qwen2", "Qwen2ForCausalLM", DECODER, inputs=padded_tokens()),
    _decoder("qwen3", "Qwen3ForCausalLM", SMALL),
    _decoder("gemma", "GemmaForCausalLM", SMALL),
    _decoder("gemma2", "Gemma2ForCausalLM", {**SMALL, "sliding_window": 8}),
    _decoder("gemma3", "Gemma3ForCausalLM", {**SMALL, "sliding_window": 8}),
    _decoder("phi", "PhiForCausalLM", DECODER),
    _decoder("phi3", "Phi3ForCausalLM", DECODER),
    _decoder("opt", "OPTForCausalLM", {
        "vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 1,
    }),
    _decoder("bloom", "BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    _decoder("falcon", "FalconForCausalLM", DECODER),
    _decoder("mpt", "MptForCausalLM", {
        "vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
    }),
    _decoder("gpt_neo", "GPTNeoForCausalLM", {
        "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]], "window_size": 8, "bos_token_id": 1, "eos_token_id": 2,
    }),
    _decoder("gpt_neox", "GPTNeoXForCausalLM", DECODER),
    _decoder("gptj", "GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    _decoder("codegen", "CodeGenForCausalLM", {**GPT, "rotary_dim": 4}),
    _decoder("gpt_bigcode", "GPTBigCodeForCausalLM", GPT),
    _decoder("stablelm", "StableLmForCausalLM", DECODER),
    _decoder("starcoder2", "Starcoder2ForCausalLM", DECODER),
    _decoder("cohere", "CohereForCausalLM", DECODER),
    _decoder("cohere2", "Cohere2ForCausalLM", {**SMALL, "sliding_window": 8}),
    _decoder("olmo", "OlmoForCausalLM", DECODER),
    _decoder("olmo2", "Olmo2ForCausalLM", DECODER),
    _decoder("granite", "GraniteForCausalLM", DECODER),
    _decoder("nemotron", "NemotronForCausalLM", DECODER),
    _decoder("persimmon", "PersimmonForCausalLM", DECODER),
    _decoder("glm", "GlmForCausalLM", SMALL),
    _decoder("glm4", "Glm4ForCausalLM", SMALL),
    _decoder("smollm3", "SmolLM3ForCausalLM", DECODER),
    _decoder("exaone4", "Exaone4ForCausalLM", {**SMALL, "sliding_window": 8}),
    _decoder("helium", "HeliumForCausalLM", SMALL),
    _decoder("arcee", "ArceeForCausalLM", SMALL),
    _decoder("seed_oss", "SeedOssForCausalLM", SMALL),
    _decoder("diffllama", "DiffLlamaForCausalLM", DECODER),
    _decoder("bitnet", "BitNetForCausalLM", DECODER),
    _decoder("minicpm3", "MiniCPM3ForCausalLM", {**DECODER, **LATENT}),
    _decoder("ctrl", "CTRLLMHeadModel", {**GPT, "dff": 64}),
    _decoder("openai", "OpenAIGPTLMHeadModel", GPT),
    _decoder("biogpt", "BioGptForCausalLM", DECODER),
    _decoder("xglm", "XGLMForCausalLM", {
        "vocab_size": 64, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4,
        "max_position_embeddings": 64,
    }),
    _decoder("modernbert_decoder", "ModernBertDecoderForCausalLM", {**DECODER, "cls_token_id": 1, "sep_token_id": 2}),
)  # fmt: skip

MIXTURES = (
    _mixture("mixtral", "MixtralForCausalLM", {**DECODER, **LOCAL_EXPERTS}),
    _mixture("qwen2_moe", "Qwen2MoeForCausalLM", {**DECODER, **EXPERTS, "shared_expert_intermediate_size": 32}),
    _mixture("qwen3_moe", "Qwen3MoeForCausalLM", {**SMALL, **EXPERTS}),
    _mixture("olmoe", "OlmoeForCausalLM", {**DECODER, "num_experts": 4, "num_experts_per_tok": 2}),
    _mixture("deepseek_v2", "DeepseekV2ForCausalLM", DEEPSEEK),
    _mixture("deepseek_v3", "DeepseekV3ForCausalLM", DEEPSEEK),
    _mixture("gpt_oss", "GptOssForCausalLM", {**SMALL, **LOCAL_EXPERTS, "sliding_window": 8}),
    _mixture("granitemoe", "GraniteMoeForCausalLM", {**DECODER, **LOCAL_EXPERTS}),
    _mixture("phimoe", "PhimoeForCausalLM", {**DECODER, **LOCAL_EXPERTS}),
    _mixture("jetmoe", "JetMoeForCausalLM", {**DECODER, **LOCAL_EXPERTS, "kv_channels": 8}),
    _mixture("glm4_moe", "Glm4MoeForCausalLM", {
        **SMALL, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    }),
    _mixture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {
        **DECODER, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
    }),
    _mixture("switch_transformers", "SwitchTransformersForConditionalGeneration", {
        "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2,
        "num_heads": 4, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
        "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
    }),
    _mixture("dbrx", "DbrxForCausalLM", {
        "vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    }),
)  # fmt: skip

STATE_SPACE = tuple(
    Architecture(name, Family.STATE_SPACE, model, config, labelled_tokens())
    for name, model, config in (
        ("mamba", "MambaForCausalLM", {
            "vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4,
        }),
        ("mamba2", "Mamba2ForCausalLM", {
            "vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "num_heads": 8,
            "head_dim": 8, "n_groups": 2, "chunk_size": 8,
        }),
        ("falcon_mamba", "FalconMambaForCausalLM", {
            "vocab_size": 64, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4,
        }),
        ("bamba", "BambaForCausalLM", {
            **DECODER, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
            "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_expand": 2,
        }),
        ("jamba", "JambaForCausalLM", {
            **DECODER, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
            "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
        }),
        ("zamba2", "Zamba2ForCausalLM", {
            **DECODER, "num_key_value_heads": 4, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8,
            "mamba_ngroups": 1, "chunk_size": 8, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1,
            "use_mem_rope": True, "adapter_rank": 4,
        }),
        ("falcon_h1", "FalconH1ForCausalLM", {
            **DECODER, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
            "mamba_n_groups": 1, "mamba_chunk_size": 8,
        }),
        ("granitemoehybrid", "GraniteMoeHybridForCausalLM", {
            **DECODER, **LOCAL_EXPERTS, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8,
            "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8, "shared_intermediate_size": 32,
        }),
    )
)  # fmt: skip

RECURRENT = tuple(
    Architecture(name, Family.RECURRENT, model, config, labelled_tokens())
    for name, model, config in (
        ("recurrent_gemma", "RecurrentGemmaForCausalLM", {
            **SMALL, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8,
            "block_types": ["recurrent", "attention"],
        }),
        ("rwkv", "RwkvForCausalLM", {
            "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32,
            "intermediate_size": 64, "context_length": 64,
            "rescale_every": 0,  # else it divides its own weights in evaluation, which is refused
        }),
        ("xlstm", "xLSTMForCausalLM", {
            "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "chunk_size": 16,
            "mlstm_round_up_to_multiple_of": 8, "ffn_round_up_to_multiple_of": 8, "use_cache": False,
        }),
        ("qwen3_next", "Qwen3NextForCausalLM", {
            **SMALL, **EXPERTS, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        }),
        ("minimax", "MiniMaxForCausalLM", {
            **SMALL, **LOCAL_EXPERTS, "block_size": 8, "layer_types": ["linear_attention", "full_attention"],
        }),
        ("lfm2", "Lfm2ForCausalLM", {
            **DECODER, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"],
        }),
    )
)  # fmt: skip
