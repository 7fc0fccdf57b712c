"""Models of images, sounds and time series, and models that combine these with text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.zoo.architecture import Architecture, Family, Inputs
from tests.zoo.encoders import BART, ENCODER, T5
from tests.zoo.inputs import (
    captioned_images,
    classified_images,
    classified_waves,
    draw,
    draw_tokens,
    images,
    images_in_text,
    segmented_images,
    series,
    spectra,
)
from tests.zoo.language import DECODER, SMALL

IMAGE_TOKEN = 60

VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
CLASSES: dict[str, Any] = {"num_labels": 8}
STAGES: dict[str, Any] = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}
PYRAMID: dict[str, Any] = {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 32}
TEXT: dict[str, Any] = {**ENCODER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPEECH: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": [16, 16, 16], "conv_kernel": [8, 4, 4], "conv_stride": [4, 4, 2], "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "vocab_size": 64, "num_feat_extract_layers": 3,
}  # fmt: skip

DETECTOR: dict[str, Any] = {
    "d_model": 32, "encoder_hidden_dim": 32, "encoder_in_channels": [16, 16, 32], "decoder_in_channels": [32, 32, 32],
    "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 8, "decoder_n_points": 2, "num_denoising": 0,
    "initializer_range": 0.1,
}  # fmt: skip
"""A detector of images of 64 x 64 at strides of 8, 16 and 32. Smaller weights give queries nearly equal scores, and
rounding would decide which queries are taken. The call has no labels, because the model's own loss matches boxes on the
host with SciPy, which a trace refuses (PP-DocLayout has no loss).
"""
RESNETS: dict[str, Any] = {
    "model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
HGNET: dict[str, Any] = {
    "model_type": "hgnet_v2", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
    "stem_channels": [3, 8, 8], "stage_in_channels": [8, 8, 16, 16], "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [8, 16, 16, 32], "stage_num_blocks": [1, 1, 1, 1], "stage_numb_of_layers": [1, 1, 1, 1],
    "out_features": ["stage1", "stage2", "stage3", "stage4"], "initializer_range": 0.5,
}  # fmt: skip

SPANS: dict[str, Any] = {"apply_spec_augment": True, "mask_time_prob": 0.3, "mask_time_length": 2}
"""SpecAugment, which models of sounds use in training, on request."""


def _vision(name: str, model: str, config: dict[str, Any], **more: Any) -> Architecture:
    inputs = more.pop("inputs", classified_images())
    return Architecture(name, Family.VISION, model, {**CLASSES, **config}, inputs, **more)


def _convolutional(name: str, model: str, config: dict[str, Any], **more: Any) -> Architecture:
    inputs = more.pop("inputs", classified_images())
    return Architecture(name, Family.CONVOLUTIONAL, model, {**CLASSES, **config}, inputs, **more)


def _audio(name: str, model: str, config: dict[str, Any], **more: Any) -> Architecture:
    return Architecture(name, Family.AUDIO, model, config, more.pop("inputs", classified_waves()), **more)


def _multimodal(name: str, model: str, config: dict[str, Any], **more: Any) -> Architecture:
    inputs = more.pop("inputs", captioned_images())
    return Architecture(name, Family.MULTIMODAL, model, config, inputs, **more)


def _series(name: str, model: str, config: dict[str, Any], inputs: Any, **more: Any) -> Architecture:
    return Architecture(name, Family.TIME_SERIES, model, config, inputs, **more)


VISIONS = (
    _vision("vit", "ViTForImageClassification", VISION),
    _vision("deit", "DeiTForImageClassification", VISION),
    _vision("beit", "BeitForImageClassification", {**VISION, "use_relative_position_bias": True}),
    _vision("dinov2", "Dinov2ForImageClassification", VISION),
    _vision("dinov3_vit", "DINOv3ViTModel", VISION, inputs=images()),
    _vision("swin", "SwinForImageClassification", {**PYRAMID, "patch_size": 2}),
    _vision("swinv2", "Swinv2ForImageClassification", {**PYRAMID, "patch_size": 2}),
    _vision("segformer", "SegformerForSemanticSegmentation", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [3, 3],
        "strides": [2, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
    }, inputs=segmented_images()),
    _vision("pvt", "PvtForImageClassification", {
        "image_size": 32, "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1],
        "num_attention_heads": [2, 4, 4, 4], "mlp_ratios": [2, 2, 2, 2], "patch_sizes": [4, 2, 2, 1],
        "strides": [4, 2, 2, 1], "sequence_reduction_ratios": [2, 2, 1, 1],
    }),
    _vision("yolos", "YolosModel", {**VISION, "image_size": [32, 32], "num_detection_tokens": 4}, inputs=images()),
    _vision("dpt", "DPTForDepthEstimation", {
        **VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 32, 32],
        "fusion_hidden_size": 16, "is_hybrid": False, "reassemble_factors": [4, 2, 1, 0.5],
    }, inputs=images()),
    _vision("vit_mae", "ViTMAEForPreTraining", {
        **VISION, "decoder_hidden_size": 32, "decoder_intermediate_size": 64, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 4,
    }, inputs=lambda model: {**images()(model), "noise": draw(4, 16)}),
    _vision("videomae", "VideoMAEForVideoClassification", {**VISION, "num_frames": 4, "tubelet_size": 2},
            inputs=lambda model: {"pixel_values": draw(4, 4, 3, 32, 32), "labels": torch.arange(4)}),
    _vision("timesformer", "TimesformerForVideoClassification", {**VISION, "num_frames": 2},
            inputs=lambda model: {"pixel_values": draw(4, 2, 3, 32, 32), "labels": torch.arange(4)}),
    _vision("vivit", "VivitForVideoClassification", {**VISION, "num_frames": 4, "tubelet_size": [2, 8, 8]},
            inputs=lambda model: {"pixel_values": draw(4, 4, 3, 32, 32), "labels": torch.arange(4)}),
    _vision("hiera", "HieraForImageClassification", {
        "image_size": [32, 32], "patch_size": [7, 7], "patch_stride": [4, 4], "patch_padding": [3, 3], "embed_dim": 16,
        "depths": [1, 1], "num_heads": [2, 4], "masked_unit_size": [4, 4], "num_query_pool": 1, "query_stride": [2, 2],
    }),
    _vision("sam", "SamModel", {
        "vision_config": {**VISION, "mlp_dim": 64, "output_channels": 16, "global_attn_indexes": [1], "window_size": 2,
                          "num_pos_feats": 8},
        "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 8},
        "mask_decoder_config": {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                                "iou_head_hidden_dim": 16},
    }, inputs=lambda model: {**images(batch=2)(model), "input_points": draw(2, 1, 2, 2)}),
    _vision("detr", "DetrModel", {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 8,
        "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
        "backbone_config": {"model_type": "resnet", **STAGES, "out_features": ["stage2"]},
    }, inputs=images(64), rate=1e-4),
    _vision("rt_detr", "RTDetrForObjectDetection", {**DETECTOR, "backbone_config": RESNETS}, inputs=images(64),
            has_loss=False),
    _vision("rt_detr_v2", "RTDetrV2ForObjectDetection", {**DETECTOR, "backbone_config": RESNETS}, inputs=images(64),
            has_loss=False),
    _vision("pp_doclayout_v3", "PPDocLayoutV3ForObjectDetection", {
        **DETECTOR, "backbone_config": HGNET, "mask_feature_channels": [16, 16], "x4_feat_dim": 8, "num_prototypes": 8,
        "global_pointer_head_size": 8, "feat_strides": [8, 16, 32],
    }, inputs=images(64), has_loss=False),
    _vision("imagegpt", "ImageGPTForCausalImageModeling", {
        "vocab_size": 65, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
    }, inputs=lambda model: {"input_ids": draw_tokens(), "labels": draw_tokens()}),
    _vision("poolformer", "PoolFormerForImageClassification", {
        "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "patch_sizes": [3, 3, 3, 3],
        "strides": [2, 2, 2, 1], "padding": [1, 1, 1, 1],
    }),
    _vision("mobilevit", "MobileViTForImageClassification", {
        "image_size": 64, "hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
        "num_attention_heads": 4,
    }, inputs=classified_images(size=64)),
    _vision("cvt", "CvtForImageClassification", {
        "patch_sizes": [3, 3, 3], "patch_stride": [2, 2, 2], "embed_dim": [16, 16, 32], "num_heads": [2, 2, 4],
        "depth": [1, 2, 3],
    }),
)  # fmt: skip

CONVOLUTIONALS = (
    _convolutional("resnet", "ResNetForImageClassification", STAGES),
    _convolutional("resnet-training", "ResNetForImageClassification", STAGES),
    _convolutional("convnext", "ConvNextForImageClassification", {**STAGES, "num_stages": 2}),
    _convolutional("convnextv2", "ConvNextV2ForImageClassification", {**STAGES, "num_stages": 2}),
    _convolutional("regnet", "RegNetForImageClassification", {**STAGES, "groups_width": 8}),
    _convolutional("mobilenet_v1", "MobileNetV1ForImageClassification", {
        "depth_multiplier": 0.25, "min_depth": 8,
    }, rate=1e-6),
    _convolutional("mobilenet_v2", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.25}, rate=1e-8),
    _convolutional("efficientnet", "EfficientNetForImageClassification", {
        "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "image_size": 32,
    }),
    _convolutional("bit", "BitForImageClassification", {**STAGES, "num_groups": 4}),
    _convolutional("focalnet", "FocalNetForImageClassification", {
        "image_size": 32, "embed_dim": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "focal_levels": [2, 2],
        "focal_windows": [3, 3],
    }),
    _convolutional("levit", "LevitForImageClassification", {
        "image_size": 64, "hidden_sizes": [32, 32, 64], "num_attention_heads": [2, 2, 4], "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
    }, inputs=classified_images(size=64), rate=1e-7),
    _convolutional("swiftformer", "SwiftFormerForImageClassification", {
        "image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 32],
    }, inputs=classified_images(size=64)),
    _convolutional("upernet", "UperNetForSemanticSegmentation", {
        "hidden_size": 16, "pool_scales": [1, 2], "auxiliary_in_channels": 16, "auxiliary_channels": 8,
        "use_auxiliary_head": True, "use_timm_backbone": False,
        "backbone_config": {"model_type": "resnet", **STAGES, "depths": [1, 1, 1, 1],
                            "hidden_sizes": [8, 8, 16, 16], "out_features": ["stage1", "stage2", "stage3", "stage4"]},
    }, inputs=segmented_images(size=64)),
)  # fmt: skip

AUDIOS = (
    _audio("whisper", "WhisperForConditionalGeneration", {
        **BART, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32, "pad_token_id": 1,
    }, inputs=spectra(16, 32)),
    _audio("wav2vec2", "Wav2Vec2ForSequenceClassification", {**SPEECH, **SPANS}),
    _audio("wav2vec2-ctc", "Wav2Vec2ForCTC", {**SPEECH, "ctc_loss_reduction": "mean", "ctc_zero_infinity": True},
           inputs=lambda model: {**classified_waves()(model), "labels": draw_tokens(length=4)}),
    _audio("hubert", "HubertForSequenceClassification", {**SPEECH, **SPANS}),
    _audio("hubert-ctc", "HubertForCTC", {**SPEECH, **SPANS, "ctc_loss_reduction": "mean", "ctc_zero_infinity": True},
           inputs=lambda model: {**_padded_waves(), "labels": draw_tokens(length=4)}),
    _audio("wavlm", "WavLMForSequenceClassification", SPEECH),
    _audio("wavlm-padded", "WavLMForSequenceClassification", {**SPEECH, **SPANS},
           inputs=lambda model: {**_padded_waves(), "labels": torch.arange(4) % 2}),
    _audio("unispeech", "UniSpeechForSequenceClassification", {**SPEECH, "num_ctc_classes": 64}),
    _audio("sew", "SEWForSequenceClassification", {**SPEECH, "squeeze_factor": 2}),
    _audio("data2vec-audio", "Data2VecAudioForSequenceClassification", {**SPEECH, "conv_pos_kernel_size": 3}),
    _audio("wav2vec2_bert", "Wav2Vec2BertForSequenceClassification", {
        **SPEECH, "feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3,
    }, inputs=lambda model: {"input_features": draw(4, 16, 16), "labels": torch.arange(4) % 2}),
    _audio("wav2vec2_conformer", "Wav2Vec2ConformerForSequenceClassification", {
        **SPEECH, "conv_depthwise_kernel_size": 3,
    }),
    _audio("audio_spectrogram_transformer", "ASTForAudioClassification", {
        **VISION, "patch_size": 8, "frequency_stride": 8, "time_stride": 8, "max_length": 32, "num_mel_bins": 16,
    }, inputs=lambda model: {"input_values": draw(4, 32, 16), "labels": torch.arange(4) % 2}),
    _audio("speech_to_text", "Speech2TextForConditionalGeneration", {
        **BART, "input_feat_per_channel": 16, "conv_channels": 32, "max_source_positions": 64,
        "max_target_positions": 64,
    }, inputs=lambda model: {"input_features": draw(4, 32, 16), "labels": draw_tokens(length=8)}),
    _audio("speecht5", "SpeechT5ForSpeechToText", {
        **{key: value for key, value in SPEECH.items() if not key.startswith("num_hidden")}, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
    }, inputs=lambda model: {"input_values": draw(4, 800), "labels": draw_tokens(length=8)}),
    _audio("moonshine", "MoonshineForConditionalGeneration", {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
        "max_position_embeddings": 64, "pad_token_id": 0,
    }, inputs=lambda model: {"input_values": draw(4, 4000), "labels": draw_tokens(length=8)}),
    _audio("encodec", "EncodecModel", {
        "hidden_size": 16, "num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 16, "codebook_dim": 16,
        "num_lstm_layers": 1, "target_bandwidths": [24.0],
    }, inputs=lambda model: {"input_values": draw(4, 1, 320)}),
    _audio("dac", "DacModel", {
        "encoder_hidden_size": 8, "decoder_hidden_size": 16, "downsampling_ratios": [2, 2],
        "upsampling_ratios": [2, 2], "n_codebooks": 2, "codebook_size": 16, "codebook_dim": 4,
    }, inputs=lambda model: {"input_values": draw(4, 1, 64)}),
    _audio("musicgen", "MusicgenForCausalLM", {
        "vocab_size": 64, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_codebooks": 2, "pad_token_id": 0, "max_position_embeddings": 64,
    }, inputs=lambda model: {"input_ids": draw_tokens(8), "labels": draw_tokens(4, 32).view(4, 16, 2)}),
)  # fmt: skip


def _boxed_tokens(model: nn.Module) -> Inputs:
    """Tokens with labels, and a box on the page for each."""
    corner = torch.arange(4 * 16).view(4, 16, 1) % 50
    boxes = torch.cat([corner, corner + 2, corner + 8, corner + 12], dim=-1)
    tokens = draw_tokens()
    return {"input_ids": tokens, "bbox": boxes, "labels": tokens.clone()}


def _visual_tokens(model: nn.Module) -> Inputs:
    return {
        "input_ids": draw_tokens(), "visual_embeds": draw(4, 4, 32), "labels": draw_tokens(length=20),
        "attention_mask": torch.ones(4, 16, dtype=torch.int64), "sentence_image_labels": torch.arange(4) % 2,
        "visual_attention_mask": torch.ones(4, 4, dtype=torch.int64),
    }  # fmt: skip


MULTIMODALS = (
    _multimodal("clip", "CLIPModel", {
        "text_config": TEXT, "vision_config": VISION, "projection_dim": 32,
    }, call={"return_loss": True}),
    _multimodal("siglip", "SiglipModel", {"text_config": TEXT, "vision_config": VISION}, call={"return_loss": True}),
    _multimodal("altclip", "AltCLIPModel", {
        "text_config": {**TEXT, "project_dim": 32}, "vision_config": VISION, "projection_dim": 32,
    }, call={"return_loss": True}),
    _multimodal("chinese_clip", "ChineseCLIPModel", {
        "text_config": TEXT, "vision_config": VISION, "projection_dim": 32,
    }, call={"return_loss": True}),
    _multimodal("blip", "BlipForConditionalGeneration", {
        "text_config": {**TEXT, "encoder_hidden_size": 32, "is_decoder": True}, "vision_config": VISION,
    }, inputs=lambda model: {**captioned_images()(model), "labels": draw_tokens()}),
    _multimodal("flava", "FlavaModel", {
        "text_config": ENCODER, "image_config": VISION, "multimodal_config": VISION, "hidden_size": 32,
        "projection_dim": 16,
    }, rate=1e-3),
    _multimodal("vilt", "ViltForQuestionAnswering", {**ENCODER, **VISION, "num_labels": 8},
                inputs=lambda model: {**captioned_images()(model), "labels": torch.eye(4, 8),
                                      "pixel_mask": torch.ones(4, 32, 32, dtype=torch.int64)}),
    _multimodal("git", "GitForCausalLM", {**TEXT, "vision_config": VISION},
                inputs=lambda model: {**captioned_images()(model), "labels": draw_tokens()}),
    _multimodal("llava", "LlavaForConditionalGeneration", {
        "text_config": {"model_type": "llama", **DECODER},
        "vision_config": {"model_type": "clip_vision_model", **VISION},
        "image_token_id": IMAGE_TOKEN,
    }, inputs=images_in_text(IMAGE_TOKEN, 16, length=24)),
    _multimodal("paligemma", "PaliGemmaForConditionalGeneration", {
        "text_config": {"model_type": "gemma", **SMALL},
        "vision_config": {"model_type": "siglip_vision_model", **VISION}, "image_token_id": IMAGE_TOKEN,
        "projection_dim": 32, "hidden_size": 32,
    }, inputs=images_in_text(IMAGE_TOKEN, 16, length=24, token_type_ids=torch.ones(4, 24, dtype=torch.int64))),
    _multimodal("idefics3", "Idefics3ForConditionalGeneration", {
        "text_config": {"model_type": "llama", **DECODER}, "vision_config": VISION, "image_token_id": IMAGE_TOKEN,
        "scale_factor": 2, "pad_token_id": 0,
    }, inputs=lambda model: _five_dimensional(images_in_text(IMAGE_TOKEN, 4)(model))),
    _multimodal("qwen2_vl", "Qwen2VLForConditionalGeneration", {
        "text_config": {**DECODER, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2],
                                                       "rope_theta": 10000.0}},
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2,
                          "patch_size": 4},
        "image_token_id": IMAGE_TOKEN, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63,
    }, inputs=lambda model: _patches(96)),
    _multimodal("qwen3_vl", "Qwen3VLForConditionalGeneration", {
        "text_config": {**DECODER, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                                      "mrope_section": [1, 1, 2]}},
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4,
                          "out_hidden_size": 32, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        "image_token_id": IMAGE_TOKEN, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63,
    }, inputs=lambda model: _patches(96)),
    _multimodal("hyperclovax_vision_v2", "HyperCLOVAXVisionV2ForConditionalGeneration", {
        "text_config": {**DECODER, "model_type": "hyperclovax"},
        "vision_config": {"model_type": "qwen2_5_vl_vision", "depth": 2, "hidden_size": 32, "intermediate_size": 64,
                          "num_heads": 4, "patch_size": 4, "out_hidden_size": 32, "fullatt_block_indexes": [1],
                          "window_size": 8},
        "image_token_id": IMAGE_TOKEN, "video_token_id": 61,
    }, inputs=lambda model: {key: x for key, x in _patches(96).items() if key != "mm_token_type_ids"}),
    _multimodal("higgs_audio_v2", "HiggsAudioV2ForConditionalGeneration", {
        **DECODER, "pad_token_id": 0, "head_dim": 8, "num_codebooks": 2, "codebook_size": 16,
        "audio_token_id": 60, "audio_delay_token_id": 61, "audio_bos_token_id": 62,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }, inputs=lambda model: _spoken_tokens()),
    _multimodal("layoutlm", "LayoutLMForMaskedLM", {**ENCODER, "max_2d_position_embeddings": 128},
                inputs=_boxed_tokens),
    _multimodal("lilt", "LiltForTokenClassification", {
        **ENCODER, "hidden_size": 48, "max_2d_position_embeddings": 128, "num_labels": 64,
    }, inputs=_boxed_tokens),
    _multimodal("visual_bert", "VisualBertForPreTraining", {**ENCODER, "visual_embedding_dim": 32},
                inputs=_visual_tokens),
    _multimodal("lxmert", "LxmertModel", {
        **ENCODER, "l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16,
    }, inputs=lambda model: {"input_ids": draw_tokens(), "visual_feats": draw(4, 4, 16),
                             "visual_pos": draw(4, 4, 4)}),
    _multimodal("clap", "ClapTextModelWithProjection", {**TEXT, "projection_dim": 16},
                inputs=lambda model: {"input_ids": draw_tokens()}),
    _multimodal("owlvit", "OwlViTModel", {
        "text_config": {**TEXT, "max_position_embeddings": 16}, "vision_config": VISION, "projection_dim": 16,
    }, call={"return_loss": True}),
    _multimodal("groupvit", "GroupViTModel", {
        "text_config": TEXT, "projection_dim": 16, "projection_intermediate_dim": 32,
        "vision_config": {**VISION, "depths": [1, 1], "num_group_tokens": [8, 4], "num_output_groups": [8, 4]},
    }, call={"return_loss": True}),
    _multimodal("clipseg", "CLIPSegModel", {
        "text_config": TEXT, "vision_config": VISION, "projection_dim": 16,
    }, call={"return_loss": True}),
    _multimodal("perceiver", "PerceiverForMaskedLM", {
        "vocab_size": 64, "d_model": 32, "d_latents": 32, "num_latents": 8, "num_blocks": 1,
        "num_self_attends_per_block": 2, "num_self_attention_heads": 4, "num_cross_attention_heads": 4,
        "max_position_embeddings": 16, "qk_channels": 32, "v_channels": 32,
    }, inputs=lambda model: {"inputs": draw_tokens(), "labels": draw_tokens()}),
    _multimodal("vision_encoder_decoder-trocr", "TrOCRForCausalLM", {
        "vocab_size": 64, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
    }, inputs=lambda model: {"input_ids": draw_tokens(), "labels": draw_tokens()}),
    _multimodal("pix2struct", "Pix2StructForConditionalGeneration", {
        "text_config": {**T5, "hidden_size": 32, "num_layers": 2, "d_kv": 8, "d_ff": 64, "num_heads": 4},
        "vision_config": {**VISION, "patch_embed_hidden_size": 48, "d_ff": 64, "d_kv": 8, "seq_len": 16},
    }, inputs=lambda model: {"flattened_patches": draw(4, 16, 50).abs(), "labels": draw_tokens(length=8)}),
)  # fmt: skip

TIME_SERIES = (
    _series("patchtst", "PatchTSTForPrediction", {
        "num_input_channels": 4, "context_length": 32, "prediction_length": 8, "patch_length": 4, "patch_stride": 4,
        "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64,
    }, series(32, 4, 8)),
    _series("patchtsmixer", "PatchTSMixerForPrediction", {
        "num_input_channels": 4, "context_length": 32, "prediction_length": 8, "patch_length": 4, "patch_stride": 4,
        "d_model": 16, "num_layers": 2,
    }, series(32, 4, 8)),
    _series("decision_transformer", "DecisionTransformerModel", {
        "state_dim": 8, "act_dim": 4, "hidden_size": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "max_ep_len": 32, "vocab_size": 1,
    }, lambda model: {
        "states": draw(4, 8, 8), "actions": draw(4, 8, 4), "rewards": draw(4, 8, 1),
        "returns_to_go": draw(4, 8, 1), "timesteps": torch.arange(8).expand(4, 8).clone(),
    }),
    _series("time_series_transformer", "TimeSeriesTransformerForPrediction", {
        "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1,
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    }, lambda model: {
        "past_values": draw(4, 10), "past_time_features": draw(4, 10, 1), "past_observed_mask": torch.ones(4, 10),
        "future_values": draw(4, 4), "future_time_features": draw(4, 4, 1),
    }),
)  # fmt: skip


def _five_dimensional(inputs: Inputs) -> Inputs:
    """Inputs whose images have a dim for the one image of each text."""
    return {**inputs, "pixel_values": inputs["pixel_values"][:, None]}


def _padded_waves() -> Inputs:
    """Four sounds, of which the mask shortens one."""
    mask = torch.ones(4, 800, dtype=torch.int64)
    mask[1, 600:] = 0
    return {"input_values": draw(4, 800), "attention_mask": mask}


def _spoken_tokens() -> Inputs:
    """Four texts, each with a sound of four frames of two codes. The second text leaves out the last frame."""
    tokens, codes = draw_tokens(vocabulary=56), draw_tokens(4, 8, 16).view(4, 4, 2)
    tokens[:, 3:7] = IMAGE_TOKEN
    tokens[1, 6] = 5
    is_heard = torch.ones(4, 4, dtype=torch.bool)
    is_heard[1, 3] = False
    return {
        "input_ids": tokens, "audio_input_ids": codes, "audio_input_ids_mask": is_heard, "audio_labels": codes.clone(),
    }  # fmt: skip


def _patches(width: int) -> Inputs:
    """Four texts, each with an image of 4 x 4 patches that are merged 2 x 2."""
    tokens = draw_tokens(vocabulary=56)
    tokens[:, 1], tokens[:, 2:6], tokens[:, 6] = 62, IMAGE_TOKEN, 63
    return {
        "input_ids": tokens, "labels": tokens.clone(), "pixel_values": draw(64, width),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 4), "mm_token_type_ids": (tokens == IMAGE_TOKEN).long(),
    }  # fmt: skip
