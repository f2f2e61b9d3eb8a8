"""What workers and their network take for what they do: the file that `python -m bench.calibrate`
writes.

    {"model": {...}, "prefill": {...}, "decode": {...}, "network": {...}, "machine": {...}}

All times are seconds, all sizes bytes. The defaults are a dense model of 70 billion parameters on
nodes of eight H100 at the rates that public benchmarks show, rounded; they are no measurement.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.errors import ConfigError


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelCosts(_Part):
    """`state_bytes` is the recurrent state of a request."""

    page_size: int = Field(default=64, ge=1)
    max_context_tokens: int = Field(default=131_072, ge=2)
    num_layers: int = Field(default=80, ge=1)
    token_bytes: int = Field(default=327_680, ge=0)
    state_bytes: int = Field(default=0, ge=0)


class PrefillCosts(_Part):
    """A chunk takes `step_s`, `token_s` for each of its tokens, and `pair_s` for each pair of one
    of its tokens and one that this attends to. A pool of several stages has as many chunks under
    way, each of which takes that for all stages together. `request_s`: what the first chunk of a
    prompt takes beyond that, for its messages and its way to decode. With `num_slots` a prompt goes
    on only from where a state was kept."""

    step_s: float = Field(default=0.008, ge=0)
    token_s: float = Field(default=7e-5, ge=0)
    pair_s: float = Field(default=1e-9, ge=0)
    request_s: float = Field(default=0.0, ge=0)
    stages: int = Field(default=1, ge=1)
    chunk_tokens: int = Field(default=2048, ge=1)
    grid: int = Field(default=64, ge=1)
    num_pages: int = Field(default=16_384, ge=1)
    num_slots: int = Field(default=0, ge=0)
    max_running: int = Field(default=64, ge=1)
    max_queued: int = Field(default=512, ge=1)
    start_s: float = Field(default=60.0, ge=0)

    def chunk_s(self, tokens: int, pairs: float) -> float:
        return self.step_s + self.token_s * tokens + self.pair_s * pairs


class DecodeCosts(_Part):
    """All rows of a pool get their next token within `step_s`, `row_s` for each of them and
    `context_s` for each token they attend to. `tokens_per_step`: with drafts, the mean of those
    accepted and the one drawn. `replay_s` for each token that a request which was set back, or
    moves here, computes again. `request_s` for each request: a third when it comes and one when its
    prompt has landed, for both of which rows that draw wait, and one when it ends, beside them.
    `landed_s` for each token of its prompt: they wait for a third of it, and the rest is beside
    them, too. What is beside them slows them down where they share a core with it."""

    step_s: float = Field(default=0.014, ge=0)
    row_s: float = Field(default=5e-5, ge=0)
    context_s: float = Field(default=1.2e-8, ge=0)
    replay_s: float = Field(default=7e-5, ge=0)
    request_s: float = Field(default=0.0, ge=0)
    landed_s: float = Field(default=0.0, ge=0)
    tokens_per_step: float = Field(default=1.0, ge=1)
    num_pages: int = Field(default=16_384, ge=1)
    num_slots: int = Field(default=0, ge=0)
    max_running: int = Field(default=256, ge=1)
    max_held: int = Field(default=256, ge=1)
    growth_tokens: int = Field(default=64, ge=0)
    start_s: float = Field(default=60.0, ge=0)

    def round_s(self, rows: int, context_tokens: float) -> float:
        """Rows beyond those computed at a time take turns."""
        turns = max(1.0, rows / self.max_running)
        return self.step_s * turns + self.row_s * rows + self.context_s * context_tokens


class NetworkCosts(_Part):
    """`latency_s` one way, of a message; bandwidth of a worker's interface each way."""

    latency_s: float = Field(default=5e-4, ge=0)
    bytes_per_s: float = Field(default=5e10, gt=0)


class MachineCosts(_Part):
    """Of one that all processes of a fleet are on. `cores`: how many it has; 0: every worker has
    one for itself. `speed`: seconds of work that a core gives in a second, less than 1 where others
    use it, too. What router and client together take of a core: `request_s` for a request that
    comes, `prompt_token_s` for each token of its prompt, `round_s` for each round of a decode pool,
    `token_s` for each token that is drawn there."""

    cores: int = Field(default=0, ge=0)
    speed: float = Field(default=1.0, gt=0)
    request_s: float = Field(default=0.0, ge=0)
    prompt_token_s: float = Field(default=0.0, ge=0)
    round_s: float = Field(default=0.0, ge=0)
    token_s: float = Field(default=0.0, ge=0)


class Costs(_Part):
    """All of it."""

    model: ModelCosts = ModelCosts()
    prefill: PrefillCosts = PrefillCosts()
    decode: DecodeCosts = DecodeCosts()
    network: NetworkCosts = NetworkCosts()
    machine: MachineCosts = MachineCosts()

    @classmethod
    def read(cls, path: Path) -> "Costs":
        """Raises ConfigError naming the field."""
        try:
            return cls.model_validate_json(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the costs {path}: {error}", field="costs") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}: {place}: {first['msg']}", field="costs") from None

    def times(self, factor: float) -> "Costs":
        """Of workers that compute so many times as long, and start as fast."""
        if factor == 1:
            return self
        prefill = {
            name: getattr(self.prefill, name) * factor
            for name in ("step_s", "token_s", "pair_s", "request_s")
        }
        decode = {
            name: getattr(self.decode, name) * factor
            for name in ("step_s", "row_s", "context_s", "replay_s", "request_s", "landed_s")
        }
        return self.model_copy(
            update={
                "prefill": self.prefill.model_copy(update=prefill),
                "decode": self.decode.model_copy(update=decode),
            }
        )

    def handoff_bytes(self, num_tokens: int) -> float:
        """Of a prompt."""
        return self.model.token_bytes * num_tokens + self.model.state_bytes
