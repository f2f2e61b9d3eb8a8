"""A model of EleutherAI's lm-evaluation-harness that is served by Baton.

pip install lm_eval
python docs/examples/lm_eval_baton.py run --model baton --tasks arc_easy \
    --model_args target=127.0.0.1:7000,tokenizer=path/to/the/model

Scores are sums of the logprobs of prompt tokens (`num_prompt_logprobs`). Baton computes the same bits
alone and in any batch, so `concurrency` changes the duration and no score.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer

from baton.client import AsyncBatonClient, BatonClient
from baton.values import Completion, Query, Sampling, Stop, TokenLogprobs

Scored = tuple[float, bool]
MAX_TOKENS = 256  # of an answer whose task sets no limit


@register_model("baton")
class BatonLM(TemplateLM):
    """The model of a router."""

    def __init__(
        self,
        target: str = "127.0.0.1:7000",
        tokenizer: str = "",
        concurrency: int = 16,
        **options: object,  # batch_size and device, which the harness passes to every model
    ) -> None:
        """Connect to a router; `tokenizer` is the folder of the served model."""
        super().__init__()
        self._targets = target.split("+")
        self._tokenizer = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._concurrency = concurrency
        with BatonClient(*self._targets) as client:
            self._info = client.model_info()

    @property
    def eot_token_id(self) -> int:
        return self._info.eos_token_ids[0]

    @property
    def max_length(self) -> int:
        """Return the number of tokens of a prompt whose logprobs can be computed."""
        return self._info.max_context_tokens - 1

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Return the token ids of a text."""
        ids: list[int] = self._tokenizer.encode(
            string, add_special_tokens=bool(add_special_tokens)
        ).ids
        return ids

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the logprob of each text, in windows of the longest context."""
        windows = [
            [
                (("", ""), *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length - 1, 1
                )
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([each for text in windows for each in text]))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to one of its stop strings."""
        answers = self._answers([self._continuing(*request.args) for request in requests])
        return [answer.text for answer in answers]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[Scored]:
        queries = [
            Query(
                tuple((context + continuation)[-self.max_length :]),
                Sampling(temperature=0),
                Stop(max_tokens=1),
                num_prompt_logprobs=1,
            )
            for _, context, continuation in requests
        ]
        return [
            _score(answer.prompt_logprobs, continuation)
            for answer, (_, _, continuation) in zip(self._answers(queries), requests, strict=True)
        ]

    def _continuing(self, context: str, options: dict[str, Any]) -> Query:
        until = options.get("until", ())
        max_tokens = int(options.get("max_gen_toks", MAX_TOKENS))
        return Query(
            tuple(self.tok_encode(context)[-(self.max_length - max_tokens) :]),
            Sampling(temperature=float(options.get("temperature", 0))),
            Stop(max_tokens, strings=(until,) if isinstance(until, str) else tuple(until)),
        )

    def _answers(self, queries: Sequence[Query]) -> list[Completion]:
        """Return the answers of all queries; `concurrency` of them run at the same time."""

        async def answer(client: AsyncBatonClient, query: Query) -> Completion:
            async with free:
                return await client.complete(query)

        async def answers() -> list[Completion]:
            async with AsyncBatonClient(*self._targets) as client:
                return await asyncio.gather(*(answer(client, query) for query in queries))

        free = asyncio.Semaphore(self._concurrency)
        return asyncio.run(answers())


def _score(logprobs: Sequence[TokenLogprobs], continuation: Sequence[int]) -> Scored:
    """Return the logprob of a continuation, and whether greedy decoding would produce it."""
    scored = logprobs[-len(continuation) :]
    is_greedy = all(
        each.top[0][0] == token for each, token in zip(scored, continuation, strict=True)
    )
    return sum(each.logprob for each in scored), is_greedy


if __name__ == "__main__":
    cli_evaluate()
