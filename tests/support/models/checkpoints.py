"""Tiny random checkpoints of every family, written by transformers and remembered for the test
session.

`make_checkpoint(folder, name)` writes one; `oracle(folder)` opens it again as transformers sees it.
Vocabularies, widths and numbers of experts are odd, as those of published fine-tunes may be.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.models.tiny_models import HIDDEN_SIZE, VOCAB_SIZE

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 104,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": _ROPE,
}
_LLAMA = {**_BASE, "head_dim": 20}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_HYBRID: dict[str, Any] = {
    **_BASE,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        **_ROPE,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_SIGMOID_MOE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_HYBRID_MOE = {**_HYBRID, **_MOE, "shared_expert_intermediate_size": 56}
del _HYBRID_MOE["intermediate_size"]
_MLA: dict[str, Any] = {
    **_BASE,
    **_SIGMOID_MOE,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "routed_scaling_factor": 2.5,
}
# With few indexer heads many scores are exactly 0; transformers breaks those ties differently in
# prefill and decode.
_DSA = {**_MLA, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
_YARN_MLA = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_KIMI = {
    name: value
    for name, value in _MLA.items()
    if name not in ("rope_parameters", "q_lora_rank", "n_routed_experts", "max_position_embeddings")
} | {
    "model_max_length": 512,
    "num_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "linear_attn_config": {
        "head_dim": 16,
        "num_heads": 4,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
    },
}
_GPT_OSS: dict[str, Any] = {
    **_BASE,
    "head_dim": 20,
    "intermediate_size": 40,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 30,
    "rope_parameters": {**_YARN, "truncate": False},
}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": HIDDEN_SIZE,
    "num_position_embeddings": 16,
}
_MARKERS = {
    "image_token_id": 250,
    "video_token_id": 251,
    "vision_start_token_id": 252,
    "vision_end_token_id": 253,
}


def _text(cls: str, config_cls: str, **fields: object) -> Callable[[], PreTrainedModel]:
    return lambda: getattr(transformers, cls)(getattr(transformers, config_cls)(**fields))


_FAMILIES: Mapping[str, Callable[[], PreTrainedModel]] = {
    "llama": _text("LlamaForCausalLM", "LlamaConfig", **{**_LLAMA, "rope_parameters": _LLAMA3}),
    "llama_tied_bias": _text(
        "LlamaForCausalLM",
        "LlamaConfig",
        **_LLAMA,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama_nine_heads": _text(
        "LlamaForCausalLM",
        "LlamaConfig",
        **{**_LLAMA, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "llama_yarn": _text("LlamaForCausalLM", "LlamaConfig", **{**_LLAMA, "rope_parameters": _YARN}),
    "llama_linear": _text(
        "LlamaForCausalLM", "LlamaConfig", **{**_LLAMA, "rope_parameters": _LINEAR}
    ),
    "llama4": _text(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        **{
            **_BASE,
            "head_dim": 32,
            "intermediate_size": 40,
            "intermediate_size_mlp": 104,
            "num_local_experts": 5,
            "interleave_moe_layer_step": 2,
            "rope_parameters": _LLAMA3,
        },
    ),
    "mistral": _text(
        "MistralForCausalLM", "MistralConfig", **_BASE, head_dim=32, sliding_window=None
    ),
    "gemma3": _text(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        **{
            **_BASE,
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 24,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "rope_parameters": {
                "sliding_attention": _ROPE,
                "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
            },
        },
    ),
    "gemma4": _text(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        **{
            **_BASE,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 24,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            "rope_parameters": None,
        },
    ),
    "qwen3": _text("Qwen3ForCausalLM", "Qwen3Config", **_BASE, head_dim=32),
    "qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", **_LLAMA, tie_word_embeddings=True),
    "qwen2_moe": _text(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        **_LLAMA,
        **_MOE,
        shared_expert_intermediate_size=56,
        norm_topk_prob=False,
        mlp_only_layers=[0],
    ),
    "qwen3_moe": _text(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_BASE, **_MOE, head_dim=32, norm_topk_prob=True
    ),
    "glm4_moe": _text(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        **{
            **_BASE,
            "head_dim": 32,
            **_SIGMOID_MOE,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "minimax_m2": _text(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        **{
            **_BASE,
            "head_dim": 32,
            "intermediate_size": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "gpt_oss": _text("GptOssForCausalLM", "GptOssConfig", **_GPT_OSS),
    "qwen3_5_moe_text": _text("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", **_HYBRID_MOE),
    "qwen3_5_moe": _text(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        text_config=_HYBRID_MOE,
        vision_config=_VISION,
        **_MARKERS,
    ),
    "qwen3_next": _text(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        **{
            **_HYBRID_MOE,
            "intermediate_size": 104,
            "mlp_only_layers": [1],
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25},
        },
    ),
    "deepseek_v3": _text(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        **{**_MLA, "n_group": 2, "topk_group": 1, "rope_parameters": _YARN_MLA},
    ),
    "deepseek_v32": _text(
        "DeepseekV32ForCausalLM", "DeepseekV32Config", **_DSA, n_group=2, topk_group=1
    ),
    "glm_moe_dsa": _text(
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        **{**_DSA, "num_hidden_layers": 6, "index_topk_freq": 2, "index_skip_topk_offset": 2},
    ),
    "glm_moe_dsa_pattern": _text(
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        **{**_DSA, "num_hidden_layers": 6, "index_topk_pattern": "FSSFSF"},
    ),
    "kimi_linear": _text("KimiLinearForCausalLM", "KimiLinearConfig", **_KIMI),
    "qwen3_5_text": _text("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **_HYBRID),
    "qwen3_5": _text(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        text_config=_HYBRID,
        vision_config=_VISION,
        **_MARKERS,
    ),
}
FAMILY_NAMES = tuple(_FAMILIES)
# Families made of the layers of those above, for tests of their configs and names.
_RELATED = {
    "mixtral": _text(
        "MixtralForCausalLM",
        "MixtralConfig",
        **{**_BASE, "intermediate_size": 40, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "seed_oss": _text("SeedOssForCausalLM", "SeedOssConfig", **_LLAMA, attention_out_bias=True),
    "smollm3": _text("SmolLM3ForCausalLM", "SmolLM3Config", **_BASE),
    "glm4_moe_lite": _text(
        "Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", **{**_MLA, "n_group": 2, "topk_group": 1}
    ),
    "qwen3_vl": _text(
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        text_config={**_BASE, "head_dim": 32},
        vision_config={**_VISION, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=True,
        **_MARKERS,
    ),
    "mistral3": _text(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        text_config={
            **_BASE,
            "model_type": "mistral",
            "head_dim": 32,
            "sliding_window": None,
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "head_dim": 16,
            "image_size": 16,
            "patch_size": 4,
        },
        image_token_index=250,
    ),
}
RELATED_NAMES = tuple(_RELATED)
# Variants of families that are faster, or with other widths: blocks of 32 divide them, or experts are square.
_SHORT = {
    "glm_moe_dsa_short": _text(
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        **{**_DSA, "num_hidden_layers": 4, "index_topk_pattern": "FSSF"},
    ),
    "gpt_oss_square": _text(
        "GptOssForCausalLM", "GptOssConfig", **{**_GPT_OSS, "intermediate_size": HIDDEN_SIZE}
    ),
    "gpt_oss_blocks": _text(
        "GptOssForCausalLM",
        "GptOssConfig",
        **{**_GPT_OSS, "hidden_size": 64, "intermediate_size": 32},
    ),
}


def make_checkpoint(
    folder: Path, name: str, *, dtype: torch.dtype = torch.float32, shard_bytes: int = 0
) -> Path:
    """Write family `name` below `folder` (once) and return its folder; `shard_bytes` splits it into
    several files."""
    path = folder / f"{name}-{str(dtype).split('.')[1]}-{shard_bytes}"
    if not path.exists():
        torch.manual_seed(0)
        model = {**_FAMILIES, **_RELATED, **_SHORT}[name]()
        spread_weights(model)
        nn.Module.to(model, dtype)
        model.save_pretrained(path, max_shard_size=shard_bytes or "5GB")
        if name == "kimi_linear":
            _publish_kimi_linear(path)
    return path


def _publish_kimi_linear(path: Path) -> None:
    """Rename fields and tensors as in the published files, if transformers writes others."""
    config = json.loads((path / "config.json").read_text())
    derived = (
        "layer_types",
        "mlp_layer_types",
        "linear_head_dim",
        "linear_num_heads",
        "linear_conv_kernel_dim",
    )
    published = {
        "first_k_dense_replace": 1,
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_theta": 10000.0,
    }
    kept = {name: value for name, value in config.items() if name not in derived}
    (path / "config.json").write_text(json.dumps({**kept, **published}))
    dense = "layers.0.block_sparse_moe."
    tensors = {
        key.replace(dense, "layers.0.mlp."): tensor
        for key, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def add_nextn(source: Path, path: Path, **fields: object) -> Path:
    """Write checkpoint `source` to `path` with NextN layers after the last one, under their public
    names, and `fields` in its config: one, or as many as `num_nextn_predict_layers` says.

    transformers has no such layer; these have the shapes of the last layer with experts and their
    own parts.
    """
    path.mkdir()
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    dtype = tensors["model.norm.weight"].dtype
    num_layers = fields.setdefault("num_nextn_predict_layers", 1)
    assert isinstance(num_layers, int)
    hidden, like = config["hidden_size"], _last_whole_layer(tensors)
    parts = {
        key.removeprefix(like): tensor.shape
        for key, tensor in tensors.items()
        if key.startswith(like)
    }
    parts |= {
        f"{part}.weight": torch.Size([hidden]) for part in ("enorm", "hnorm", "shared_head.norm")
    }
    parts["eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    generator = torch.Generator().manual_seed(5)
    for layer_id in range(config["num_hidden_layers"], config["num_hidden_layers"] + num_layers):
        own = f"model.layers.{layer_id}."
        for part, shape in parts.items():
            tensors[own + part] = _spread(
                own + part, torch.randn(shape, generator=generator), is_zero_centred=False
            ).to(dtype)
        for copy in ("embed_tokens", "shared_head.head"):  # which a reader ignores
            tensors[f"{own}{copy}.weight"] = torch.full(
                (config["vocab_size"], hidden), float("nan"), dtype=dtype
            )
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    return path


def add_assistant(target: Path, path: Path) -> Path:
    """Write an assistant of a tiny Gemma 4 to `path`: two layers with a window, one without."""
    torch.manual_seed(1)
    config = json.loads((target / "config.json").read_text())
    kept = (
        "vocab_size",
        "head_dim",
        "num_key_value_heads",
        "max_position_embeddings",
        "sliding_window",
        "attention_k_eq_v",
        "hidden_size_per_layer_input",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    own: dict[str, Any] = {
        "hidden_size": 40,
        "intermediate_size": 52,
        "num_attention_heads": 2,
        "num_hidden_layers": 3,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }
    text = transformers.Gemma4TextConfig(**{name: config[name] for name in kept}, **own)
    with every_layer_reads():
        model = transformers.Gemma4AssistantForCausalLM(
            transformers.Gemma4AssistantConfig(
                text_config=text, backbone_hidden_size=config["hidden_size"]
            )
        )
    spread_weights(model)
    nn.Module.to(model, getattr(torch, config["dtype"]))
    model.save_pretrained(path)
    return path


@contextmanager
def every_layer_reads() -> Iterator[None]:
    """Allow an assistant in transformers 5.23, which refuses a model of which no layer writes
    keys."""
    modes = property(lambda config: ["reuse"] * config.num_hidden_layers)
    with patch.object(transformers.Gemma4TextConfig, "kv_sharing_modes", modes):
        yield


def _last_whole_layer(tensors: Mapping[str, Tensor]) -> str:
    """Return the key prefix of the last layer with experts and, if any layer has one, an
    indexer."""
    layers = {int(key.split(".")[2]) for key in tensors if ".mlp.experts." in key}
    with_indexer = {int(key.split(".")[2]) for key in tensors if ".indexer." in key}
    return f"model.layers.{max(layers & with_indexer if with_indexer else layers)}."


def oracle(path: Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the checkpoint in transformers as a causal language model over text, in its own dtype
    unless given."""
    config = transformers.AutoConfig.from_pretrained(path)
    is_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto: Any = (
        transformers.AutoModelForCausalLM if is_text else transformers.AutoModelForImageTextToText
    )
    model: PreTrainedModel = auto.from_pretrained(path, dtype=dtype or "auto")
    model.train(mode=False)
    return model


