"""`baton chat`: a conversation in the terminal, or piped through it line by line.

In a terminal a line can be edited, several pasted lines are one turn, Ctrl-C ends the answer and
not the conversation, and an answer that fails costs nothing but itself. A pipe gets each line
answered, and ends with the first failure.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from baton.chat_options import ChatOptions
from baton.client import BatonClient
from baton.values import ChatMessage, Chunk, Finish, Query, Sampling, Stop
from runtime.errors import BatonError, ConfigError, InvalidRequestError

HELP = """\
/clear   forget what was said (not the system message)
/help    this
/exit    end, as Ctrl-D does
Ctrl-C ends the answer that is being written. Alt-Enter begins a new line; what is pasted stays one turn."""
_KEYS = "Ctrl-D or /exit ends the conversation; /help says more"


@dataclass
class Conversation:
    """The messages so far, and how to get the next one."""

    client: BatonClient
    system: str
    options: ChatOptions
    sampling: Sampling
    stop: Stop
    timeout_s: float | None
    history: list[ChatMessage] = field(default_factory=list)  # without the system message

    def clear(self) -> None:
        self.history.clear()

    def answer(self, text: str) -> str:
        """Ask, print the answer as it comes, and return how it ended. What was said so far is kept
        with the answer, or with as much of it as came before a KeyboardInterrupt.

        Raises:
            BatonError: it failed; the history is what it was before.
        """
        while True:
            try:
                return self._answer(text)
            except InvalidRequestError as error:
                if not (self.history and _is_too_long(error)):
                    raise
                del self.history[:2]
                print("(the conversation is longer than the context: its oldest turn is forgotten)")

    def _answer(self, text: str) -> str:
        first = [ChatMessage("system", self.system)] if self.system else []
        asked = ChatMessage("user", text)
        query = Query(
            (*first, *self.history, asked),
            self.sampling,
            self.stop,
            tools=self.options.tools,
            template_arguments=self.options.template_arguments,
        )
        said, reason = "", "interrupted"
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
    """Answer what is typed, or each line of stdin, until it ends.

    Raises:
        BatonError: an answer failed, and no person is there to read of it and go on.
        ConfigError: there is nothing to read from or to write to, or what is piped in is no text.
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
    """Yield the lines of stdin. Raises ConfigError for what is no text."""
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise ConfigError(f"what is piped in is no text: {error}", field="stdin") from None


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
                print(f"(there is no {word}; /help says what there is)")
            case _:
                _say(conversation, text)


def _say(conversation: Conversation, text: str) -> None:
    try:
        reason = conversation.answer(text)
    except BatonError as error:
        print(f"baton: {error}", file=sys.stderr)
        return
    except KeyboardInterrupt:  # right before the answer, or right behind it
        reason = "interrupted"
    if reason == "length":
        print("(cut off: the limit of tokens is reached; /clear makes room)")
    elif reason == "interrupted":
        print("(stopped)")


def _typed() -> Iterator[str]:
    """What a person types, turn by turn, until Ctrl-D."""
    from prompt_toolkit import PromptSession  # takes a while to load, and a pipe needs none of it
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
