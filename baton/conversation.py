"""`baton chat`: a conversation in the terminal, or over a pipe line by line.

In a terminal, a line can be edited, and several pasted lines are one turn. Ctrl-C ends the response
and not the conversation, and so does an error. Over a pipe, each line gets a response, and the
first error ends the program.
"""

import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from baton.chat_options import ChatOptions
from baton.client import BatonClient
from baton.values import ChatMessage, Chunk, Finish, Query, Sampling, Stop
from runtime.errors import BatonError, ConfigError, InvalidRequestError

HELP = """\
/clear   forget what was said (not the system message)
/help    this
/exit    end, as Ctrl-D does
Ctrl-C ends the answer that is being written. Alt-Enter begins a new line; what is pasted stays one turn."""
_KEYS = "Ctrl-D or /exit ends the conversation; /help shows more"


@dataclass
class Conversation:
    """Messages so far, and the means to get the next one."""

    client: BatonClient
    system: str
    options: ChatOptions
    sampling: Sampling
    stop: Stop
    timeout_s: float | None
    history: list[ChatMessage] = field(default_factory=list)  # without the system message
    session_id: str = field(default_factory=partial(secrets.token_hex, 16))

    def clear(self) -> None:
        self.history.clear()

    def answer(self, text: str) -> str:
        """Send the text, print the response as it arrives, and return how it ended.

        The history keeps the text with the response, or with the part before a KeyboardInterrupt.

        Raises:
            BatonError: the response failed; the history is unchanged.
        """
        while True:
            try:
                return self._answer(text)
            except InvalidRequestError as error:
                if not (self.history and _is_too_long(error)):
                    raise
                del self.history[:2]
                print("(the conversation is longer than the context: its oldest turn is dropped)")

    def _answer(self, text: str) -> str:
        first = [ChatMessage("system", self.system)] if self.system else []
        asked = ChatMessage("user", text)
        query = Query(
            (*first, *self.history, asked),
            self.sampling,
            self.stop,
            tools=self.options.tools,
            template_arguments=self.options.template_arguments,
            session_id=self.session_id,
        )
        said = ""
        reason = "interrupted"
        events = self.client.generate(query, timeout_s=self.timeout_s)
        try:
            for event in events:
                if isinstance(event, Chunk):
                    said += event.text
                    print(event.text, end="", flush=True)
                elif isinstance(event, Finish):
                    reason = event.reason
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        finally:
            events.close()
            print()
        if said:
            self.history += [asked, ChatMessage("assistant", said)]
        return reason


def converse(
    client: BatonClient,
    *,
    system: str,
    options: ChatOptions,
    sampling: Sampling,
    stop: Stop,
    timeout_s: float | None,
) -> None:
    """Respond to typed turns, or to each line of stdin, until the input ends.

    Raises:
        BatonError: a response failed in a pipe.
        ConfigError: stdin or stdout is missing, or the piped input is not text.
    """
    conversation = Conversation(client, system, options, sampling, stop, timeout_s)
    if sys.stdin is None or sys.stdout is None:
        raise ConfigError("chat needs both stdin and stdout", field="stdin")
    if sys.stdin.isatty() and sys.stdout.isatty():
        _talk(conversation)
    else:
        for line in _piped():
            if line.strip():
                conversation.answer(line.rstrip("\n"))


def _piped() -> Iterator[str]:
    """Yield the lines of stdin, or raise ConfigError if the input is not text."""
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise ConfigError(f"the piped input is not text: {error}", field="stdin") from None


def _talk(conversation: Conversation) -> None:
    print(_KEYS)
    for text in _typed():
        match text.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/help":
                print(HELP)
            case "/clear":
                conversation.clear()
                print("(forgotten)")
            case word if word.startswith("/") and " " not in word:
                print(f"(unknown command {word}; /help lists the commands)")
            case _:
                _say(conversation, text)


def _say(conversation: Conversation, text: str) -> None:
    try:
        reason = conversation.answer(text)
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)
        return
    except KeyboardInterrupt:  # right before or after the response
        reason = "interrupted"
    if reason == "length":
        print("(cut off: the token limit is reached; /clear makes room)")
    elif reason == "interrupted":
        print("(stopped)")


def _typed() -> Iterator[str]:
    """Yield the typed turns until Ctrl-D."""
    from prompt_toolkit import PromptSession  # slow to load, and not needed for a pipe
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(key_bindings=keys)
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            print(f"({_KEYS})")
        except EOFError:
            return


def _is_too_long(error: InvalidRequestError) -> bool:
    return any(
        violation.field.startswith("chat") and "maximum context length" in violation.description
        for violation in error.violations
    )
