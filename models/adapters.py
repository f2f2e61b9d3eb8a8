"""LoRA adapters as PEFT writes them: one folder each, with adapter_config.json and safetensors.

For a projection y = W x an adapter has A [r, in] and B [out, r], and adds scale * B A x to y. The
scale is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora (rank-stabilized LoRA, Kalajdzievski
2023). Whatever else PEFT offers changes the function in another way and is refused by name.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from engine.core.layer_range import LayerRange
from models.blocks.low_rank import LowRankFactors
from models.checkpoint_part import LAYER_NAME, without_prefix
from runtime.errors import ConfigError
from runtime.model_files.adapter_folders import (
    CONFIG,
    WEIGHTS,
    adapter_folders,
    adapter_key,
)

MAX_RANK = 512
_PEFT_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.(?:default\.)?weight$")
# PEFT saves these with an adapter of the head; they are the model's own.
_UNTRAINED = re.compile(r"\.base_layer\.(weight|bias)$")
_MAX_CONFIG_BYTES = 1 << 20
_READ_BYTES = 1 << 20
# Settings that change the function in a way that this module does not compute, and their values
# that do not.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "megatron_config": (None,),
    "eva_config": (None,),
    "corda_config": (None,),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
}


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter's files, checked against PEFT's rules but not against a model.

    Attributes:
        name: that of its folder.
        modules: the keys of the two factors by module, as PEFT names the module.
        scales: by module.
        num_values: of all factors.
    """

    name: str
    folder: Path
    modules: Mapping[str, tuple[str, str]]
    scales: Mapping[str, float]
    num_values: int

    @property
    def key(self) -> str:
        """Return what identifies the adapter in every pool: its name and the digest."""
        return adapter_key(self.name, self.digest)

    @cached_property
    def digest(self) -> str:
        """Return a digest of everything that the adapter computes with, in hex.

        Raises:
            ConfigError: the file cannot be read.
        """
        digest = self._new_digest()
        try:
            with (self.folder / WEIGHTS).open("rb") as stream:
                while piece := stream.read(_READ_BYTES):
                    digest.update(piece)
        except OSError as error:
            raise _damaged(self.folder / WEIGHTS, error) from error
        return digest.hexdigest()

    def read(self) -> tuple[str, Callable[[str], LowRankFactors]]:
        """Return the key, and a reader of the factors of a module.

        Both are of one reading of the file, which may be replaced at any time.

        Raises:
            ConfigError: the file is damaged.
        """
        file, digest = self.folder / WEIGHTS, self._new_digest()
        try:
            content = file.read_bytes()
            digest.update(content)
            tensors = load(content)
            found = {
                module: [tensors[key] for key in keys] for module, keys in self.modules.items()
            }
        except (SafetensorError, OSError, KeyError) as error:
            raise _damaged(file, error) from error

        def factors(module: str) -> LowRankFactors:
            down, up = (tensor.float() for tensor in found[module])
            return LowRankFactors(down, up * self.scales[module])

        return adapter_key(self.name, digest.hexdigest()), factors

    def _new_digest(self) -> "hashlib.blake2b":
        settings = json.dumps([self.name, sorted(self.scales.items())])
        return hashlib.blake2b(settings.encode(), digest_size=16)


def read_adapters(folder: Path) -> tuple[Adapter, ...]:
    """Return the adapters in the subfolders of `folder`, by name.

    Raises:
        ConfigError: a subfolder is no adapter, or one that Baton cannot serve.
    """
    return tuple(read_adapter(path) for path in adapter_folders(folder))


