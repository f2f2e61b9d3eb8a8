"""`baton generate`: from command line arguments to a query, and from events to text."""

import os
import re
import select
import sys
from collections.abc import Iterable
from pathlib import Path

from baton.chat_options import read_messages
from baton.values import ChatMessage, Chunk, Event, Prompt, Query, StructuredOutput
from runtime.errors import ConfigError, FieldViolation, InvalidRequestError

PATIENCE_S = 2.0  # to wait for stdin before explaining
_NO_PROMPT = "pass a PROMPT, or pipe one in"
_SURROGATE = re.compile(
    "[\ud800-\udfff]"
)  # how Python represents a byte of an argument that the locale cannot decode


def print_text(events: Iterable[Event], query: Query) -> None:
    """Print text as it arrives; with several choices, print each when complete."""
    whole: dict[int, str] = {}
    for event in events:
        if isinstance(event, Chunk):
            text = event.text or _spelled_ids(event, query.prompt)
            if (query.n or 1) == 1:
                print(text, end="", flush=True)
            else:
                whole[event.index] = whole.get(event.index, "") + text
        elif event.index in whole:
            print(f"[{event.index}] {whole[event.index]}", flush=True)
    print(end="" if whole else "\n")


def structured_output_of(json_schema: Path | None, regex: str | None) -> StructuredOutput | None:
    """Return the constraint on the output, or raise ConfigError for a file that cannot be read."""
    if json_schema is None:
        return None if regex is None else StructuredOutput(regex=regex)
    try:
        return StructuredOutput(json_schema.read_text("utf-8"), regex)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--json-schema: cannot read {json_schema}: {error}", field="json_schema"
        ) from None


def read_prompt(argument: str | None) -> str:
    """Return the argument; without one, or for "-", return stdin without its last line end.

    Raises:
        ConfigError: there is no prompt, or the input is not text.
    """
    if argument is not None and argument != "-":
        return _argument_text(argument)
    if sys.stdin is None or (argument is None and sys.stdin.isatty()):
        raise ConfigError(_NO_PROMPT, field="prompt")
    _explain_a_wait()
    try:
        text = sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the piped input is not text: {error}", field="prompt") from None
    if not text:
        raise ConfigError(f"{_NO_PROMPT}: stdin was empty", field="prompt")
    return text


def _argument_text(argument: str) -> str:
    """Return the argument as UTF-8 text if the locale's encoding could not decode it.

    Raises:
        ConfigError: the argument is empty, or not text.
    """
    if not argument:
        raise ConfigError("the PROMPT is empty", field="prompt")
    try:
        return os.fsencode(argument).decode() if _SURROGATE.search(argument) else argument
    except UnicodeDecodeError as error:
        raise ConfigError(f"the PROMPT is not text: {error}", field="prompt") from None


def _explain_a_wait() -> None:
    """Say on stderr that stdin is awaited: at once in a terminal, otherwise after a while."""
    is_terminal = sys.stdin.isatty()
    if is_terminal or not select.select([sys.stdin], [], [], PATIENCE_S)[0]:
        end = "Ctrl-D ends it" if is_terminal else "or pass a PROMPT"
        print(f"baton: reading the prompt from stdin until that ends ({end})", file=sys.stderr)


def prompt_of(argument: str | None, messages: Path | None, *, ids: bool, as_chat: bool) -> Prompt:
    """Return the prompt that the flags give.

    Raises:
        InvalidRequestError: the prompt is invalid.
        ConfigError: the file has no valid messages.
    """
    if messages is not None:
        if argument is not None or ids:
            raise InvalidRequestError(
                FieldViolation("prompt", "--messages excludes a PROMPT and --ids")
            )
        return read_messages(messages)
    if ids and as_chat:
        raise InvalidRequestError(FieldViolation("prompt", "--ids and --chat exclude each other"))
    text = read_prompt(argument)
    if as_chat:
        return (ChatMessage("user", text),)
    return _token_ids(text) if ids else text


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        ids = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        ids = ()
    if not ids:
        raise InvalidRequestError(
            FieldViolation("prompt", f"must be token ids like 1,2,3, got {text!r}")
        )
    return ids


def _spelled_ids(chunk: Chunk, prompt: Prompt) -> str:
    """Return the ids as text, for a model without a tokenizer: it responds with token ids."""
    has_text = isinstance(prompt, str) or isinstance(prompt[0], ChatMessage)
    return "" if has_text else " ".join(str(token) for token in chunk.token_ids) + " "
