"""`baton chat`: a conversation in the terminal, or piped through it line by line."""

import sys
from collections.abc import Iterator

from baton.client import BatonClient
from baton.values import ChatMessage, Chunk, Query, Sampling, Stop


def converse(client: BatonClient, *, system: str, sampling: Sampling, stop: Stop, timeout_s: float | None) -> None:
    """Answer each line of stdin until it ends. Raises BatonError when an answer fails."""
    history = [ChatMessage("system", system)] if system else []
    for line in _lines():
        history.append(ChatMessage("user", line))
        answer = ""
        for event in client.generate(Query(tuple(history), sampling, stop), timeout_s=timeout_s):
            if isinstance(event, Chunk):
                answer += event.text
                print(event.text, end="", flush=True)
        print()
        history.append(ChatMessage("assistant", answer))


def _lines() -> Iterator[str]:
    """Non-empty lines, with a prompt only for people."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line
