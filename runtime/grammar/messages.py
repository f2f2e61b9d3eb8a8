"""Messages between a grammar process and its owner, over a socket that keeps message boundaries.

    owner                                       grammar
    compile  limits, kind, text      ──▶
                                     ◀──        verdict  accepted, or the reason of the rejection
    end      of a text               ──▶
    move     kept, tokens            ──▶
    ask      kept, tokens, tree      ──▶
                                     ◀──        mask     of a node, for each node reached
                                     ◀──        forced   tokens after a leaf, if there are any
                                     ◀──        done     seconds of CPU time, or why there is no mask

The first message with a new key opens a text. Little-endian; token ids are 32 bits wide.
"""

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from runtime.grammar.language import Grammar, GrammarKind

MAX_MESSAGE_BYTES = 1 << 18
CHUNK_TOKENS = 1 << 14  # limit of one message

_COMPILE = struct.Struct("<dQB")
_ASK = struct.Struct("<BQIIIB")
_ANSWER = struct.Struct("<BId")
_KINDS = tuple(GrammarKind)


class Call(IntEnum):
    MOVE = 1
    ASK = 2
    END = 3


class AnswerKind(IntEnum):
    MASK = 1  # mask of one node
    DONE = 2
    PROBLEM = 3
    FORCED = 4  # tokens after one node


@dataclass(frozen=True)
class CompileOrder:
    grammar: Grammar
    cpu_limit_s: float
    memory_bytes: int  # in addition to the memory of the process at its start


@dataclass(frozen=True)
class TextCall:
    """Request for the text `key`.

    The text keeps its first `kept` tokens and appends `token_ids`. The nodes of a tree follow; node
    0 is the text's end. Up to `num_forced` (0 to 255) tokens are wanted after each leaf.
    """

    call: Call
    key: int
    kept: int = 0
    token_ids: Sequence[int] = ()
    tree_token_ids: Sequence[int] = ()
    tree_parents: Sequence[int] = ()
    num_forced: int = 0


@dataclass(frozen=True)
class TextAnswer:
    answer: AnswerKind
    node: int
    cpu_s: float
    data: bytes


def pack_order(order: CompileOrder) -> bytes:
    return (
        _COMPILE.pack(order.cpu_limit_s, order.memory_bytes, _KINDS.index(order.grammar.kind))
        + order.grammar.encoded
    )


def unpack_order(data: bytes) -> CompileOrder:
    cpu_limit_s, memory_bytes, kind = _COMPILE.unpack_from(data)
    return CompileOrder(Grammar(_KINDS[kind], data[_COMPILE.size :]), cpu_limit_s, memory_bytes)


def pack_call(call: TextCall) -> bytes:
    head = _ASK.pack(
        call.call,
        call.key,
        call.kept,
        len(call.token_ids),
        len(call.tree_parents),
        call.num_forced,
    )
    return b"".join(
        (
            head,
            pack_tokens(call.token_ids),
            pack_tokens(call.tree_token_ids),
            array("i", call.tree_parents).tobytes(),
        )
    )


def unpack_call(data: bytes) -> TextCall:
    call, key, kept, num_tokens, num_nodes, num_forced = _ASK.unpack_from(data)
    tokens = array("I")
    parents = array("i")
    end = _ASK.size + 4 * (num_tokens + num_nodes)
    tokens.frombytes(data[_ASK.size : end])
    parents.frombytes(data[end:])
    return TextCall(
        Call(call),
        key,
        kept,
        tokens[:num_tokens].tolist(),
        tokens[num_tokens:].tolist(),
        parents.tolist(),
        num_forced,
    )


def pack_answer(answer: TextAnswer) -> bytes:
    return _ANSWER.pack(answer.answer, answer.node, answer.cpu_s) + answer.data


def unpack_answer(data: bytes) -> TextAnswer:
    answer, node, cpu_s = _ANSWER.unpack_from(data)
    return TextAnswer(AnswerKind(answer), node, cpu_s, data[_ANSWER.size :])


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    tokens = array("I")
    tokens.frombytes(data)
    return tuple(tokens)


def path_to(node: int, token_ids: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Return the tokens after node 0 on the path to `node`."""
    path: list[int] = []
    while node > 0:
        path.append(token_ids[node])
        node = parents[node]
    return path[::-1]
