"""The draft head against its own definition: unrolling, trees, acceptance, and the file it is
stored in."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from demo.draft import DraftConfig, DraftHead, DraftKV, load_draft, save_draft
from demo.drafting import Node, TreeShape, accepted, propose, target_passes
from demo.train_draft import STEP_DISCOUNT, UNROLLED_STEPS, unroll_mask, unrolled_loss

VOCAB, HIDDEN = 24, 16


@pytest.fixture
def head() -> DraftHead:
    torch.manual_seed(3)
    return DraftHead(DraftConfig(VOCAB, (0, 1, 2), HIDDEN, 32, num_attention_heads=2, head_dim=8))


@pytest.fixture
def embedding() -> Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(4))


def over_prompt(
    head: DraftHead, embedding: Tensor, ids: Tensor, features: Tensor
) -> tuple[Tensor, DraftKV]:
    slots = ids.shape[1] - 1
    result: tuple[Tensor, DraftKV] = head(
        F.embedding(ids[:, 1:], embedding),
        head.fc(features[:, :slots]),
        torch.arange(slots),
        past=None,
        mask=torch.ones(slots, slots, dtype=torch.bool).tril(),
    )
    return result


def sees_all(past: DraftKV) -> Tensor:
    return torch.ones(1, past.keys.shape[2] + 1, dtype=torch.bool)


def example(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return (
        torch.randint(VOCAB, (1, length), generator=generator),
        torch.randn(1, length, 3 * HIDDEN, generator=generator),
    )


def test_mask_shows_true_features_and_own_steps_only() -> None:
    assert unroll_mask(3, 2).int().tolist() == [
        [1, 0, 0, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 1],
    ]


def test_unrolled_loss_is_what_drafting_would_pay(head: DraftHead, embedding: Tensor) -> None:
    """The mean over slots of chains drafted there one token at a time, with the true tokens fed
    in."""
    ids, features = example(7)
    target = torch.rand(1, 7, VOCAB).softmax(-1)
    slots, expected = 7 - UNROLLED_STEPS, torch.zeros(())
    for slot in range(slots):
        hidden, past = over_prompt(head, embedding, ids[:, : slot + 2], features)
        hidden = hidden[:, -1:]
        for step in range(UNROLLED_STEPS):
            log_p = head.logits(hidden).log_softmax(-1)
            expected = (
                expected
                - STEP_DISCOUNT**step * (target[:, slot + 1 + step] * log_p[:, 0]).sum() / slots
            )
            if step == UNROLLED_STEPS - 1:
                break
            hidden, fresh = head(
                F.embedding(ids[:, slot + 2 + step : slot + 3 + step], embedding),
                hidden,
                torch.tensor([slot + 1 + step]),
                past=past,
                mask=sees_all(past),
            )
            past = past.append(fresh)
    torch.testing.assert_close(
        unrolled_loss(head, embedding, ids, features, target, torch.ones(1, 7)), expected
    )


def test_one_optimisation_step_reaches_every_weight(head: DraftHead, embedding: Tensor) -> None:
    ids, features = example(12)
    target = torch.rand(1, 12, VOCAB).softmax(-1)
    torch.autograd.backward(
        unrolled_loss(head, embedding, ids, features, target, torch.ones(1, 12))
    )
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in head.parameters()
    )


def test_a_chain_is_the_greedy_draft(head: DraftHead, embedding: Tensor) -> None:
    ids, features = example(6)
    hidden, past = over_prompt(head, embedding, ids, features)
    tree = propose(head, embedding, hidden[:, -1:], past, TreeShape(1, 3, 3))
    assert [node.parent for node in tree] == [-1, 0, 1]
    hidden = hidden[:, -1:]
    for level, node in enumerate(tree):
        assert node.token == int(head.logits(hidden).argmax())
        hidden, fresh = head(
            F.embedding(torch.tensor([[node.token]]), embedding),
            hidden,
            torch.tensor([5 + level]),
            past=past,
            mask=sees_all(past),
        )
        past = past.append(fresh)


def test_a_tree_holds_the_best_paths(head: DraftHead, embedding: Tensor) -> None:
    ids, features = example(6)
    hidden, past = over_prompt(head, embedding, ids, features)
    tree = propose(head, embedding, hidden[:, -1:], past, TreeShape(4, 4, 15))
    assert len(tree) == 15
    assert all(node.parent < index for index, node in enumerate(tree))
    assert all(tree[node.parent].score >= node.score for node in tree if node.parent >= 0)
    assert len({(node.parent, node.token) for node in tree}) == 15
    chain = propose(head, embedding, hidden[:, -1:], past, TreeShape(1, 1, 1))
    assert (
        chain[0].token
        == max((node for node in tree if node.parent == -1), key=lambda node: node.score).token
    )


def test_acceptance_walks_the_tree() -> None:
    tree = [
        Node(5, -1, -0.1),
        Node(6, -1, -0.2),
        Node(7, 0, -0.3),
        Node(7, 1, -0.4),
        Node(8, 3, -0.5),
    ]
    assert accepted(tree, [6, 7, 8, 9]) == 3
    assert accepted(tree, [5, 7, 8]) == 2
    assert accepted(tree, [9]) == 0
    assert accepted(tree, []) == 0


@pytest.mark.parametrize(("right", "passes"), [(True, 3), (False, 12)])
def test_a_perfect_chain_yields_depth_plus_one_and_a_useless_one_nothing(
    head: DraftHead, embedding: Tensor, *, right: bool, passes: int
) -> None:
    head.norm.weight.data.zero_()  # all logits equal: the draft says the same token everywhere
    said = int(torch.zeros(1, 1, VOCAB).topk(1).indices)
    ids = torch.full((1, 20), said if right else (said + 1) % VOCAB)
    _, features = example(20)
    assert (
        target_passes(head, embedding, ids, features, prompt_length=7, shape=TreeShape(1, 3, 3))
        == passes
    )


def test_the_file_has_the_public_layout(head: DraftHead, tmp_path: Path) -> None:
    save_draft(head, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.post_attention_layernorm.weight",
        *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    }
    loaded = load_draft(tmp_path)
    assert loaded.config == head.config
    torch.testing.assert_close(
        loaded.fc.weight, head.fc.weight.to(torch.bfloat16).float(), rtol=0, atol=0
    )
