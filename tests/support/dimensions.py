"""Small dimensions for the configs of all model types: by the names of fields, and by model type."""

from typing import Any

# One set of small dimensions, by the names configs give them. Six query heads, in three groups where there are groups.
_SAME = {
    48: "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size encoder_embed_dim attention_hidden_size "
    "projection_dim word_embed_proj_dim encoder_hidden_size decoder_hidden_size d_embed text_hidden_size "
    "hidden_dim_size lang_dim qkv_dim all_head_size ",
    6: "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads",
    3: "num_key_value_heads num_kv_heads n_head_kv encoder_num_key_value_heads decoder_num_key_value_heads",
    8: "head_dim d_kv attention_head_dim kv_channels attention_head_size v_head_dim qk_nope_head_dim index_head_dim",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim ffn_hidden_size d_inner "
    "dim_feedforward encoder_intermediate_size decoder_intermediate_size mlp_dim filter_size "
    "max_position_embeddings n_positions max_seq_len max_source_positions max_target_positions",
    1.5: "attn_logit_softcapping",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers depth num_experts_per_tok moe_top_k "
    "num_experts_per_token moe_topk moe_k eos_token_id decoder_start_token_id sep_token_id",
    100: "vocab_size vocab_size_per_layer_input",
    16: "image_size hidden_size_per_layer_input q_lora_rank kv_lora_rank moe_intermediate_size "
    "shared_expert_intermediate_size num_mel_bins vq_embed_dim shared_intermediate_size "
    "moe_shared_expert_intermediate_size linear_key_head_dim "
    "linear_value_head_dim mamba_d_state ssm_state_size state_size",
    4: "patch_size num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim rotary_dim "
    "linear_num_key_heads linear_num_value_heads",
    1: "n_group topk_group n_shared_experts bos_token_id cls_token_id ",
    0: "pad_token_id",
    99: "image_token_id image_token_index",
    98: "video_token_id video_token_index audio_token_id audio_token_index",
    97: "vision_start_token_id boi_token_id boi_token_index",
    96: "vision_end_token_id eoi_token_id eoi_token_index",
}
OFTEN_NONE = ("pad_token_id", "num_key_value_heads", "decoder_start_token_id", "head_dim", "vocab_size")
SMALL = {name: value for value, names in _SAME.items() for name in names.split()}

# Tried in order, each on top of the small dimensions, until a model can be built and a batch fits it: as it is; every
# head its own keys; four layers, of which hybrids have one with attention; larger images; three axes of positions.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {name: 6 for name in SMALL if SMALL[name] == 3},
    {"num_hidden_layers": 4},
    {"num_hidden_layers": 4, "num_key_value_heads": 6},
    {"image_size": 64},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
)

