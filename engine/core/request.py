"""Generation requests of the engine: token ids in, token ids out, all defaults resolved."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from runtime.errors import FieldViolation, InternalError, InvalidRequestError, StalledError
from runtime.grammar import Grammar


class FinishReason(StrEnum):
    """The reason for the end of a request's output."""

    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"  # max_tokens or the context limit
    ABORTED = "aborted"


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    The router checks their ranges; see protos/baton/v1/types.proto.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def needs_history(self) -> bool:
        """Return whether the distribution depends on earlier tokens.

        The last stage then needs them.
        """
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )


@dataclass(frozen=True)
class CacheSession:
    """The session whose resume points a request leaves in caches.

    Attributes:
        digest: names the session and its client.
        client: names the client, to which what its sessions retain is charged.
        retention_s: how much longer the cache keeps the point, as long as no newer one of the
            session supersedes it.
        ends: whether no later request of the session will come.
    """

    digest: bytes
    client: bytes
    retention_s: float
    ends: bool = False


@dataclass(frozen=True)
class ClientShare:
    """The client of a request, and its weight against others."""

    client: bytes
    weight: float = 1.0


NAMELESS = ClientShare(b"")  # all clients without a name together


@dataclass(frozen=True)
class Request:
    """One generation request.

    `stop_token_ids` includes the model's end-of-sequence ids unless the client ignores them.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    num_top_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    priority: int = 0
    grammar: Grammar | None = None  # constrains the output from its first token on
    speculates: bool = True  # allows drafts if the pool has a draft model; never changes the output
    # allows reuse of cached prefixes, and caching for later prompts; never changes the output
    uses_cache: bool = True
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    adapter: str = ""  # the adapter whose updates the model's projections get; empty: none
    session: CacheSession | None = None  # never changes the output
    share: ClientShare = NAMELESS  # never changes the output

    @property
    def needs_output(self) -> bool:
        """Return whether sampling depends on the earlier output through penalties or a grammar."""
        return self.sampling.needs_history or self.grammar is not None

    def finish_reason(
        self, output_token_ids: list[int], max_context_tokens: int
    ) -> FinishReason | None:
        """Return why the last output token ends the request, or None if it does not."""
        if output_token_ids[-1] in self.stop_token_ids and len(output_token_ids) >= self.min_tokens:
            return FinishReason.STOP
        if len(output_token_ids) >= self.max_tokens:
            return FinishReason.LENGTH
        if len(self.prompt_token_ids) + len(output_token_ids) >= max_context_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities before temperature and filters.

    `logprob` is of the sampled token; `top` holds the most likely tokens.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ProblemCause(IntEnum):
    """The reason why a token could not be sampled.

    Stages send the number.
    """

    GRAMMAR = 0  # of the request: it cannot be followed, or not within the permitted computation
    DEFECT = 1  # an invariant does not hold
    BUSY = 2  # of the machine: the request may succeed elsewhere or later


@dataclass(frozen=True)
class SampledToken:
    """One sampled token of one request.

    `problem` is the reason why the request must end with an error instead.
    """

    token_id: int
    logprobs: TokenLogprobs | None = field(default=None)
    problem: str = ""
    cause: ProblemCause = ProblemCause.GRAMMAR

    @property
    def error(self) -> InvalidRequestError | InternalError | StalledError | None:
        if not self.problem:
            return None
        if self.cause is ProblemCause.GRAMMAR:
            return InvalidRequestError(FieldViolation("structured_output", self.problem))
        return (InternalError if self.cause is ProblemCause.DEFECT else StalledError)(self.problem)
