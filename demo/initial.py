"""Where the demo model's training starts: heads that look a token up and say what stood beside it,
instead of noise.

Trained from transformers' own start, recall had not appeared after four times as many tokens. The
idea is that of Trockman et al. 2024, "Mimetic Initialization Helps State Space Models Learn to
Recall".
"""

import math

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5GatedDeltaNet


@torch.no_grad()
def favour_recall(model: Qwen3_5ForCausalLM) -> None:
    """Overwrite fresh weights.

    Queries start near keys, values are written back as they were read, every short convolution
    picks one of the last four tokens, recurrent heads forget slowly, and all embeddings share a
    direction that holds the output gates open.
    """
    embedding = model.model.embed_tokens.weight
    nn.init.normal_(embedding)
    model.lm_head.weight.copy_(0.02 * embedding)
    embedding += 1.0
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            _favour_recurrent_recall(layer.linear_attn)
        else:
            _favour_attention_recall(layer.self_attn)


@torch.no_grad()
def share_spaced_words(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer) -> None:
    """Let a word start with the same embedding whether or not a space precedes it."""
    embedding = model.model.embed_tokens.weight
    for word, token in tokenizer.get_vocab().items():
        spaced = tokenizer.token_to_id(f"\u0120{word}")  # how byte-level BPE writes a leading space
        if spaced is not None and word.isalpha():
            embedding[token] = embedding[spaced]


def _favour_recurrent_recall(mixer: Qwen3_5GatedDeltaNet) -> None:
    mixer.dt_bias.copy_(initial_dt_bias(mixer.num_v_heads))
    projected = mixer.in_proj_qkv.weight
    query, key, value = projected.tensor_split((mixer.key_dim, 2 * mixer.key_dim))
    query.copy_((query + key) / math.sqrt(2))
    nn.init.orthogonal_(value)
    _remove_shared_direction(projected)
    mixer.in_proj_z.weight += 2.0 / mixer.in_proj_z.in_features
    mixer.out_proj.weight.copy_(0.3 * value.T)
    taps = nn.init.normal_(mixer.conv1d.weight, std=0.05)
    start = 0
    for size in [mixer.head_k_dim] * (2 * mixer.num_k_heads) + [
        mixer.head_v_dim
    ] * mixer.num_v_heads:
        taps[start : start + size, 0, torch.randint(taps.shape[-1], ())] += 1.0
        start += size


def _favour_attention_recall(mixer: Qwen3_5Attention) -> None:
    nn.init.orthogonal_(mixer.v_proj.weight)
    for projection in (mixer.k_proj, mixer.v_proj):
        _remove_shared_direction(projection.weight)
    hidden = mixer.k_proj.in_features
    key, value = (
        projection.weight.view(-1, mixer.head_dim, hidden).repeat_interleave(
            mixer.num_key_value_groups, 0
        )
        for projection in (mixer.k_proj, mixer.v_proj)
    )
    query = mixer.q_proj.weight.view(-1, 2, mixer.head_dim, hidden)[
        :, 0
    ]  # per head: query, then output gate
    query.copy_((query + key) / math.sqrt(2))
    mixer.o_proj.weight.copy_(0.5 * value.flatten(0, 1).T)


def _remove_shared_direction(weight: Tensor) -> None:
    """Make rows blind to what all embeddings have in common."""
    weight -= weight.mean(-1, keepdim=True)


def initial_dt_bias(heads: int) -> Tensor:
    """Biases whose softplus is spread over 0.001 .. 0.1, as Mamba and Gated DeltaNet start.

    transformers starts them at 1, which makes every head forget within a token: nothing to learn
    recall with.
    """
    step = torch.exp(torch.rand(heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
    return step + torch.log(-torch.expm1(-step))
