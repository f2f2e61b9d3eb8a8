"""`baton generate`: from what was typed to a query, and from its events to text."""

import sys
from collections.abc import Iterable
from pathlib import Path

from baton.values import ChatMessage, Chunk, Event, ModelInfo, Prompt, Query, StructuredOutput
from runtime.errors import ConfigError, FieldViolation, InvalidRequestError


def first_question(model: ModelInfo | None) -> str:
    """What to try first, as it is typed: in the form that this model answers; None: the demo model."""
    if model is None:
        return '--chat "Count from 3 by 2."'
    if model.has_chat_template:
        return '--chat "Hello!" --max-tokens 64'
    return '"Once upon a time" --max-tokens 32' if model.has_tokenizer else "--ids 1,2,3 --max-tokens 8"


def print_text(events: Iterable[Event], query: Query) -> None:
    """As it arrives; of several choices each when it is whole, in the order in which they end."""
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
    """What the answer must follow. Raises ConfigError for a file that cannot be read."""
    if json_schema is None:
        return None if regex is None else StructuredOutput(regex=regex)
    try:
        return StructuredOutput(json_schema.read_text(), regex)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--json-schema: cannot read {json_schema}: {error}", field="json_schema") from None


def read_prompt(argument: str | None) -> str:
    """The argument; without one, or for "-", all of stdin but its last line's end. Raises ConfigError in a terminal,
    where no person would see what it waits for."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise ConfigError("give a PROMPT, or pipe one in", field="prompt")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"what is piped in is no text: {error}", field="prompt") from None


def prompt_of(text: str, *, ids: bool, as_chat: bool) -> Prompt:
    """Raises InvalidRequestError for what is no prompt."""
    if ids and as_chat:
        raise InvalidRequestError(FieldViolation("prompt", "--ids and --chat exclude each other"))
    if as_chat:
        return (ChatMessage("user", text),)
    return _token_ids(text) if ids else text


def _token_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InvalidRequestError(FieldViolation("prompt", f"must be token ids like 1,2,3, got {text!r}")) from None


def _spelled_ids(chunk: Chunk, prompt: Prompt) -> str:
    """Ids for a model without a tokenizer, which answers token ids with token ids."""
    has_text = isinstance(prompt, str) or isinstance(prompt[0], ChatMessage)
    return "" if has_text else " ".join(str(token) for token in chunk.token_ids) + " "
