"""Typed part of UCXX's core API that Baton uses; UCXX itself has no types."""

import ctypes
import importlib.util
import os
from typing import Protocol

from engine.memory.layout import Buffer
from runtime.errors import ConfigError


class UcxTag(Protocol):
    @property
    def value(self) -> int: ...


class UcxRequest(Protocol):
    @property
    def completed(self) -> bool: ...

    def check_error(self) -> None:
        """Raise `UcxLibrary.error` if the request has failed."""
        ...


class UcxProbe(Protocol):
    """Result of a probe.

    `length` and `sender_tag` exist only if `matched`. A matched message must be received.
    """

    @property
    def matched(self) -> bool: ...

    @property
    def length(self) -> int: ...

    @property
    def sender_tag(self) -> UcxTag: ...


class UcxAddress(Protocol):
    def tobytes(self) -> bytes: ...


class UcxEndpoint(Protocol):
    @property
    def alive(self) -> bool: ...

    def tag_send(self, array: object, tag: UcxTag) -> UcxRequest: ...

    def close_blocking(self, period_ns: int, max_attempts: int) -> None: ...


class UcxContext(Protocol):
    @property
    def info(self) -> str: ...


class UcxWorker(Protocol):
    @property
    def address(self) -> UcxAddress: ...

    @property
    def epoll_file_descriptor(self) -> int: ...

    def init_blocking_progress_mode(self) -> None: ...

    def arm(self) -> bool:
        """Return False if there is work now; otherwise the descriptor becomes readable with work."""
        ...

    def progress(self) -> None: ...

    def progress_once(self) -> bool:
        """Return whether any work was done."""
        ...

    def create_endpoint_from_worker_address(
        self, address: UcxAddress, *, endpoint_error_handling: bool
    ) -> UcxEndpoint: ...

    def tag_probe(self, tag: UcxTag, tag_mask: object, *, remove: bool) -> UcxProbe: ...

    def tag_recv_with_handle(self, array: object, probe: UcxProbe) -> UcxRequest: ...


def load_ucx() -> None:
    """Load UCX's own library before `UcxLibrary`, which uses the same one.

    This does not hold the interpreter's lock, so other threads run meanwhile. A missing library is
    ignored.
    """
    _prepare_environment()
    package = importlib.util.find_spec("libucx")
    prefers_system = (
        os.environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "false").lower() != "false"
    )
    folders = [] if package is None or prefers_system else package.submodule_search_locations or []
    open_library = ctypes.CDLL(None).dlopen
    open_library.argtypes = (ctypes.c_char_p, ctypes.c_int)
    open_library.restype = ctypes.c_void_p
    for name in (*(f"{folder}/lib/libucs.so" for folder in folders), "libucs.so.0"):
        if open_library(name.encode(), os.RTLD_NOW):
            return


def _prepare_environment() -> None:
    """Set the variables that UCX reads while it loads."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    os.environ.setdefault("UCX_MEMTYPE_CACHE", "n")


class UcxLibrary:
    """The loaded UCXX library: its constructors with the types above.

    Raises:
        ConfigError: UCXX is not installed, or its libraries cannot be loaded.
    """

    def __init__(self) -> None:
        _prepare_environment()
        try:
            import ucxx._lib.libucxx as ucx
            from ucxx._lib.arr import Array
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"UCX is not usable: {error}; install the ucx extra", field="transport"
            ) from error
        self._ucx = ucx
        self._array = Array
        self.error: type[Exception] = ucx.UCXError
        self.no_tag_mask: object = ucx.UCXXTagMask(0)

    def context(self, options: dict[str, str]) -> UcxContext:
        """Create a context; `options` are by name without the UCX_ prefix.

        Raises `error` if no usable transport is left.
        """
        context: UcxContext = self._ucx.UCXContext(
            options, (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
        )
        return context

    def worker(self, context: UcxContext) -> UcxWorker:
        """Create a worker that can sleep."""
        worker: UcxWorker = self._ucx.UCXWorker(context)
        worker.init_blocking_progress_mode()
        return worker

    def address(self, raw: bytes) -> UcxAddress:
        address: UcxAddress = self._ucx.UCXAddress.create_from_buffer(raw)
        return address

    def tag(self, value: int) -> UcxTag:
        tag: UcxTag = self._ucx.UCXXTag(value)
        return tag

    def array(self, buffer: Buffer | bytearray | bytes) -> object:
        """Return a view of the buffer for UCXX, which keeps the buffer alive.

        The buffer is host bytes, or device memory with `__cuda_array_interface__`.
        """
        array: object = self._array(buffer)
        return array
