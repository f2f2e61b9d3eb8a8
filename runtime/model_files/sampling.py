"""Sampling defaults of a model from generation_config.json, for fields that a request omits.

A field that the file omits has Baton's own default, which leaves the distribution unchanged, as in
vLLM and SGLang. transformers would use its own (`top_k` 50).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.model_files.config import read_if_there
from runtime.model_files.end_tokens import GENERATION_CONFIG
from runtime.sampling_limits import MAX_TOP_K, SAMPLING_INTERVALS

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
# Fields of transformers that Baton does not support and that would change sampling, each with its
# neutral value.
_NOT_TAKEN = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": None,
}


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling defaults for requests; None is Baton's own default.

    `not_taken` has the names of unsupported fields in the file.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    not_taken: tuple[str, ...] = ()

    @property
    def stated(self) -> dict[str, float]:
        """Return the values that the file states, by name."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name != "not_taken" and value is not None
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.stated.items()) or "none"

    @property
    def notice(self) -> str:
        """Return a message for the operator, or ""."""
        return (
            f"{GENERATION_CONFIG} states {', '.join(self.not_taken)}, which Baton does not apply"
            if self.not_taken
            else ""
        )


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return the defaults of generation_config.json in `folder`, or none without the file.

    `do_sample: false` sets temperature 0 whatever temperature the file has, because transformers
    then takes the most likely token.

    Raises:
        ConfigError: a field has a value that a request could not have either.
    """
    fields = {
        name: value
        for name, value in read_if_there(folder / GENERATION_CONFIG).items()
        if value is not None
    }
    numbers = {name: _number(fields, name) for name in _NUMBERS if name in fields}
    do_sample = fields.get("do_sample", True)
    if not isinstance(do_sample, bool):
        raise _refused("do_sample", "must be true or false", do_sample)
    if not do_sample:
        numbers["temperature"] = 0.0
    not_taken = tuple(
        name
        for name, neutral in _NOT_TAKEN.items()
        if fields.get(name, neutral) not in (neutral, [])
    )
    return SamplingDefaults(**numbers, top_k=_top_k(fields), not_taken=not_taken)


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields[name]
    interval = SAMPLING_INTERVALS[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in interval:
        raise _refused(name, str(interval), value)
    return float(value)


def _top_k(fields: Mapping[str, Any]) -> int | None:
    """Return `top_k`, in which some files write -1 for all tokens."""
    value = fields.get("top_k")
    if value is not None and (type(value) is not int or not -1 <= value <= MAX_TOP_K):
        raise _refused("top_k", f"must be an integer from 0 (all tokens) to {MAX_TOP_K}", value)
    return None if value is None else max(value, 0)


def _refused(name: str, rule: str, value: object) -> ConfigError:
    return ConfigError(
        f"{GENERATION_CONFIG}: {name} {rule}, is {value!r}; correct it, or make the router ignore the "
        f"file's sampling defaults (--generation-config none)",
        field="generation_config",
    )