class StageFactors:
    """A `FactorSource` with the factors of one adapter for one stage's layers."""

    def __init__(
        self,
        adapter: Adapter,
        read: Callable[[str], LowRankFactors],
        layers: LayerRange,
        num_layers: int,
        other_names: Sequence[tuple[str, str]],
    ) -> None:
        """Create the source for `layers` of a model with `num_layers` layers.

        `read` is the reader of the adapter. `other_names` are those of `DecoderSpec`.
        """
        self._adapter = adapter
        self._read = read
        self._modules: dict[str, str] = {}
        for module in adapter.modules:
            name = without_prefix(module.removeprefix(_PEFT_PREFIX), other_names)
            layer = LAYER_NAME.match(name)
            is_own = (
                layers.end == num_layers
                if layer is None
                else int(layer[1]) in layers or int(layer[1]) >= num_layers
            )
            if is_own:
                self._modules[name] = module
        self._taken: set[str] = set()

    @property
    def name(self) -> str:
        """Implement `FactorSource.name`."""
        return self._adapter.name

    def factors(self, module: str) -> LowRankFactors | None:
        """Implement `FactorSource.factors`."""
        if module not in self._modules:
            return None
        self._taken.add(module)
        return self._read(self._modules[module])

    def finish(self) -> None:
        """Implement `FactorSource.finish`."""
        unused = sorted(self._modules.keys() - self._taken)
        if unused:
            raise ConfigError(
                f"adapter {self.name} updates what Baton cannot update in this model: "
                f"{', '.join(unused[:4])}{f' and {len(unused) - 4} more' if len(unused) > 4 else ''}",
                field="adapters",
            )


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter in `folder`.

    Raises:
        ConfigError: it is none, or one that Baton cannot serve.
    """
    config = _config(folder / CONFIG)
    for field, neutral in _NEUTRAL.items():
        if field in config and config[field] not in neutral:
            raise _refused(folder, f"{field} {json.dumps(config[field])[:80]} is not supported")
    file = folder / WEIGHTS
    try:
        with safe_open(file, "pt") as tensors:
            shapes = {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error
    modules, scales = {}, {}
    for module, keys in _factors_of(folder, shapes):
        rank = _rank(folder, module, *(shapes[key] for key in keys))
        modules[module] = keys
        scales[module] = _scale(folder, config, module.removeprefix(_PEFT_PREFIX), rank)
    if not modules:
        raise _refused(folder, f"{WEIGHTS} has no tensors")
    num_values = sum(math.prod(shapes[key]) for keys in modules.values() for key in keys)
    return Adapter(folder.name, folder, modules, scales, num_values)


def _factors_of(folder: Path, keys: Iterable[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each module with the keys of its two factors, in name order."""
    factors: dict[str, dict[str, str]] = {}
    for key in keys:
        if _UNTRAINED.search(key) is not None:
            continue
        found = _FACTOR.fullmatch(key)
        if found is None:
            raise _refused(folder, f"{key} is no factor of a linear layer")
        factors.setdefault(found[1], {})[found[2]] = key
    for module, pair in sorted(factors.items()):
        if pair.keys() != {"A", "B"}:
            raise _refused(folder, f"{module} has only one of its two factors")
        yield module, (pair["A"], pair["B"])


def _rank(folder: Path, module: str, down: Sequence[int], up: Sequence[int]) -> int:
    """Return the rank of a module's factors with these shapes."""
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not 1 <= down[0] <= MAX_RANK:
        raise _refused(
            folder,
            f"{module} has factors {list(down)} and {list(up)}, not [r, in] and [out, r] with r up "
            f"to {MAX_RANK}",
        )
    return down[0]


def _scale(folder: Path, config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the scale of a module's update, as PEFT's config states it."""
    stated = _of_module(folder, config, "rank_pattern", module, config.get("r", 8))
    alpha = _of_module(folder, config, "alpha_pattern", module, config.get("lora_alpha", 8))
    if stated != rank:
        raise _refused(folder, f"{module} has rank {rank}, its config states {stated}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise _refused(folder, f"lora_alpha {json.dumps(alpha)[:80]} is no number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(
    folder: Path, config: Mapping[str, Any], field: str, module: str, default: object
) -> object:
    """Return a module's own value in a pattern of the config, or the default.

    A key matches a whole name or its end after a dot, and may be a regular expression.
    """
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise _refused(folder, f"{field} is no object")
    for key, value in patterns.items():
        try:
            if re.fullmatch(rf"(.*\.)?({key})", module):
                return value
        except re.error as error:
            raise _refused(folder, f"{field} has the key {key[:80]!r}: {error}") from error
    return default


def _config(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_CONFIG_BYTES + 1)
        config = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(file, error) from error
    if not isinstance(config, dict) or len(text) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{file} is no config of an adapter", field="adapters")
    return config


def _refused(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"adapter {folder}: {why}", field="adapters")


def _damaged(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file} cannot be read: {repr(error)[:200]}", field="adapters")
