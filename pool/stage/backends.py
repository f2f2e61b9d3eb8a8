"""The choice of a stage's backends by the configured device."""

from importlib.util import find_spec

import torch

from engine.assembly.backend_set import Backends
from engine.assembly.cpu import CpuBackends
from engine.core.numerics import HOST, Numerics
from models.blocks.attention import AttentionSpec
from models.blocks.kimi_delta import KimiDeltaSpec
from models.loader import ModelDescription
from runtime.errors import ConfigError


def choose_backends(
    device_name: str, numerics: Numerics, description: ModelDescription
) -> Backends:
    """Return the backends for `--device`, without loading the model.

    Raises:
        ConfigError: the device or a library is missing, or it does not support these numerics or
            this model; the message names the field.
    """
    device = torch.device(device_name)
    if device == HOST:
        return CpuBackends(numerics)
    check_device(device)
    check_offered(device, numerics, description)
    # Needs Triton, which a host without a device may lack.
    from engine.assembly.cuda import DeviceBackends

    return DeviceBackends.on(torch.device(device.type, device.index or 0))


def check_device(device: torch.device) -> None:
    """Check that this machine has the CUDA device and the libraries for it.

    Raises:
        ConfigError: one is missing.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {device} needs a CUDA device and a CUDA build of torch; torch {torch.__version__} "
            f"finds none here",
            field="device",
        )
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {device} is not among the {torch.cuda.device_count()} of this machine",
            field="device",
        )
    missing = [name for name in ("flashinfer", "triton") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"device {device} needs {' and '.join(missing)}: install the extra `gpu`, or run with device "
            f"cpu",
            field="device",
        )


def check_offered(device: torch.device, numerics: Numerics, description: ModelDescription) -> None:
    """Check that a CUDA device supports these numerics and this model.

    Raises:
        ConfigError: only the host does.
    """
    if numerics is Numerics.EXACT:
        raise ConfigError(
            f"exact numerics are offered on device cpu only; with device {device} use numerics fast",
            field="numerics",
        )
    geometry = description.attention_geometry(page_size=1)
    if geometry is not None and geometry.windowed is not None:
        raise ConfigError(
            f"layers with sliding windows run on device cpu only, not on {device}", field="device"
        )
    mixers = [layer.mixer for layer in description.spec.layers]
    if any(isinstance(mixer, AttentionSpec) and mixer.sinks for mixer in mixers):
        raise ConfigError(
            f"attention sinks run on device cpu only, not on {device}", field="device"
        )
    if any(isinstance(mixer, KimiDeltaSpec) for mixer in mixers):
        raise ConfigError(
            f"layers of Kimi Delta Attention run on device cpu only, not on {device}",
            field="device",
        )
