"""The recurrent kernels through their contract: against the definition in fp64, and trees against
their paths."""

import pytest
import torch
from torch import Tensor

from engine.backends.cuda.recurrent import DeviceRecurrent
from engine.core.batch import ForwardMode
from engine.core.draft_trees import AcceptedNodes, SpecInfo, SpecRow, ancestors
from runtime.errors import InternalError
from tests.support.kernels.batches import Row, make_batch
from tests.support.kernels.recurrent import (
    CHANNELS,
    K_DIM,
    KERNEL,
    LAYER,
    NUM_SLOTS,
    V_DIM,
    V_HEADS,
    WEIGHT,
    Tokens,
    convolution,
    delta_rule,
    feed,
)

TREE = (-1, 0, 0, 1, 2, 3)


def backend(max_nodes: int = 0) -> tuple[DeviceRecurrent, Tensor, Tensor]:
    conv = torch.full((NUM_SLOTS, KERNEL - 1, CHANNELS), float("nan"))
    state = torch.full((NUM_SLOTS, V_HEADS, K_DIM, V_DIM), float("nan"))
    return (
        DeviceRecurrent(
            conv_pools={LAYER: conv}, state_pools={LAYER: state}, max_nodes=max_nodes, num_scratch=2
        ),
        conv,
        state,
    )


def check(tokens: Tokens, state: Tensor) -> None:
    out, last = delta_rule(tokens, tokens.fed)
    torch.testing.assert_close(torch.cat(tokens.out).double(), out, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(state[tokens.slot].double(), last, rtol=1e-4, atol=2e-6)
    torch.testing.assert_close(
        torch.cat(tokens.conv).double(), convolution(tokens, tokens.fed), rtol=1e-4, atol=2e-6
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 63])
def test_prefill_then_decode_follows_the_definition(num_tokens: int) -> None:
    recurrent, conv, state = backend()
    tokens = Tokens(num_tokens + 3, seed=num_tokens, slot=3)
    feed(recurrent, ForwardMode.PREFILL, (tokens, num_tokens))
    for _ in range(3):
        feed(recurrent, ForwardMode.DECODE, (tokens, 1))
    check(tokens, state)
    assert torch.equal(conv[3], tokens.x[-(KERNEL - 1) :]) or num_tokens + 3 < KERNEL - 1


def test_rows_of_any_length_share_a_batch_and_continue_on_the_grid() -> None:
    """A chunk and one token, two whole ones, and less than the convolution reads."""
    recurrent, _, state = backend()
    first, second, third = (
        Tokens(140, seed=seed, slot=slot) for seed, slot in ((1, 2), (2, 5), (3, 7))
    )
    feed(recurrent, ForwardMode.PREFILL, (first, 64), (second, 2))
    feed(recurrent, ForwardMode.PREFILL, (third, 128), (first, 65))
    feed(recurrent, ForwardMode.DECODE, (second, 1), (third, 1), (first, 1))
    for tokens in (first, second, third):
        check(tokens, state)


def test_slots_of_others_are_left_alone() -> None:
    recurrent, conv, state = backend()
    feed(recurrent, ForwardMode.PREFILL, (Tokens(5, seed=1, slot=2), 5))
    others = [slot for slot in range(NUM_SLOTS) if slot != 2]
    assert conv[others].isnan().all()
    assert state[others].isnan().all()


@pytest.mark.parametrize("context", [0, 66])
def test_tree_nodes_continue_their_parent_and_the_kept_one_is_committed(
    context: int,
) -> None:
    """Each path through the tree is a sequence of its own to the definition."""
    recurrent, conv, state = backend(max_nodes=8)
    prompt, nodes = Tokens(context + 6, seed=1, slot=3), range(len(TREE))
    if context:
        feed(recurrent, ForwardMode.PREFILL, (prompt, context))
    outs, convs = verify(recurrent, prompt, context)
    for node in nodes:
        path = along(prompt, context, ancestors(TREE, node))
        expected, last = delta_rule(path, path.fed)
        torch.testing.assert_close(outs[node].double(), expected[-1], rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(
            convs[node].double(), convolution(path, path.fed)[-1], rtol=1e-4, atol=2e-6
        )
        if node == 4:
            kept, history = last, path.x[-(KERNEL - 1) :]
    batch = make_batch(
        ForwardMode.DECODE,
        [Row(1, context + 3, slot=3)],
        spec_info=SpecInfo(
            torch.zeros(1, dtype=torch.long),
            (SpecRow(accepted=AcceptedNodes(context, (0, 2, 4)), scratch=1),),
        ),
    )
    recurrent.commit(batch)
    torch.testing.assert_close(state[3].double(), kept, rtol=1e-4, atol=2e-6)
    assert torch.equal(conv[3, -3:], history)


def verify(recurrent: DeviceRecurrent, prompt: Tokens, context: int) -> tuple[Tensor, Tensor]:
    info = SpecInfo(torch.zeros(len(TREE), dtype=torch.long), (SpecRow(TREE, scratch=1),))
    batch = make_batch(
        ForwardMode.VERIFY, [Row(len(TREE), context, slot=prompt.slot)], spec_info=info
    )
    q, k, v, g, beta = (part[context:] for part in prompt.inputs)
    convs = recurrent.causal_conv(LAYER, prompt.x[context:], WEIGHT, batch)
    return recurrent.gated_delta_rule(LAYER, q, k, v, g, beta, batch), convs


def along(prompt: Tokens, context: int, path: tuple[int, ...]) -> Tokens:
    """Return the prompt followed by the nodes of a path."""
    order = [*range(context), *(context + node for node in path)]
    tokens = Tokens(len(order), seed=0, slot=prompt.slot)
    q, k, v, g, beta = (part[order] for part in prompt.inputs)
    tokens.inputs, tokens.x, tokens.fed = (q, k, v, g, beta), prompt.x[order], len(order)
    return tokens


@pytest.mark.parametrize("scratch", [0, 2])
def test_each_tree_needs_its_own_record(scratch: int) -> None:
    """The null record is for padding; two requests in it would go on from each other's states."""
    recurrent, _, _ = backend(max_nodes=8)
    batch = make_batch(
        ForwardMode.VERIFY,
        [Row(1, 0, slot=3)],
        spec_info=SpecInfo(torch.zeros(1, dtype=torch.long), (SpecRow((-1,), scratch=scratch),)),
    )
    with pytest.raises(InternalError, match=f"scratch record {scratch} of 2 for a tree of slot 3"):
        recurrent.prepare(batch)


def test_trees_need_a_pool_that_keeps_their_states() -> None:
    recurrent, _, _ = backend()
    with pytest.raises(InternalError, match="no memory for states of tree nodes"):
        verify(recurrent, Tokens(6, seed=1, slot=3), 0)