# Dimensions that several types share.
_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4}
_WINDOWS = {"depths": [2, 2], "num_heads": [3, 6], "window_size": 2}
_SWIN = _WINDOWS | {"model_type": "swin", "image_size": 32, "patch_size": 2, "embed_dim": 12}
_PYRAMID = {
    "backbone_config": _SWIN
    | {"depths": [1] * 4, "num_heads": [3] * 4, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
    "num_queries": 5,
}
_LEVELS = {
    **{"backbone_config": _RESNET | {"model_type": "rt_detr_resnet", "out_features": ["stage2", "stage3", "stage4"]}},
    **{"encoder_in_channels": [8] * 3, "encoder_hidden_dim": 48, "decoder_in_channels": [48] * 3, "num_queries": 5},
}
_DETR = {"use_timm_backbone": False, "backbone": None, "backbone_config": _RESNET | {"out_features": ["stage4"]}}
_GROUNDED = {
    "backbone_config": _SWIN
    | {"depths": [1] * 3, "num_heads": [3] * 3, "patch_size": 4, "out_features": ["stage2", "stage3"]},
    "d_model": 96,
    "encoder_ffn_dim": 96,
    "num_queries": 5,
    "num_feature_levels": 3,
}
_BOXES = {"coordinate_size": 8, "shape_size": 8, "input_size": 16}
_SEGMENT = {
    "vision_config": {"output_channels": 48, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 24},
    "mask_decoder_config": {"iou_head_hidden_dim": 16},
}
_HIERA = {
    **{"model_type": "sam2_hiera_det_model", "hidden_size": 12, "num_attention_heads": 1},
    **{"embed_dim_per_stage": [12, 24, 48], "num_attention_heads_per_stage": [2, 4, 6], "blocks_per_stage": [1, 1, 2]},
    **{"window_size_per_stage": [2, 2, 2], "window_positional_embedding_background_size": [2, 2]},
    **{"num_query_pool_stages": 2, "global_attention_blocks": [3], "image_size": [64, 64]},
}
_HIERA_TOWER = {
    **{"backbone_config": _HIERA, "backbone_channel_list": [48, 24, 12]},
    **{"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]], "fpn_hidden_size": 48, "fpn_top_down_levels": [1, 2]},
    **{"num_feature_levels": 3},
}
_VQ = {"base_channels": 32, "num_res_blocks": 1, "channel_multiplier": [1, 1], "resolution": 16, "num_embeddings": 64}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ROPE_BY_LAYER = {"full_attention": _ROPE, "sliding_attention": _ROPE}
_EFFICIENT = {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 48, "image_size": 64}
_FPN = {"vision_config": {"fpn_hidden_size": 48, "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}}
_SERIES = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2, 3], "num_time_features": 2}

# What these cannot say: dimensions of its own, and the class to take.
OVERRIDES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "autoformer": _SERIES | {"label_length": 4, "moving_average": 3},
    "bit": {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4, "num_groups": 4},
    "blip-2": {"image_token_index": 99},
    "bridgetower": {"hidden_size": 192, "text_config": {"hidden_size": 192}, "vision_config": {"hidden_size": 192}},
    "bros": {"hidden_size": 192},
    "clap": {
        "audio_config": _WINDOWS
        | {
            **{"spec_size": 16, "num_mel_bins": 16, "patch_embeds_hidden_size": 24, "patch_stride": [4, 4]},
            **{"hidden_size": 48},
        }
    },
    "conditional_detr": _DETR,
    "d_fine": _LEVELS,
    "dab-detr": _DETR,
    "deformable_detr": _DETR | {"d_model": 96},
    "detr": _DETR,
    "donut-swin": _WINDOWS,
    "florence2": {
        "vision_config": {"depths": [1, 1], "embed_dim": [12, 24], "num_heads": [3, 6], "num_groups": [3, 6]}
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "grounding-dino": _GROUNDED,
    "idefics2": {"perceiver_config": {"resampler_n_heads": 6, "resampler_head_dim": 8, "resampler_n_latents": 4}},
    "informer": _SERIES,
    "kosmos-2": {"text_config": {"layers": 2, "attention_heads": 6}, "latent_query_num": 4},
    "instructblip": {"image_token_index": 99},
    "internvl": {"vision_config": {"patch_size": [4, 4]}},
    "layoutlmv3": _BOXES,
    "levit": {
        **{"hidden_sizes": [24, 32, 48], "depths": [1] * 3, "key_dim": [8] * 3, "num_attention_heads": [3, 4, 6]},
        **{"image_size": 64, "patch_size": 16},
    },
    "lxmert": {"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16},
    "mask2former": _PYRAMID
    | {"feature_size": 96, "mask_feature_size": 96, "hidden_dim": 96, "encoder_feedforward_dim": 64},
    "mm-grounding-dino": _GROUNDED,
    "mobilebert": {"embedding_size": 128, "hidden_size": 48, "intra_bottleneck_size": 48, "true_hidden_size": 48},
    "mobilevit": {"image_size": 64},
    "mobilevitv2": {"image_size": 128},
    "oneformer": _PYRAMID
    | {
        **{"conv_dim": 96, "mask_dim": 96, "hidden_dim": 96, "encoder_feedforward_dim": 64, "text_encoder_width": 96},
        **{"text_encoder_num_layers": 1},
    },
    "perceiver": {
        **{"num_latents": 8, "d_latents": 48, "num_self_attends_per_block": 2, "num_self_attention_heads": 6},
        **{"num_cross_attention_heads": 6, "qk_channels": 48, "v_channels": 48},
    },
    "reformer": {
        **{"axial_pos_embds_dim": [24, 24], "axial_pos_shape": [8, 8], "feed_forward_size": 64},
        **{"attn_layers": ["local", "lsh"], "num_buckets": 2, "hash_seed": 0, "is_decoder": True},
    },
    "rt_detr": _LEVELS,
    "rt_detr_v2": _LEVELS,
    "sam": _SEGMENT,
    "sam2": {
        "vision_config": _HIERA_TOWER,
        "prompt_encoder_config": {"image_size": 64, "patch_size": 16},
        "mask_decoder_config": {"iou_head_hidden_dim": 16},
    },
    "sam2_hiera_det_model": {name: value for name, value in _HIERA.items() if name != "model_type"},
    "sam2_vision_model": _HIERA_TOWER,
    "sam3": _FPN,
    "sam3_lite_text": _FPN,
    "sam3_tracker": _FPN,
    "sam_hq": _SEGMENT | {"mask_decoder_config": {"iou_head_hidden_dim": 16, "vit_dim": 48}},
    "swin": _WINDOWS,
    "swin2sr": _WINDOWS | {"patch_size": 1},
    "table-transformer": _DETR,
    "time_series_transformer": _SERIES,
    "vipllava": {"vision_feature_layers": [0, 1]},
    "vjepa2": {
        **{"crop_size": 16, "frames_per_clip": 4, "pred_hidden_size": 48, "pred_num_attention_heads": 6},
        **{"pred_num_hidden_layers": 2},
    },
    "xclip": {
        "prompt_num_attention_heads": 6,
        "vision_config": {
            **{"mit_hidden_size": 48, "mit_intermediate_size": 64, "mit_num_attention_heads": 6, "num_frames": 2},
        },
    },
    "align": {"vision_config": _EFFICIENT | {"hidden_dim": 48, "width_coefficient": 0.15}},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "chameleon": {"vocabulary_map": {"<image>": 99}, "vq_config": _VQ},
    "cohere_compass": {"text_config": {"rope_parameters": _ROPE_BY_LAYER}},
    "cohere_compass_text": {"rope_parameters": _ROPE_BY_LAYER},
    "csm": {"codec_config": {"upsample_groups": 48}, "num_codebooks": 2, "depth_decoder_config": {"num_codebooks": 2}},
    "dbrx": {"attn_config": {"kv_n_heads": 3, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deimv2": _LEVELS,
    "depth_pro": {
        **{"patch_size": 16, "intermediate_hook_ids": [1, 0], "intermediate_feature_dims": [8, 8]},
        **{"scaled_images_feature_dims": [8, 8, 8], "fusion_hidden_size": 16},
    },
    "dia": {
        "decoder_config": {
            **{"cross_num_attention_heads": 6, "cross_num_key_value_heads": 3, "cross_head_dim": 8},
            **{"cross_hidden_size": 48, "num_channels": 1},
        },
        "delay_pattern": [0],
    },
    "emu3": {
        "vocabulary_map": {"<image>": 99},
        "vq_config": {
            **{"base_channels": 32, "num_res_blocks": 1, "channel_multiplier": [1, 1], "attn_resolutions": []},
            **{"codebook_size": 64},
        },
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 12}},
    "glm4v_moe": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [0, 1, 1]}}},
    "glm4v_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [0, 1, 1]}},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 48}},
    "granite_docling": {"vision_config": {"out_hidden_size": 48}},
    "hy_v4_vl": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [0, 1, 1]}}},
    "hy_v4_vl_text": {"rope_parameters": _ROPE | {"mrope_section": [0, 1, 1]}},
    "janus": {"vision_config": {"num_image_tokens": 16}, "vq_config": _VQ},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "moonshine_streaming": {"num_key_value_heads": 6},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 48}},
    "neomme": {"head_dim": 16},
    "pocket_tts": {"flow_head_config": {"condition_dim": 48}},
    "rf_detr": {
        **{"backbone_config": {"num_windows": 2, "out_indices": [1, 2]}, "decoder_self_attention_heads": 6},
        **{"decoder_cross_attention_heads": 6, "num_queries": 5, "group_detr": 1, "d_model": 96},
    },
    "videoprism_vision_model": {
        **{"tubelet_size": [1, 4, 4], "num_spatial_layers": 2, "num_temporal_layers": 2, "num_frames": 2},
    },
    "zamba": {
        **{"num_hidden_layers": 4, "attention_hidden_size": 96, "attention_head_dim": 16},
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2},
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2},
    "zaya": {"num_experts_per_tok": 1},
    "bamba": {"mamba_n_heads": 12, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_n_heads": 12, "mamba_d_head": 8, "mamba_chunk_size": 8},
    "codegen": {"n_head": 4},
    "deepseek_v2": {"num_key_value_heads": 6, "head_dim": 4, "topk_method": "greedy", "num_experts_per_tok": 2},
    "esm": {"vocab_size": 33, "position_embedding_type": "rotary"},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 12, "mamba_d_head": 8, "layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"expert_ffn_hidden_size": 16, "num_key_value_heads": 6, "head_dim": 4},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 48},
    "mamba2": {"num_heads": 12, "n_groups": 4},
    "xmod": {"default_language": "en_XX"},
}
CLASSES: dict[str, str] = {"mgp-str": "MgpstrModel"}
