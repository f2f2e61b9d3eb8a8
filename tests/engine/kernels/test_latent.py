"""Attention to listed entries, against the definition in fp64. bf16 products are for tests/gpu: the
interpreter does not know them."""

import pytest
import torch

from engine.kernels.device.latent import listed_attention

SCALE = 0.17


@pytest.mark.parametrize(("heads", "latent", "rope"), [(5, 24, 8), (16, 32, 16), (20, 16, 4)])
@pytest.mark.parametrize("num_keys", [1, 32, 70])
def test_each_token_attends_to_its_listed_keys(
    heads: int, latent: int, rope: int, num_keys: int
) -> None:
    generator = torch.Generator().manual_seed(num_keys)
    entries = torch.full((128, latent + rope), float("nan"))
    q = torch.randn(4, heads, latent + rope, generator=generator)
    keys = torch.full((4, num_keys), -1, dtype=torch.int32)
    for token, count in enumerate((1, num_keys, max(1, num_keys // 2), num_keys)):
        places = torch.randperm(num_keys, generator=generator)[:count]  # gaps anywhere in the list
        keys[token, places] = torch.randperm(127, generator=generator)[:count].int() + 1
    used = keys[keys >= 0].long()
    entries[used] = torch.randn(len(used), latent + rope, generator=generator)
    out = listed_attention(q, entries, keys, latent_dim=latent, scale=SCALE)
    assert out.shape == (4, heads, latent)
    for token in range(4):
        own = entries[keys[token][keys[token] >= 0].long()].double()
        weights = (q[token].double() @ own.T * SCALE).softmax(-1)
        torch.testing.assert_close(
            out[token].double(), weights @ own[:, :latent], rtol=1e-5, atol=2e-6
        )
