"""Cache tensors of one stage, for its own layers only, by global layer id."""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from engine.core.layer_range import LayerRange
from engine.memory.cache_memory import cleared_cache
from engine.memory.layout import NULL_INDEX, CacheKind, CacheSpec, PoolGeometry
from runtime.errors import ConfigError, InternalError

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
}


class LayerTensors(Mapping[int, Tensor]):
    """The tensors of one cache kind by global layer id.

    A layer that this stage does not have raises InternalError.
    """

    def __init__(self, kind: CacheKind, layers: LayerRange, tensors: dict[int, Tensor]) -> None:
        self._kind = kind
        self._layers = layers
        self._tensors = tensors

    def __getitem__(self, layer_id: int) -> Tensor:
        if layer_id not in self._tensors:
            raise _missing(layer_id, self._kind, self._layers)
        return self._tensors[layer_id]

    def __contains__(self, layer_id: object) -> bool:
        return layer_id in self._tensors

    def __iter__(self) -> Iterator[int]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class StagePools:
    """All cached tensors of a stage.

    A tensor is [num_pages, *record_shape] or [num_slots, *record_shape] per layer and kind. The
    class implements `transfer.agent.stage_transfer.PoolMemory`. If a stage has no layer of a kind,
    its mapping is empty.
    """

    def __init__(
        self, geometry: PoolGeometry, *, device: str = "cpu", poison: bool = False
    ) -> None:
        """Allocate and clear all tensors.

        `poison` fills all but the null records with NaN instead, for tests.

        Raises:
            ConfigError: a spec that torch cannot store, two specs for one tensor, or a pool without
                its null record.
        """
        self._geometry = geometry
        self._device = torch.device(device)
        self._specs: dict[tuple[int, CacheKind], CacheSpec] = {}
        self._tensors: dict[CacheKind, dict[int, Tensor]] = {kind: {} for kind in CacheKind}
        for spec in geometry.local_specs():
            self._allocate(spec)
        self._bytes = (
            {key: _bytes_of(self._tensors[key[1]][key[0]]) for key in self._specs}
            if self._on_host
            else {}
        )
        if poison:
            self.poison(
                page_ids=range(1, geometry.num_pages), slot_ids=range(1, geometry.num_slots)
            )

    @property
    def geometry(self) -> PoolGeometry:
        return self._geometry

    @property
    def kv(self) -> LayerTensors:
        """Return [num_pages, 2, num_kv_heads, page_size, head_dim] per attention layer.

        K is at index 0, V at index 1.
        """
        return self.of_kind(CacheKind.KV)

    @property
    def conv(self) -> LayerTensors:
        """Return [num_slots, conv_kernel - 1, channels] per recurrent layer."""
        return self.of_kind(CacheKind.CONV)

    @property
    def state(self) -> LayerTensors:
        """Return [num_slots, num_v_heads, head_k_dim, head_v_dim] fp32 per recurrent layer."""
        return self.of_kind(CacheKind.STATE)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors of this stage."""
        return sum(
            spec.record_bytes * self._num_records(spec.kind) for spec in self._specs.values()
        )

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over all tensors."""
        return (tensor for tensors in self._tensors.values() for tensor in tensors.values())

    def of_kind(self, kind: CacheKind) -> LayerTensors:
        return LayerTensors(kind, self._geometry.layers, self._tensors[kind])

    def view(
        self,
        layer_id: int,
        kind: CacheKind,
        first_index: int,
        count: int,
        part: slice | None = None,
    ) -> memoryview:
        """Return the writable bytes of `count` records from `first_index` on, in place.

        Of a single record, `part` selects a range of bytes.

        Raises:
            InternalError: the stage does not have the layer, kind, index or part, or the pools are
                not in host memory.
        """
        stretch = self._stretch(layer_id, kind, first_index, count, part)
        if not self._on_host:
            raise InternalError(
                f"{kind} of layer {layer_id} is on {self._device}, which has no host bytes"
            )
        return self._bytes[layer_id, kind][stretch]

    def records(
        self,
        layer_id: int,
        kind: CacheKind,
        first_index: int,
        count: int,
        part: slice | None = None,
    ) -> Tensor:
        """Return the bytes of records as [num_bytes] uint8, on any device.

        The arguments are those of `view`.

        Raises:
            InternalError: the stage does not have the layer, kind, index or part.
        """
        stretch = self._stretch(layer_id, kind, first_index, count, part)
        return self._tensors[kind][layer_id].view(-1).view(torch.uint8)[stretch]

    def _stretch(
        self, layer_id: int, kind: CacheKind, first_index: int, count: int, part: slice | None
    ) -> slice:
        """Return the range of these records in the bytes of their tensor."""
        spec = self._specs.get((layer_id, kind))
        if spec is None:
            raise _missing(layer_id, kind, self._geometry.layers)
        end = first_index + count
        if first_index < 0 or count < 0 or end > self._num_records(kind):
            raise InternalError(
                f"{kind} records {first_index}-{end} of layer {layer_id} "
                f"are outside 0-{self._num_records(kind)} (stage has layers {self._geometry.layers})"
            )
        start = first_index * spec.record_bytes
        if part is None:
            return slice(start, end * spec.record_bytes)
        if count != 1 or not 0 <= part.start <= part.stop <= spec.record_bytes:
            raise InternalError(
                f"bytes {part.start}-{part.stop} of {count} records of {spec.record_bytes} bytes: "
                f"{kind} of layer {layer_id}"
            )
        return slice(start + part.start, start + part.stop)

    def poison(self, *, page_ids: Iterable[int] = (), slot_ids: Iterable[int] = ()) -> None:
        """Overwrite records with NaN, so that a forbidden read shows in every result. For tests.

        The null record stays finite: padded reads go there and are masked by multiplication with
        zero.
        """
        indices = {
            True: [i for i in page_ids if i != NULL_INDEX],
            False: [i for i in slot_ids if i != NULL_INDEX],
        }
        for kind, tensors in self._tensors.items():
            for tensor in tensors.values():
                nothing = math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
                tensor[indices[kind.is_paged]] = nothing

    @property
    def _on_host(self) -> bool:
        return self._device.type == "cpu"

    def _num_records(self, kind: CacheKind) -> int:
        return self._geometry.num_pages if kind.is_paged else self._geometry.num_slots

    def _allocate(self, spec: CacheSpec) -> None:
        key = (spec.layer_id, spec.kind)
        name = f"{spec.kind} of layer {spec.layer_id}"
        dtype = _DTYPES.get(spec.dtype)
        if dtype is None or dtype.itemsize != spec.item_bytes:
            raise ConfigError(
                f"{name} cannot be stored as {spec.dtype} of {spec.item_bytes} bytes", field="dtype"
            )
        if key in self._specs:
            raise ConfigError(f"{name} is declared twice", field="specs")
        if self._num_records(spec.kind) < 1:
            field = "num_pages" if spec.kind.is_paged else "num_slots"
            raise ConfigError(
                f"{name} needs {field} of at least 1 for the null record", field=field
            )
        shape = (self._num_records(spec.kind), *spec.record_shape)
        self._specs[key] = spec
        self._tensors[spec.kind][spec.layer_id] = cleared_cache(shape, dtype, self._device)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _missing(layer_id: int, kind: CacheKind, layers: LayerRange) -> InternalError:
    if layer_id in layers:
        return InternalError(f"layer {layer_id} keeps no {kind} (stage has layers {layers})")
    return InternalError(f"layer {layer_id} is not on this stage, which has layers {layers}")
