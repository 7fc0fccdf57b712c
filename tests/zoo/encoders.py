"""Text models with an encoder, some of which also have a decoder."""

from __future__ import annotations

from typing import Any

from tests.zoo.architecture import Architecture, Family
from tests.zoo.inputs import (
    bare_tokens,
    classified_tokens,
    labelled_tokens,
    padded_tokens,
    spans,
    tagged_tokens,
    translated,
)

ENCODER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
XLM: dict[str, Any] = {
    "vocab_size": 64, "n_words": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip


def _encoder(name: str, model: str, config: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(name, Family.ENCODER, model, config, more.pop("inputs", labelled_tokens()), **more)


def _pair(name: str, model: str, config: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(name, Family.ENCODER_DECODER, model, config, more.pop("inputs", translated()), **more)


ENCODERS = (
    _encoder("bert", "BertForMaskedLM", ENCODER, inputs=padded_tokens()),
    _encoder("roberta", "RobertaForTokenClassification", ENCODER, inputs=tagged_tokens()),
    _encoder("albert", "AlbertForMaskedLM", {**ENCODER, "embedding_size": 16}),
    _encoder("distilbert", "DistilBertForQuestionAnswering", {
        "vocab_size": 64, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64,
    }, inputs=spans()),
    _encoder("electra", "ElectraForSequenceClassification", {**ENCODER, "embedding_size": 16},
             inputs=classified_tokens()),
    _encoder("deberta", "DebertaForMaskedLM", {
        **ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16,
    }),
    _encoder("deberta_v2", "DebertaV2ForMaskedLM", {
        **ENCODER, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 16,
        "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True, "conv_kernel_size": 3,
    }),
    _encoder("modernbert", "ModernBertForMaskedLM", {
        **ENCODER, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8,
    }, inputs=padded_tokens()),
    _encoder("mpnet", "MPNetForMaskedLM", ENCODER),
    _encoder("fnet", "FNetForMaskedLM", ENCODER),
    _encoder("funnel", "FunnelForMaskedLM", {
        "vocab_size": 64, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1],
        "num_decoder_layers": 1,
    }),
    _encoder("convbert", "ConvBertForMaskedLM", {**ENCODER, "embedding_size": 32, "conv_kernel_size": 3}),
    _encoder("squeezebert", "SqueezeBertForMaskedLM", {**ENCODER, "embedding_size": 32}),
    _encoder("mobilebert", "MobileBertForMaskedLM", {
        **ENCODER, "embedding_size": 16, "intra_bottleneck_size": 16,
    }),
    _encoder("xlm_roberta", "XLMRobertaForMaskedLM", ENCODER),
    _encoder("camembert", "CamembertForMultipleChoice", ENCODER, inputs=lambda model: _choices()),
    _encoder("ernie", "ErnieForMaskedLM", ENCODER),
    _encoder("esm", "EsmForMaskedLM", {
        **ENCODER, "pad_token_id": 1, "mask_token_id": 3, "position_embedding_type": "rotary",
    }),
    _encoder("megatron_bert", "MegatronBertForMaskedLM", ENCODER),
    _encoder("nystromformer", "NystromformerForMaskedLM", {**ENCODER, "num_landmarks": 4, "segment_means_seq_len": 16}),
    _encoder("roformer", "RoFormerForMaskedLM", {**ENCODER, "embedding_size": 32}),
    _encoder("rembert", "RemBertForMaskedLM", {
        **ENCODER, "input_embedding_size": 16, "output_embedding_size": 16,
    }),
    _encoder("yoso", "YosoForMaskedLM", {**ENCODER, "use_expectation": True}),
    _encoder("big_bird", "BigBirdForMaskedLM", {**ENCODER, "attention_type": "block_sparse", "block_size": 4,
             "num_random_blocks": 1}, inputs=labelled_tokens(length=48)),
    _encoder("longformer", "LongformerForMaskedLM", {**ENCODER, "attention_window": [8, 8]}),
    _encoder("xlnet", "XLNetLMHeadModel", {
        "vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64,
    }),
    _encoder("xlm", "XLMWithLMHeadModel", XLM),
    _encoder("flaubert", "FlaubertWithLMHeadModel", XLM),
    _encoder("ibert", "IBertForMaskedLM", ENCODER),
    _encoder("luke", "LukeForMaskedLM", {**ENCODER, "entity_vocab_size": 16, "entity_emb_size": 16}),
    _encoder("reformer", "ReformerForMaskedLM", {
        "vocab_size": 64, "hidden_size": 32, "attention_head_size": 8, "num_attention_heads": 4,
        "feed_forward_size": 64, "attn_layers": ["local", "local"], "axial_pos_embds": False,
        "local_attn_chunk_length": 8, "max_position_embeddings": 64, "is_decoder": False,
        "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0,
    }),
    _encoder("canine", "CanineForTokenClassification", {
        **ENCODER, "num_hash_buckets": 64, "downsampling_rate": 4, "upsampling_kernel_size": 4,
        "local_transformer_stride": 8,
    }, inputs=tagged_tokens()),
    _encoder("dpr", "DPRQuestionEncoder", {**ENCODER, "projection_dim": 16}, inputs=bare_tokens()),
    _encoder("eurobert", "EuroBertForMaskedLM", {**ENCODER, "num_key_value_heads": 2, "pad_token_id": 0}),
    _encoder("nomic_bert", "NomicBertForMaskedLM", ENCODER),
)  # fmt: skip

PAIRS = (
    _pair("t5", "T5ForConditionalGeneration", T5),
    _pair("mt5", "MT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    _pair("umt5", "UMT5ForConditionalGeneration", T5),
    _pair("longt5", "LongT5ForConditionalGeneration", {**T5, "local_radius": 3, "encoder_attention_type": "local"}),
    _pair("bart", "BartForConditionalGeneration", BART),
    _pair("mbart", "MBartForConditionalGeneration", BART),
    _pair("pegasus", "PegasusForConditionalGeneration", {**BART, "pad_token_id": 0}),
    _pair("blenderbot", "BlenderbotForConditionalGeneration", BART),
    _pair("marian", "MarianMTModel", {**BART, "decoder_vocab_size": 64}),
    _pair("m2m_100", "M2M100ForConditionalGeneration", BART),
    _pair("fsmt", "FSMTForConditionalGeneration", {
        **BART, "langs": ["en", "de"], "src_vocab_size": 64, "tgt_vocab_size": 64,
    }, inputs=translated(source=12)),
    _pair("led", "LEDForConditionalGeneration", {
        **BART, "attention_window": [8, 8], "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    }),
    _pair("prophetnet", "ProphetNetForConditionalGeneration", {
        "vocab_size": 64, "hidden_size": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_encoder_layers": 2,
        "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
        "max_position_embeddings": 64, "ngram": 2, "num_buckets": 8, "relative_max_distance": 16,
    }),
    _pair("nllb_moe", "NllbMoeForConditionalGeneration", {
        **BART, "num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "expert_capacity": 16,
    }),
    _pair("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", {**BART, "attention_type": "original_full"}),
    _pair("plbart", "PLBartForConditionalGeneration", BART),
    _pair("t5gemma", "T5GemmaForConditionalGeneration", {
        side: {
            **ENCODER, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2,
        }
        for side in ("encoder", "decoder")
    } | {"vocab_size": 64}),
)  # fmt: skip


def _choices() -> dict[str, Any]:
    """Return four answers to each of four questions."""
    tokens = bare_tokens(batch=16)(None)["input_ids"]  # type: ignore[arg-type]
    return {"input_ids": tokens.view(4, 4, -1), "labels": tokens[:4, 0] % 4}
