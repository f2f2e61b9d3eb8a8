"""config.json of a GGUF file: the fields of transformers' class of the same architecture.

Keys are those of llama.cpp's converter (gguf.constants); what it leaves out is what the architecture
fixes, as Gemma's query scale.
"""

from collections.abc import Callable, Mapping

import numpy as np

from runtime.gguf.metadata import GgufMetadata, refused

ConfigFields = dict[str, object]
# Llama 3's scaling of rope, which llama.cpp stores as factors of the frequencies alone. The published
# models differ in `factor`.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3_FACTORS = (8.0, 32.0)
_GEMMA3_PATTERN = 6  # every sixth layer sees all positions
_GEMMA3_LOCAL_BASE = 10_000.0
_GEMMA3_27B_LAYERS = 62


def config_of(
    metadata: GgufMetadata,
    vocab_size: int,
    tensors: frozenset[str],
    rope_factors: np.ndarray | None,
) -> ConfigFields:
    """Return the content of config.json, without the dtype.

    `rope_factors`: the tensor rope_freqs.weight, float32, one per pair of a head.

    Raises:
        ConfigError: the architecture is not supported, or a key is absent or has no known meaning.
    """
    make = _ARCHITECTURES.get(metadata.architecture)
    if make is None:
        raise refused(
            f"architecture {metadata.architecture!r} is not supported; supported are "
            f"{', '.join(sorted(_ARCHITECTURES))}"
        )
    fields = _common(metadata, vocab_size) | make(metadata)
    fields["tie_word_embeddings"] = "output.weight" not in tensors
    if "attention_bias" in fields:
        fields["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if "mlp_bias" in fields:
        fields["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if rope_factors is not None:
        fields["rope_parameters"] = _llama3(fields, rope_factors)
    return fields


def _common(metadata: GgufMetadata, vocab_size: int) -> ConfigFields:
    hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", hidden // heads)
    if metadata.count("rope.dimension_count", head_dim) != head_dim:
        raise refused("rope on a part of a head is not supported")
    if metadata.count("attention.value_length", head_dim) != head_dim:
        raise refused("keys and values of different lengths are not supported")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": metadata.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": _shortest(metadata.number("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(metadata),
    }


def _rope(metadata: GgufMetadata) -> ConfigFields:
    theta = _shortest(metadata.number("rope.freq_base", 10_000.0))
    kind = metadata.optional(f"{metadata.architecture}.rope.scaling.type") or "none"
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = metadata.number("rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        length = metadata.count("rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": length,
        }
    raise refused(f"rope scaling {kind!r} is not supported; supported are none, linear and yarn")


def _llama3(fields: ConfigFields, factors: np.ndarray) -> ConfigFields:
    """Return Llama 3's scaling that gives these factors of the wavelengths.

    Raises:
        ConfigError: no published one does.
    """
    rope = fields["rope_parameters"]
    head_dim = fields["head_dim"]
    assert isinstance(rope, dict)
    assert isinstance(head_dim, int)
    theta = float(rope["rope_theta"])
    for factor in _LLAMA3_FACTORS:
        if factors.shape == (head_dim // 2,) and np.allclose(
            factors, _llama3_factors(theta, head_dim, factor), rtol=1e-4
        ):
            return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}
    raise refused("rope_freqs.weight is not one of Llama 3's scalings")


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Return wavelengths after over before the scaling, by Llama 3's rule (transformers'
    `_compute_llama3_parameters`): long ones times `factor`, short ones as they are, smoothly between.
    """
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    length = _LLAMA3["original_max_position_embeddings"]
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((length / wavelength - low) / (high - low), 0.0, 1.0)
    scaled: np.ndarray = 1.0 / ((1.0 - smooth) / factor + smooth)
    return scaled


def _shortest(value: float) -> float:
    """Return the shortest decimal of a float32: 1e-05, which the file has as 9.9999997e-06."""
    return float(str(np.float32(value)))


def _dense(metadata: GgufMetadata) -> ConfigFields:
    return {"intermediate_size": metadata.count("feed_forward_length"), "hidden_act": "silu"}


def _llama(metadata: GgufMetadata) -> ConfigFields:
    if metadata.has("expert_count"):
        raise refused("Llama with experts (Mixtral) is not supported")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        **_dense(metadata),
    }


def _qwen2(metadata: GgufMetadata) -> ConfigFields:
    return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_dense(metadata)}


def _qwen3(metadata: GgufMetadata) -> ConfigFields:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        **_dense(metadata),
    }


def _experts(metadata: GgufMetadata) -> ConfigFields:
    return {
        "hidden_act": "silu",
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2moe(metadata: GgufMetadata) -> ConfigFields:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "intermediate_size": metadata.count("feed_forward_length"),
        "shared_expert_intermediate_size": metadata.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        **_experts(metadata),
    }


def _qwen3moe(metadata: GgufMetadata) -> ConfigFields:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": metadata.count("feed_forward_length"),
        "attention_bias": False,
        "norm_topk_prob": True,
        **_experts(metadata),
    }


def _gemma3(metadata: GgufMetadata) -> ConfigFields:
    layers = metadata.count("block_count")
    heads, head_dim = metadata.count("attention.head_count"), metadata.count("attention.key_length")
    is_27b = layers == _GEMMA3_27B_LAYERS
    full = _rope(metadata)
    local = {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_BASE}
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "intermediate_size": metadata.count("feed_forward_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": metadata.count("embedding_length") // heads
        if is_27b
        else head_dim,
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (index + 1) % _GEMMA3_PATTERN else "full_attention"
            for index in range(layers)
        ],
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }


_ARCHITECTURES: Mapping[str, Callable[[GgufMetadata], ConfigFields]] = {
    "gemma3": _gemma3,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
}
