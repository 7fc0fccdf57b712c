"""Models of diffusers: denoisers of images, sounds and videos, and autoencoders."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.architecture import Architecture, Family, Inputs, Library
from tests.zoo.inputs import MakeInputs, draw

UNET: dict[str, Any] = {
    "sample_size": 16, "block_out_channels": [16, 32], "layers_per_block": 1, "norm_num_groups": 4,
    "attention_head_dim": 8,
}  # fmt: skip
CONDITIONED: dict[str, Any] = {
    **UNET, "cross_attention_dim": 16, "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
}  # fmt: skip
CODER: dict[str, Any] = {
    "block_out_channels": [16, 32], "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4,
    "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
}  # fmt: skip
TRANSFORMER: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2}


def _model(name: str, model: str, config: dict[str, Any], inputs: MakeInputs) -> Architecture:
    call = {"return_dict": False}
    return Architecture(name, Family.DIFFUSION, model, config, inputs, call=call, library=Library.DIFFUSERS)


def _steps() -> torch.Tensor:
    """The diffusion times of the four samples of a batch."""
    return torch.tensor([1, 20, 300, 900])


def _noised(*shape: int) -> MakeInputs:
    """A batch of four samples, with the diffusion time of each."""
    return lambda model: {"sample": draw(4, *shape), "timestep": _steps()}


def _sample(*shape: int) -> MakeInputs:
    """A batch for an autoencoder."""
    return lambda model: {"sample": draw(*shape)}


def _hidden(*shape: int, **more: Any) -> MakeInputs:
    """Inputs of a denoising transformer: hidden states, the time of each sample, and eight hidden states of a text."""

    def make(model: nn.Module) -> Inputs:
        states = {"hidden_states": draw(4, *shape), "timestep": _steps(), "encoder_hidden_states": draw(4, 8, 16)}
        return {**states, **more}

    return make


DIFFUSIONS = (
    _model("unet_2d", "UNet2DModel", {
        **UNET, "in_channels": 3, "out_channels": 3, "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    }, _noised(3, 16, 16)),
    _model("unet_2d_condition", "UNet2DConditionModel", {
        **CONDITIONED, "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    }, lambda model: {**_noised(4, 16, 16)(model), "encoder_hidden_states": draw(4, 8, 16)}),
    _model("controlnet", "ControlNetModel", {
        **{key: value for key, value in CONDITIONED.items() if key != "sample_size"},
        "conditioning_embedding_out_channels": [8, 16],
    }, lambda model: {
        **_noised(4, 16, 16)(model), "encoder_hidden_states": draw(4, 8, 16), "controlnet_cond": draw(4, 3, 32, 32),
    }),
    _model("unet_1d", "UNet1DModel", {
        "sample_size": 32, "in_channels": 4, "out_channels": 4, "block_out_channels": [32, 32],
        "down_block_types": ["DownBlock1DNoSkip", "AttnDownBlock1D"], "extra_in_channels": 64,
        "up_block_types": ["AttnUpBlock1D", "UpBlock1DNoSkip"], "norm_num_groups": 4,
    }, _noised(4, 32)),
    _model("unet_3d_condition", "UNet3DConditionModel", {
        **CONDITIONED, "block_out_channels": [16], "down_block_types": ["CrossAttnDownBlock3D"],
        "up_block_types": ["CrossAttnUpBlock3D"],
    }, lambda model: {**_noised(4, 2, 8, 8)(model), "encoder_hidden_states": draw(4, 8, 16)}),
    _model("unet_spatio_temporal", "UNetSpatioTemporalConditionModel", {
        "sample_size": 8, "block_out_channels": [32], "layers_per_block": 1, "cross_attention_dim": 16,
        "down_block_types": ["CrossAttnDownBlockSpatioTemporal"], "num_frames": 2,
        "up_block_types": ["CrossAttnUpBlockSpatioTemporal"], "num_attention_heads": [2],
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 24,
    }, lambda model: {
        "sample": draw(2, 2, 8, 8, 8), "timestep": _steps()[:2], "encoder_hidden_states": draw(2, 1, 16),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]] * 2),
    }),
    _model("autoencoder_kl", "AutoencoderKL", CODER, _sample(4, 3, 16, 16)),
    _model("vq_model", "VQModel", {**CODER, "num_vq_embeddings": 32, "vq_embed_dim": 4}, _sample(4, 3, 16, 16)),
    _model("autoencoder_tiny", "AutoencoderTiny", {
        "encoder_block_out_channels": [16, 16], "decoder_block_out_channels": [16, 16], "num_encoder_blocks": [1, 2],
        "num_decoder_blocks": [2, 1],
    }, _sample(4, 3, 16, 16)),
    _model("autoencoder_dc", "AutoencoderDC", {
        "latent_channels": 4, "attention_head_dim": 8, "encoder_block_types": ["ResBlock", "EfficientViTBlock"],
        "decoder_block_types": ["ResBlock", "EfficientViTBlock"], "encoder_block_out_channels": [16, 32],
        "decoder_block_out_channels": [16, 32], "encoder_layers_per_block": [1, 1],
        "decoder_layers_per_block": [1, 1], "encoder_qkv_multiscales": [[], [5]], "decoder_qkv_multiscales": [[], [5]],
    }, _sample(4, 3, 16, 16)),
    _model("autoencoder_oobleck", "AutoencoderOobleck", {
        "encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2], "decoder_channels": 8,
        "decoder_input_channels": 4,
    }, _sample(4, 2, 64)),
    _model("autoencoder_kl_cogvideox", "AutoencoderKLCogVideoX", {
        **CODER, "down_block_types": ["CogVideoXDownBlock3D"] * 2, "up_block_types": ["CogVideoXUpBlock3D"] * 2,
        "temporal_compression_ratio": 2, "sample_height": 16, "sample_width": 16,
    }, _sample(2, 3, 3, 16, 16)),
    _model("autoencoder_kl_temporal", "AutoencoderKLTemporalDecoder", {
        "block_out_channels": [32, 32], "layers_per_block": 1, "latent_channels": 4,
        "down_block_types": ["DownEncoderBlock2D"] * 2,
    }, lambda model: {"sample": draw(4, 3, 16, 16), "num_frames": 2}),
    _model("dit", "DiTTransformer2DModel", {
        **TRANSFORMER, "out_channels": 8, "sample_size": 8, "num_embeds_ada_norm": 8,
    }, lambda model: {"hidden_states": draw(4, 4, 8, 8), "timestep": _steps(), "class_labels": torch.arange(4)}),
    _model("pixart", "PixArtTransformer2DModel", {
        **TRANSFORMER, "out_channels": 8, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 16,
        "use_additional_conditions": False,
    }, _hidden(4, 8, 8, added_cond_kwargs={"resolution": None, "aspect_ratio": None})),
    _model("stable_diffusion_3", "SD3Transformer2DModel", {
        **TRANSFORMER, "sample_size": 8, "out_channels": 4, "joint_attention_dim": 16, "caption_projection_dim": 32,
        "pooled_projection_dim": 16, "pos_embed_max_size": 8, "qk_norm": "rms_norm", "dual_attention_layers": [0],
    }, lambda model: {**_hidden(4, 8, 8)(model), "pooled_projections": draw(4, 16)}),
    _model("flux", "FluxTransformer2DModel", {
        **TRANSFORMER, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 16, "pooled_projection_dim": 16,
        "axes_dims_rope": [2, 2, 4],
    }, lambda model: {
        **_hidden(16, 4)(model), "pooled_projections": draw(4, 16), "img_ids": _grid(4), "txt_ids": torch.zeros(8, 3),
    }),
    _model("sana", "SanaTransformer2DModel", {
        **TRANSFORMER, "out_channels": 4, "num_cross_attention_heads": 4, "cross_attention_head_dim": 8,
        "cross_attention_dim": 32, "caption_channels": 16, "sample_size": 8,
    }, _hidden(4, 8, 8)),
    _model("aura_flow", "AuraFlowTransformer2DModel", {
        "sample_size": 8, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
        "attention_head_dim": 8, "num_attention_heads": 4, "joint_attention_dim": 16, "caption_projection_dim": 32,
        "pos_embed_max_size": 16,
    }, _hidden(4, 8, 8)),
    _model("cogvideox", "CogVideoXTransformer3DModel", {
        **TRANSFORMER, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 16, "sample_width": 8,
        "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 8,
    }, _hidden(2, 4, 8, 8)),
    _model("wan", "WanTransformer3DModel", {
        **TRANSFORMER, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 64, "rope_max_seq_len": 32,
    }, _hidden(4, 2, 8, 8)),
    _model("stable_audio", "StableAudioDiTModel", {
        **TRANSFORMER, "sample_size": 16, "num_key_value_attention_heads": 2, "out_channels": 4,
        "cross_attention_dim": 32, "time_proj_dim": 16, "global_states_input_dim": 16, "cross_attention_input_dim": 16,
    }, lambda model: {
        **_hidden(4, 16)(model), "timestep": _steps() / 1000, "global_hidden_states": draw(4, 1, 16),
        "rotary_embedding": (draw(17, 4).cos(), draw(17, 4).sin()),
    }),
)  # fmt: skip


def _grid(side: int) -> torch.Tensor:
    """Frame, row and column of each element of a square latent image: [side * side, 3]."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([torch.zeros(side * side), rows.flatten(), columns.flatten()], dim=-1)
