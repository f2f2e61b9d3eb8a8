"""The registry of model families by architecture."""

from collections.abc import Callable

from models import (
    deepseek_v3,
    deepseek_v32,
    gemma3,
    gemma4,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    kimi_linear,
    llama,
    llama4,
    minimax_m2,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    seed_oss,
    smollm3,
)
from models.blocks.config import RawConfig
from models.blocks.spec import DecoderSpec
from runtime.errors import ConfigError

_FAMILIES: dict[str, Callable[[RawConfig], DecoderSpec]] = {
    "LlamaForCausalLM": llama.read_decoder,
    "Llama4ForCausalLM": llama4.read_decoder,
    "Llama4ForConditionalGeneration": llama4.read_decoder,
    "MistralForCausalLM": mistral.read_decoder,
    "Mistral3ForConditionalGeneration": mistral.read_decoder,
    "MixtralForCausalLM": mixtral.read_decoder,
    "SeedOssForCausalLM": seed_oss.read_decoder,
    "SmolLM3ForCausalLM": smollm3.read_decoder,
    "Gemma3ForCausalLM": gemma3.read_decoder,
    "Gemma3ForConditionalGeneration": gemma3.read_decoder,
    "Gemma4ForCausalLM": gemma4.read_decoder,
    "Gemma4ForConditionalGeneration": gemma4.read_decoder,
    "Qwen2ForCausalLM": qwen2.read_decoder,
    "Qwen2MoeForCausalLM": qwen2_moe.read_decoder,
    "Qwen3ForCausalLM": qwen3.read_decoder,
    "Qwen3VLForConditionalGeneration": qwen3.read_decoder,
    "Qwen3MoeForCausalLM": qwen3_moe.read_decoder,
    "Qwen3NextForCausalLM": qwen3_next.read_decoder,
    "MiniMaxM2ForCausalLM": minimax_m2.read_decoder,
    "GptOssForCausalLM": gpt_oss.read_decoder,
    "Glm4MoeForCausalLM": glm4_moe.read_decoder,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite.read_decoder,
    "KimiLinearForCausalLM": kimi_linear.read_decoder,
    "DeepseekV3ForCausalLM": deepseek_v3.read_decoder,
    "DeepseekV32ForCausalLM": deepseek_v32.read_decoder,
    "GlmMoeDsaForCausalLM": glm_moe_dsa.read_decoder,
    "Qwen3_5ForCausalLM": qwen3_5.read_decoder,
    "Qwen3_5ForConditionalGeneration": qwen3_5.read_decoder,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe.read_decoder,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe.read_decoder,
}


def read_decoder(architecture: str, raw: RawConfig) -> DecoderSpec:
    """Return the decoder that a (text) config describes.

    Raises:
        ConfigError: no family supports the architecture, or its family rejects the config.
    """
    family = _FAMILIES.get(architecture)
    if family is None:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; known are {', '.join(sorted(_FAMILIES))}",
            field="architectures",
        )
    return family(raw)
