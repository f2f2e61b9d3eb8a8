"""Random requests with everything that the API has, and what is equal in their responses."""

import random
from collections.abc import Sequence
from dataclasses import replace

from baton.values import Completion, Query, Sampling, Stop, StructuredOutput, Timings, Usage

SCHEMAS = (
    '{"type": "array", "items": {"enum": ["red", 7]}, "minItems": 2, "maxItems": 4}',
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, '
    '"required": ["b"], "additionalProperties": false}',
)
REGEXES = ("(ab|cd){1,6}x?", "[0-9]{3,20}", "[a-c]*(yes|no)")


def random_query(
    dice: random.Random, prompt: Sequence[int], *, models: Sequence[str], max_tokens: int
) -> Query:
    """Draw the sampling, stop conditions, grammar, scores, choices and model of a request."""

    def perhaps(chance: float, *values: float) -> float | None:
        return dice.choice(values) if dice.random() < chance else None

    structured = None
    if dice.random() < 0.35:
        structured = dice.choice(
            (StructuredOutput(dice.choice(SCHEMAS)), StructuredOutput(regex=dice.choice(REGEXES)))
        )
    return Query(
        tuple(prompt),
        Sampling(
            temperature=dice.choice((0.0, 0.7, 1.3)),
            top_p=perhaps(0.3, 0.5, 0.95),
            top_k=dice.choice((None, 5, 50)),
            min_p=perhaps(0.2, 0.05),
            frequency_penalty=perhaps(0.3, 0.5, -0.5),
            presence_penalty=perhaps(0.3, 0.7),
            repetition_penalty=perhaps(0.3, 1.2),
            seed=dice.randrange(2**63),
            logit_bias={dice.randrange(33, 120): dice.choice((-4.0, 6.0)) for _ in range(2)},
        ),
        Stop(
            max_tokens=max_tokens,
            min_tokens=dice.choice((None, 0, min(5, max_tokens))) if structured is None else None,
            strings=dice.choice(((), ("e",), ("ab", "qu", "x"))),
            ignore_eos=structured is None and dice.random() < 0.7,
        ),
        model=dice.choice(models),
        num_top_logprobs=dice.choice((None, 0, 4)),
        num_prompt_logprobs=dice.choice((None, None, 0, 3)),
        structured_output=structured,
        n=dice.choice((None, None, 3)),
    )


def comparable(completion: Completion) -> Completion:
    """Return what all clusters must give: all but the times, the id and the tokens cached."""
    usage = completion.finish.usage
    usage = Usage(usage.prompt_tokens, usage.completion_tokens)
    finish = replace(completion.finish, timings=Timings(), request_id="", usage=usage)
    return replace(completion, finish=finish)
