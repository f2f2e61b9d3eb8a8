"""The recipe runs from scratch in a few small steps and gives the same weights again."""

import pytest
import torch
from tokenizers import Tokenizer

from demo import corpus
from demo.initial import initial_dt_bias
from demo.train import (
    KNOWN_WEIGHT,
    UNKNOWN_WEIGHT,
    Phase,
    batches,
    build_model,
    make_optimizers,
    set_rate,
    train,
    train_tokenizer,
)

SMALL = Phase(steps=2, row_tokens=48, rows=2, max_facts=2, task_share=0.2)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer()


def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    text = "Zoë hid 12 lanterns — «near» the 北 harbour.\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_words_of_the_corpus_are_single_tokens(tokenizer: Tokenizer) -> None:
    words = [*corpus.NAMES, *corpus.THINGS, *corpus.COLORS, *corpus.VERBS]
    assert [word for word in words if len(tokenizer.encode(f" {word}").ids) != 1] == []
    assert [tokenizer.encode(special).ids for special in corpus.SPECIAL_TOKENS] == [
        [0],
        [1],
        [2],
        [3],
    ]


def test_rows_weigh_answers_and_little_else(tokenizer: Tokenizer) -> None:
    ids, weight = next(batches(tokenizer, SMALL, seed=1))
    assert ids.shape == (2, 49)
    assert weight.shape == (2, 48)
    assert ((weight == KNOWN_WEIGHT) | (weight == UNKNOWN_WEIGHT)).all()
    document = next(corpus.documents(1, max_facts=2, task_share=0.2))
    first = tokenizer.encode(document[0].text).ids
    assert ids[0, : len(first)].tolist() == first
    assert weight[0, : len(first) - 1].max() == pytest.approx(UNKNOWN_WEIGHT)
    assert weight[0, len(first) - 1] == KNOWN_WEIGHT


def test_recurrent_heads_start_with_a_memory() -> None:
    torch.manual_seed(0)
    decay = torch.nn.functional.softplus(initial_dt_bias(64))
    assert decay.min() >= 0.001 - 1e-6
    assert decay.max() <= 0.1 + 1e-6


def test_queries_start_near_keys() -> None:
    torch.manual_seed(0)
    mixer = build_model(816).model.layers[0].linear_attn
    query, key, _ = mixer.in_proj_qkv.weight.tensor_split((mixer.key_dim, 2 * mixer.key_dim))
    likeness = torch.nn.functional.cosine_similarity(query, key)
    assert likeness.mean().item() == pytest.approx(0.5**0.5, abs=0.05)


def test_two_steps_learn_and_repeat(tokenizer: Tokenizer) -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        model = build_model(816)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        loss = train(model, tokenizer, (SMALL,))
        assert 0 < loss < 20
        assert all(
            not torch.equal(before[name], value) for name, value in model.state_dict().items()
        )
        results.append(model.state_dict())
    assert all(
        torch.equal(first, second)
        for first, second in zip(results[0].values(), results[1].values(), strict=True)
    )


def test_the_rate_warms_up_and_falls() -> None:
    optimizers = make_optimizers(torch.nn.Linear(4, 4))
    scales = []
    for step in (0, 29, 500, 999):
        set_rate(optimizers, step, 1000)
        group = optimizers[0].param_groups[0]
        scales.append(group["lr"] / group["base"])
    assert scales == [pytest.approx(x) for x in (1 / 30, 0.971, 0.5, 0.02)]


def test_streams_differ_between_phases(tokenizer: Tokenizer) -> None:
    first, second = (next(batches(tokenizer, SMALL, seed))[0] for seed in (1, 2))
    assert not torch.equal(first, second)