@torch.no_grad()
def spread_weights(model: nn.Module, seed: int = 0) -> None:
    """Set random weights of a lively model: fan-in scaling, and norms, biases and decays away from
    their neutral values, so that a forgotten one shows and the best token has a margin."""
    generator = torch.Generator().manual_seed(seed)
    zero_centred = {
        name
        for name, module in model.named_modules()
        if type(module).__name__
        in ("Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3NextRMSNorm", "Gemma3RMSNorm")
    }
    buffers = [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if "e_score_correction" in name or "layer_scalar" in name
    ]
    for name, tensor in [*model.named_parameters(), *buffers]:
        tensor.copy_(
            _spread(
                name,
                torch.randn(tensor.shape, generator=generator),
                is_zero_centred=name.rsplit(".", 1)[0] in zero_centred,
            )
        )


def _spread(name: str, normal: Tensor, *, is_zero_centred: bool) -> Tensor:
    if name.endswith("A_log"):
        return normal * 0.8 + 0.5  # decays between about 0.2 and 8 per unit of time step
    if name.endswith("dt_bias"):
        return normal * 0.5 - 2.0
    if "layer_scalar" in name:
        return normal * 0.2 + 0.8
    if "e_score_correction" in name:
        return normal * 0.2
    if "norm" in name and not is_zero_centred and name.endswith("weight"):
        return normal * 0.1 + 1.0
    if "norm" in name or name.endswith("bias"):
        return normal * 0.1
    if "embed" in name:
        return normal
    if "conv1d" in name:
        return normal * 0.5
    return normal * (1.2 / math.sqrt(normal.shape[-1]))
