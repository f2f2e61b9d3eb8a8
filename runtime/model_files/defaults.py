"""Fields that published config.json files leave out, with the values that transformers' config classes give them.

`tests/runtime/test_model_files.py` compares every value with those classes, and every family's decoder with what it
would be if the file stated all of them. What transformers derives from other fields (`layer_types`, `rope_parameters`
and their like) is derived by the families. `num_nextn_predict_layers` is left out on purpose: transformers ignores the
field, and a file that does not state it has no such layer.
"""

from collections.abc import Mapping

_GATED_DELTA_NET = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}
_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
}
_LLAMA4 = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
    "use_qk_norm": True, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True,
    "floor_scale": 8192,
}
_MISTRAL = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "sliding_window": 4096, "tie_word_embeddings": False,
}
_GEMMA3 = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
    "use_bidirectional_attention": False,
}
_GEMMA4 = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "sliding_window": 512,
    "tie_word_embeddings": True, "attention_k_eq_v": False, "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
}
_QWEN2 = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "use_sliding_window": False, "tie_word_embeddings": False,
}
_QWEN2_MOE = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "use_sliding_window": False, "tie_word_embeddings": False, "qkv_bias": True,
    "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "decoder_sparse_step": 1,
}
_QWEN3 = {**_QWEN2, "head_dim": 128, "attention_bias": False}
_QWEN3_MOE = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "use_sliding_window": False, "tie_word_embeddings": False, "attention_bias": False,
    "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
_QWEN3_NEXT = {
    **_GATED_DELTA_NET, "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
}
_MINIMAX_M2 = {
    "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
_GLM4_MOE = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "norm_topk_prob": True, "first_k_dense_replace": 1, "use_qk_norm": False,
}
_KIMI_LINEAR = {
    "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
    "num_attention_heads": 32, "model_max_length": 1048576, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8,
    "num_shared_experts": 1, "moe_intermediate_size": 1024, "moe_renormalize": True, "num_expert_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.446, "linear_head_dim": 128, "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
_DEEPSEEK_V3 = {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3,
}
_DEEPSEEK_V32 = {**_DEEPSEEK_V3, "max_position_embeddings": 163840, "index_topk": 2048, "index_head_dim": 128,
                 "index_n_heads": 64}
_GLM_MOE_DSA = {
    **_DEEPSEEK_V32, "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78,
    "num_attention_heads": 64, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "q_lora_rank": 2048,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1, "index_n_heads": 32,
}
_QWEN3_5 = {
    **_GATED_DELTA_NET, "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False,
}
_QWEN3_5_MOE = {
    **_GATED_DELTA_NET, "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}

# By the architecture that config.json names; wrappers have those of the text model in them.
CONFIG_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "LlamaForCausalLM": _LLAMA,
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "MistralForCausalLM": _MISTRAL,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4AssistantForCausalLM": _GEMMA4,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2MoeForCausalLM": _QWEN2_MOE,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "MiniMaxM2ForCausalLM": _MINIMAX_M2,
    "Glm4MoeForCausalLM": _GLM4_MOE,
    "KimiLinearForCausalLM": _KIMI_LINEAR,
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": _DEEPSEEK_V32,
    "GlmMoeDsaForCausalLM": _GLM_MOE_DSA,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
}

# Two names of one field: a file that states either leaves nothing out.
OTHER_NAMES: Mapping[str, str] = {
    "num_experts": "num_local_experts", "num_local_experts": "num_experts",
    "model_max_length": "max_position_embeddings", "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group", "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
