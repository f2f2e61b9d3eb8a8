"""Initial weights of the demo model: heads start as token lookups, not as noise.

A head looks a token up and returns the token next to it. With transformers' own initial weights,
recall had not appeared after four times as many tokens. The idea is from Trockman et al. 2024,
"Mimetic Initialization Helps State Space Models Learn to Recall".
"""

import math

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, Qwen3_5GatedDeltaNet


@torch.no_grad()
def favour_recall(model: Qwen3_5ForCausalLM) -> None:
    """Overwrite the initial weights of a model.

    Queries start near keys. Values are written back unchanged. Every short convolution selects one
    of the last four tokens. Recurrent heads forget slowly. All embeddings share a direction that
    holds the output gates open.
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
    """Give a word the same initial embedding with and without a leading space."""
    embedding = model.model.embed_tokens.weight
    for word, token in tokenizer.get_vocab().items():
        spaced = tokenizer.token_to_id(f"\u0120{word}")  # leading space in byte-level BPE
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
    # Per head: query, then output gate.
    query = mixer.q_proj.weight.view(-1, 2, mixer.head_dim, hidden)[:, 0]
    query.copy_((query + key) / math.sqrt(2))
    mixer.o_proj.weight.copy_(0.5 * value.flatten(0, 1).T)


def _remove_shared_direction(weight: Tensor) -> None:
    """Make rows ignore the direction that all embeddings share."""
    weight -= weight.mean(-1, keepdim=True)


def initial_dt_bias(heads: int) -> Tensor:
    """Return biases with softplus values spread over 0.001 .. 0.1, as in Mamba and Gated DeltaNet.

    transformers initializes them to 1, which makes every head forget within a token, so it cannot
    learn recall.
    """
    step = torch.exp(torch.rand(heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
    return step + torch.log(-torch.expm1(-step))
