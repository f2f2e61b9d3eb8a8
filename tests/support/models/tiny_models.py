"""Configs of tiny random models, for tests that compare Baton with itself and need no oracle.

Vocabularies, widths and numbers of experts are odd, as those of published fine-tunes may be, so
that four ranks have unequal parts.
"""

from models.loader import ModelDescription, random_model

VOCAB_SIZE, HIDDEN_SIZE = 257, 72
_BASE: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 100,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "attention_bias": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

HYBRID: dict[str, object] = {
    **_BASE,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": True,
    "rope_parameters": {
        **_ROPE,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "layer_types": [
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
        "full_attention",
    ],
}
LLAMA: dict[str, object] = {
    **_BASE,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "mlp_bias": True,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rope_parameters": _ROPE,
}
GEMMA3: dict[str, object] = {
    **_BASE,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "rope_theta": 1000000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "query_pre_attn_scalar": 24,
}
GEMMA4: dict[str, object] = {
    **_BASE,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "sliding_window": 24,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "layer_types": [*("sliding_attention",) * 4, "full_attention"],
}
LLAMA4: dict[str, object] = {
    **_BASE,
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "tie_word_embeddings": False,
    "rope_parameters": _ROPE,
    "intermediate_size": 44,
    "intermediate_size_mlp": 100,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
}
QWEN3: dict[str, object] = {
    **_BASE,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "tie_word_embeddings": False,
    "rope_parameters": _ROPE,
}
GLM_DSA: dict[str, object] = {
    **_BASE,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_key_value_heads": 4,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "rope_parameters": _ROPE,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk_pattern": "FSSFS",
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 44,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

DEEPSEEK_V32: dict[str, object] = {
    **GLM_DSA,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "n_group": 2,
    "topk_group": 1,
}
DEEPSEEK_V3: dict[str, object] = {
    **DEEPSEEK_V32,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
}
_EXPERTS: dict[str, object] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 44,
}
QWEN3_MOE: dict[str, object] = {
    **QWEN3,
    **_EXPERTS,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
}
GPT_OSS: dict[str, object] = {
    **_BASE,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "intermediate_size": 44,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 30,
    "tie_word_embeddings": False,
    "rope_parameters": _ROPE,
}
MINIMAX_M2: dict[str, object] = {
    **QWEN3,
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
GLM4_MOE: dict[str, object] = {
    **QWEN3,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 44,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
}
HYBRID_MOE: dict[str, object] = {
    **HYBRID,
    **_EXPERTS,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "shared_expert_intermediate_size": 52,
}
QWEN3_NEXT: dict[str, object] = {
    **HYBRID_MOE,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "decoder_sparse_step": 2,
}
KIMI_LINEAR: dict[str, object] = {
    **_BASE,
    **_EXPERTS,
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "tie_word_embeddings": False,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": HYBRID["layer_types"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
}


def tiny(config: dict[str, object], dtype: str = "float32") -> ModelDescription:
    return random_model({**config, "torch_dtype": dtype})
