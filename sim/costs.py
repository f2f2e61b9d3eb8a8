"""Time costs of workers and network: the file that `python -m bench.calibrate` writes.

    {"model": {...}, "prefill": {...}, "decode": {...}, "network": {...}, "machine": {...}}

All times are seconds, all sizes bytes. The defaults are a dense model of 70 billion parameters on
nodes of eight H100 at the rates that public benchmarks show, rounded; they are not measured.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.errors import ConfigError


class _CostModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelCosts(_CostModel):
    """Sizes of the model. `state_bytes` is the recurrent state of a request."""

    page_size: int = Field(default=64, ge=1)
    max_context_tokens: int = Field(default=131_072, ge=2)
    num_layers: int = Field(default=80, ge=1)
    token_bytes: int = Field(default=327_680, ge=0)
    state_bytes: int = Field(default=0, ge=0)


class TierCosts(_CostModel):
    """A tier of a prefix cache with room for `num_pages`, 0 for none.

    Reading a page takes `page_s`, one after the other.
    """

    num_pages: int = Field(default=0, ge=0)
    page_s: float = Field(default=0.0, ge=0)


class PrefillCosts(_CostModel):
    """Costs of prefill.

    A chunk takes `step_s`, plus `token_s` for each of its tokens, plus `pair_s` for each pair of
    one of its tokens and a token that it attends to. A pool of several stages computes as many
    chunks at a time; a chunk takes that time over all stages together. `request_s` is added to the
    first chunk of a prompt, for its messages and its handoff. With `num_slots` a prompt resumes
    only where a recurrent state was kept. `host` is lost with the process, `disk` is not.
    """

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
    host: TierCosts = TierCosts(page_s=4e-4)
    disk: TierCosts = TierCosts(page_s=4e-3)

    def chunk_s(self, tokens: int, pairs: float) -> float:
        return self.step_s + self.token_s * tokens + self.pair_s * pairs


class DecodeCosts(_CostModel):
    """Costs of decode.

    A round gives every row of a pool its next token. It takes `step_s`, plus `row_s` for each row,
    plus `context_s` for each token that the rows attend to. `tokens_per_step` is the mean number of
    tokens of a row and round: accepted draft tokens and one sampled token. `replay_s` is added for
    each token that a preempted or migrated request computes again.

    `request_s` is taken for each request: a third on arrival and a third when its prompt has
    landed, both of which delay the running rows, and a third at its end, in parallel to them.
    `landed_s` is taken for each token of its prompt: a third delays the running rows, the rest is
    parallel to them. Parallel work slows the rows down if they share a core with it.
    """

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
        """Return the duration of a round. Rows beyond `max_running` take turns."""
        turns = max(1.0, rows / self.max_running)
        return self.step_s * turns + self.row_s * rows + self.context_s * context_tokens


class NetworkCosts(_CostModel):
    """Costs of the network. `latency_s` is one-way per message; the bandwidth is per worker and
    direction.
    """

    latency_s: float = Field(default=5e-4, ge=0)
    bytes_per_s: float = Field(default=5e10, gt=0)


class MachineCosts(_CostModel):
    """Costs of a machine that runs all processes of a fleet.

    `cores` is its number of cores; 0 gives every worker a core of its own. `speed` is the work in
    seconds that a core does per second, less than 1 if other processes use it, too. Router and
    client together take core time: `request_s` for each request, `prompt_token_s` for each token of
    its prompt, `round_s` for each round of a decode pool, and `token_s` for each token generated
    there.
    """

    cores: int = Field(default=0, ge=0)
    speed: float = Field(default=1.0, gt=0)
    request_s: float = Field(default=0.0, ge=0)
    prompt_token_s: float = Field(default=0.0, ge=0)
    round_s: float = Field(default=0.0, ge=0)
    token_s: float = Field(default=0.0, ge=0)


class Costs(_CostModel):
    """All costs of a fleet."""

    model: ModelCosts = ModelCosts()
    prefill: PrefillCosts = PrefillCosts()
    decode: DecodeCosts = DecodeCosts()
    network: NetworkCosts = NetworkCosts()
    machine: MachineCosts = MachineCosts()

    @classmethod
    def read(cls, path: Path) -> "Costs":
        """Load costs from a JSON file.

        Raises:
            ConfigError: the file cannot be read or a field is invalid; the error names the field.
        """
        try:
            return cls.model_validate_json(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the costs {path}: {error}", field="costs") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}: {place}: {first['msg']}", field="costs") from None

    def times(self, factor: float) -> "Costs":
        """Return the costs of workers that compute `factor` times as long and start as fast."""
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
        """Return the number of bytes handed over for a prompt."""
        return self.model.token_bytes * num_tokens + self.model.state_bytes
