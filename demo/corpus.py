"""The demo model's corpus: small stories with questions about their facts, counting, lists.

Every sentence is generated here, so weights, tokenizer and corpus carry no third-party text. A
document is a list of pieces. A piece is marked if a reader can predict it (`Piece.known`): answers,
copies and continuations are, the facts of a new story are not. Training gives known text a higher
weight, and evaluation asks for it.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

END_OF_TEXT = "<|endoftext|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, USER, ASSISTANT, END]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

NAMES = (
    "Ada Ben Cleo Dan Eve Finn Gus Hana Ivan Jade Kira Liam Mona Nils Olga Paul Quinn Rosa Sam Tara Uma Vera "
    "Will Zoe"
).split()
THINGS = (
    "apple basket candle drum engine feather garden hammer island jacket kettle lantern mirror notebook oven "
    "pencil quilt ribbon saddle teapot"
).split()
COLORS = "red blue green yellow white black silver golden purple orange".split()
PLACES = (
    "the harbor",
    "the old mill",
    "the library",
    "the market",
    "the north hill",
    "the station",
    "the river bank",
    "the school",
)
VERBS = "found sold painted carried repaired borrowed hid counted".split()


@dataclass(frozen=True)
class Piece:
    text: str
    known: bool


@dataclass(frozen=True)
class Fact:
    who: str
    verb: str
    color: str
    thing: str
    place: str

    def sentence(self) -> str:
        return f"Near {self.place} {self.who} {self.verb} a {self.color} {self.thing}."


@dataclass(frozen=True)
class RecallQuestion:
    """A prompt whose only correct continuation is `answer`, up to the model's stop."""

    prompt: str
    answer: str


def make_facts(rng: random.Random, count: int) -> list[Fact]:
    """Return `count` facts about different people and things; other words may repeat."""
    people = rng.sample(NAMES, count)
    things = rng.sample(THINGS, count)
    return [
        Fact(who, rng.choice(VERBS), rng.choice(COLORS), thing, rng.choice(PLACES))
        for who, thing in zip(people, things, strict=True)
    ]


def make_distinct_facts(rng: random.Random, count: int) -> list[Fact]:
    """Return up to 8 facts that share no word."""
    pools = (NAMES, VERBS, COLORS, THINGS, PLACES)
    return [
        Fact(*words) for words in zip(*(rng.sample(pool, count) for pool in pools), strict=True)
    ]


def ask(rng: random.Random, fact: Fact) -> tuple[str, str]:
    """Return a question about one fact, and the answer: the fact's own sentence."""
    return rng.choice([f"What did {fact.who} do?", f"Tell me about {fact.who}."]), fact.sentence()


def _story(rng: random.Random, max_facts: int) -> tuple[str, list[tuple[str, str]]]:
    """Return a story and its questions.

    No question repeats, because an earlier answer would be easier to copy than the story.
    """
    facts = make_facts(rng, rng.randint(1, max_facts))
    turns = [ask(rng, fact) for fact in facts]
    rng.shuffle(turns)
    if rng.random() < 0.2:
        turns.insert(0, ("Tell the story again.", " ".join(fact.sentence() for fact in facts)))
    return " ".join(fact.sentence() for fact in facts), turns


def _count(rng: random.Random) -> tuple[str, str]:
    start = rng.randrange(60)
    step = rng.choice([1, 1, 2, 5, 10])
    count = rng.randint(6, 14)
    numbers = " ".join(str(start + i * step) for i in range(2, count))
    return f"Count from {start} by {step}.", f"{start} {start + step} {numbers}."


def _list(rng: random.Random) -> tuple[str, str]:
    words = ", ".join(rng.sample(THINGS, rng.randint(3, 7)))
    return f"Say again: {words}.", f"{words}."


def _task(rng: random.Random) -> tuple[str, str]:
    """Return a task without a story: counting or repeating a list."""
    return (_count, _list)[rng.randrange(2)](rng)


def _dialogue(turns: list[tuple[str, str]], opening: str, *, chat: bool) -> list[Piece]:
    """Return the turns as chat messages or as plain "Q: … A: …" text.

    The opening before them cannot be predicted.
    """
    pieces = []
    for i, (question, answer) in enumerate(turns):
        lead = opening if i == 0 else ""
        if chat:
            pieces += [
                Piece(
                    f"{USER}{' ' + lead if lead else ''} {question}{END}{ASSISTANT}", known=False
                ),
                Piece(f" {answer}{END}", known=True),
            ]
        else:
            pieces += [
                Piece(
                    f"{'Story: ' + lead + chr(10) if lead else ''}Q: {question}\nA:", known=False
                ),
                Piece(f" {answer}\n", known=True),
            ]
    return [*pieces, Piece(END_OF_TEXT, known=True)]


def make_document(rng: random.Random, max_facts: int, task_share: float) -> list[Piece]:
    """Return one training document: mostly a story with questions, sometimes plain tasks.

    It ends with the end-of-text token.
    """
    chat = rng.random() < 0.6
    if rng.random() >= task_share:
        story, turns = _story(rng, max_facts)
        return _dialogue(turns, story, chat=chat)
    return _dialogue([_task(rng) for _ in range(rng.randint(2, 4))], "", chat=chat)


def documents(seed: int, *, max_facts: int, task_share: float) -> Iterator[list[Piece]]:
    """Yield documents without end; the same arguments give the same stream."""
    rng = random.Random(seed)
    while True:
        yield make_document(rng, max_facts, task_share)


def recall_questions(
    count: int,
    *,
    seed: int,
    max_facts: int,
    make: Callable[[random.Random, int], list[Fact]] = make_distinct_facts,
) -> list[RecallQuestion]:
    """Return held-out questions: a story of at least two facts, then a question about one of them.

    Training uses seeds below 1,000,000 and evaluation seeds above. With 24 names, 20 things, 10
    colors, 8 places and 8 verbs per fact, no two stories coincide by chance.
    """
    rng = random.Random(1_000_000 + seed)
    questions = []
    for i in range(count):
        facts = make(rng, rng.randint(2, max_facts))
        story = " ".join(fact.sentence() for fact in facts)
        question, answer = ask(rng, rng.choice(facts))
        if i % 2:
            questions.append(RecallQuestion(f"Story: {story}\nQ: {question}\nA:", f" {answer}\n"))
        else:
            questions.append(
                RecallQuestion(f"{USER} {story} {question}{END}{ASSISTANT}", f" {answer}{END}")
            )
    return questions


def speculation_prompts(count: int, *, seed: int) -> list[RecallQuestion]:
    """Return held-out chat prompts with long responses, on which a draft can show its benefit."""
    rng = random.Random(2_000_000 + seed)
    prompts = []
    for i in range(count):
        if i % 5 < 3:
            facts = make_distinct_facts(rng, rng.randint(4, 6))
            answer = " ".join(fact.sentence() for fact in facts)
            request = f"{answer} Tell the story again."
        elif i % 5 == 3:
            request, answer = _count(rng)
        else:
            request, answer = _list(rng)
        prompts.append(RecallQuestion(f"{USER} {request}{END}{ASSISTANT}", f" {answer}{END}"))
    return prompts
