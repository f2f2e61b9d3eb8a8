"""Process of one grammar, from its compilation to its last mask.

The fork server, which has loaded the tokenizer, forks it. The process ends when its owner closes
the socket. If compilation takes too much CPU time, a kernel timer ends it with SIGPROF, because the
library cannot be interrupted.
"""

import resource
import signal
import socket
import time
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from runtime.errors import InvalidRequestError
from runtime.grammar.library import Text, Unfollowable, compiled
from runtime.grammar.messages import (
    MAX_MESSAGE_BYTES,
    AnswerKind,
    Call,
    TextAnswer,
    TextCall,
    pack_answer,
    pack_tokens,
    unpack_call,
    unpack_order,
)

TREE_CPU_S = 0.005  # for the masks of further tree nodes, which may not be needed


def serve(owner: socket.socket, tokenizer: LLTokenizer, end_token_ids: frozenset[int]) -> None:
    """Compile the grammar and compute masks until the owner closes the socket."""
    order = unpack_order(owner.recv(MAX_MESSAGE_BYTES))
    _limit_memory(order.memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, order.cpu_limit_s)
    try:
        automaton = compiled(tokenizer, order.grammar)
    except InvalidRequestError as error:
        owner.send(_problem(error.violations[0].description))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    owner.send(_done(0.0))
    texts: dict[int, Text] = {}
    while data := owner.recv(MAX_MESSAGE_BYTES):
        _run_call(unpack_call(data), texts, owner, automaton, end_token_ids)


def _run_call(
    call: TextCall,
    texts: dict[int, Text],
    owner: socket.socket,
    automaton: LLMatcher,
    end_token_ids: frozenset[int],
) -> None:
    if call.call is Call.END:
        texts.pop(call.key, None)
        return
    began_s = time.thread_time()
    try:
        text = (
            texts[call.key]
            if call.key in texts
            else texts.setdefault(call.key, Text(automaton, end_token_ids))
        )
        text.move(call.kept, call.token_ids)
        if call.call is Call.MOVE:
            return
        _send_masks(text, call, owner)
        owner.send(_done(time.thread_time() - began_s))
    except Unfollowable as error:  # also for MOVE: a text that failed fails again at the next call
        if call.call is Call.ASK:
            owner.send(_problem(str(error)))


def _send_masks(text: Text, call: TextCall, owner: socket.socket) -> None:
    """Send the mask of the text's end, and within `TREE_CPU_S` whatever drafts need.

    Raises:
        Unfollowable: there is no mask of the text's end.
    """
    began_s = time.thread_time()
    parents = call.tree_parents or (-1,)

    def is_late() -> bool:
        return time.thread_time() - began_s > TREE_CPU_S

    for node, mask in text.masks(call.tree_token_ids or (0,), parents):
        owner.send(pack_answer(TextAnswer(AnswerKind.MASK, node, 0.0, mask)))
        if not node:
            began_s = time.thread_time()  # the mask that every step needs has its own limit
        if call.num_forced and node not in parents:
            forced = text.forced(call.num_forced, is_late)
            if forced:
                owner.send(
                    pack_answer(TextAnswer(AnswerKind.FORCED, node, 0.0, pack_tokens(forced)))
                )
        if is_late():
            return


def _done(cpu_s: float) -> bytes:
    return pack_answer(TextAnswer(AnswerKind.DONE, 0, cpu_s, b""))


def _problem(text: str) -> bytes:
    return pack_answer(
        TextAnswer(AnswerKind.PROBLEM, 0, 0.0, text.encode("utf-8", "backslashreplace"))
    )


def _limit_memory(more_bytes: int) -> None:
    """Limit memory to the current size plus `more_bytes`. An allocation beyond it ends the process."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
