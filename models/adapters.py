"""LoRA adapters as PEFT writes them: one folder each, with adapter_config.json and safetensors.

For a projection y = W x an adapter has A [r, in] and B [out, r], and adds scale * B A x to y. The
scale is lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora (rank-stabilized LoRA, Kalajdzievski
2023). Whatever else PEFT offers changes the function in another way and is refused by name.

PEFT adapts a parameter of a module (`target_parameters`) by wrapping the module, and names its factors
after the module. If it adapts several parameters of a module, the first is the innermost wrapper,
with one ".base_layer" in its name for each later one. The factors of a stack of E experts are A
[E * r, in], expert after expert, and B [out, r * E], in which an expert has every E-th column. PEFT
before 0.19 took the second dimension of a stack for its inputs, whatever the model has there, and
0.19 the other one than later versions. Such factors are swapped: B^T and A^T of what they update.
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
from torch import Tensor

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
_BASE_LAYER = ".base_layer"
_STACKS = ("gate_up_proj", "down_proj")  # parameters with all experts, in the order of a module's
_MAX_EXPERTS = 4096
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
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "megatron_config": (None,),
    "eva_config": (None,),
    "corda_config": (None,),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
}


@dataclass(frozen=True)
class FactorKeys:
    """The tensors with a module's factors, of which an expert of a stack has its part."""

    down: str
    up: str
    expert: int = 0
    num_experts: int = 1
    is_swapped: bool | None = None  # None: not known

    def factors(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return A [r, in] and B [out, r] without its scale."""
        rows = len(tensors[self.down]) // self.num_experts
        down = tensors[self.down][self.expert * rows :][:rows]
        return down, tensors[self.up][:, self.expert :: self.num_experts]


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter's files, checked against PEFT's rules but not against a model.

    Attributes:
        name: that of its folder.
        modules: the keys of the two factors by module, as PEFT names the module. A parameter of
            stacked experts is a module of each expert: "experts.3.down_proj".
        scales: by module.
        num_values: of all factors.
    """

    name: str
    folder: Path
    modules: Mapping[str, FactorKeys]
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
            found = {module: keys.factors(tensors) for module, keys in self.modules.items()}
        except (SafetensorError, OSError, KeyError) as error:
            raise _damaged(file, error) from error

        def factors(module: str) -> LowRankFactors:
            down, up = (tensor.float() for tensor in found[module])
            is_swapped = self.modules[module].is_swapped
            return LowRankFactors(down, up * self.scales[module], is_swapped)

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
            # Other names may be those of a module's tensors, and end in a dot.
            name = without_prefix(f"{module.removeprefix(_PEFT_PREFIX)}.", other_names)[:-1]
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

    def skip(self, module: str) -> bool:
        """Implement `FactorSource.skip`."""
        self._taken.add(module)
        return module in self._modules

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
    pairs = dict(_factors_of(folder, shapes))
    parameters = _parameters_of(folder, config, pairs)
    modules, scales = {}, {}
    for wrapper, (down, up) in pairs.items():
        module, parameter = parameters[wrapper]
        name = module if parameter is None else f"{module}.{parameter}"
        rank, scale = _rank_and_scale(folder, config, name.removeprefix(_PEFT_PREFIX))
        num_experts = _num_experts(folder, wrapper, rank, shapes[down], shapes[up])
        if parameter not in _STACKS:
            if num_experts != 1:
                raise _refused(
                    folder, f"{wrapper} has rank {shapes[down][0]}, its config states {rank}"
                )
            modules[module], scales[module] = FactorKeys(down, up), scale
            continue
        is_swapped = _is_swapped(module, pairs, shapes)
        for expert in range(num_experts):
            name = f"{module}.{expert}.{parameter}"
            modules[name] = FactorKeys(down, up, expert, num_experts, is_swapped)
            scales[name] = scale
    if not modules:
        raise _refused(folder, f"{WEIGHTS} has no tensors")
    num_values = sum(math.prod(shapes[key]) for keys in pairs.values() for key in keys)
    return Adapter(folder.name, folder, modules, scales, num_values)


def _parameters_of(
    folder: Path, config: Mapping[str, Any], modules: Iterable[str]
) -> dict[str, tuple[str, str | None]]:
    """Return each module of the file without wrappers, and its parameter if one is adapted."""
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise _refused(folder, "target_parameters is no list of names")
    for target in targets:
        if target.rpartition(".")[2] not in (*_STACKS, "weight"):
            raise _refused(folder, f"target_parameters {target[:80]!r} is not supported")
    wrappers: dict[str, list[str]] = {}
    for name in modules:
        wrappers.setdefault(name.split(_BASE_LAYER)[0], []).append(name)
    found: dict[str, tuple[str, str | None]] = {}
    for module, names in wrappers.items():
        parameters: list[str | None] = [
            parameter
            for parameter in (_STACKS if module.endswith(".experts") else ("weight",))
            if any(f".{module}.{parameter}".endswith(f".{target}") for target in targets)
        ]
        outer = [module + _BASE_LAYER * depth for depth in reversed(range(len(names)))]
        if sorted(outer) != sorted(names) or len(parameters or [None]) != len(names):
            raise _refused(
                folder,
                f"{module} has the factors {', '.join(sorted(names))[:200]}, its config targets "
                f"{', '.join(map(str, parameters)) or 'no parameter of it'}",
            )
        # The innermost wrapper is of the first parameter.
        found |= {
            name: (module, parameter)
            for name, parameter in zip(outer, parameters or [None], strict=True)
        }
    return found


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


def _is_swapped(
    module: str, pairs: Mapping[str, tuple[str, str]], shapes: Mapping[str, Sequence[int]]
) -> bool | None:
    """Return whether the factors of experts are swapped; None if only one stack has any.

    With both, their shapes tell: inputs of one are outputs of the other.
    """
    inner, outer = pairs.get(module + _BASE_LAYER), pairs.get(module)
    if inner is None or outer is None:
        return None
    inputs, outputs = shapes[inner[0]][-1], shapes[inner[1]][0]
    return (inputs, outputs) == (2 * shapes[outer[1]][0], shapes[outer[0]][-1])


def _num_experts(
    folder: Path, module: str, rank: int, down: Sequence[int], up: Sequence[int]
) -> int:
    """Return how many factors of a rank the tensors with these shapes have: 1, or experts."""
    is_pair = len(down) == len(up) == 2 and down[0] == up[1]
    num_experts, rest = divmod(down[0], rank) if is_pair else (0, 0)
    if not is_pair or num_experts > _MAX_EXPERTS:
        raise _refused(
            folder,
            f"{module} has factors {list(down)} and {list(up)}, not [r, in] and [out, r], for up to "
            f"{_MAX_EXPERTS} experts",
        )
    if rest or not num_experts:
        raise _refused(folder, f"{module} has rank {down[0]}, its config states {rank}")
    return num_experts


def _rank_and_scale(folder: Path, config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return the rank of a module's update and its scale, as PEFT's config states them."""
    rank = _of_module(folder, config, "rank_pattern", module, config.get("r", 8))
    alpha = _of_module(folder, config, "alpha_pattern", module, config.get("lora_alpha", 8))
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        raise _refused(
            folder, f"{module} has rank {json.dumps(rank)[:80]}, not one from 1 to {MAX_RANK}"
        )
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise _refused(folder, f"lora_alpha {json.dumps(alpha)[:80]} is no number")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


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
