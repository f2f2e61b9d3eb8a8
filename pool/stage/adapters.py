"""The adapters in the memory of a stage."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.kernels.host.codegen.one_thread import stand_back
from models.adapters import read_adapter
from models.decoder import DecoderStage
from models.loader import ModelDescription
from runtime.model_files.adapter_folders import adapter_folder, adapter_name


class LoadedAdapters:
    """The adapters that a stage has loaded from its folder. They are named by their keys.

    `forget` drops the recorded steps of an adapter; without them its memory is free.
    """

    def __init__(
        self,
        folder: Path,
        description: ModelDescription,
        model: DecoderStage,
        forget: Callable[[str], object],
    ) -> None:
        self._folder = folder
        self._description = description
        self._model = model
        self._forget = forget
        # Steps go first: on busy cores a load would otherwise take as much time from them as it needs.
        self.loading = ThreadPoolExecutor(1, "adapters", initializer=stand_back)

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the adapters in memory. Any thread."""
        return self._model.adapters.rows.names

    def load(self, key: str) -> None:
        """Load an adapter while the stage serves. For the thread of `loading`.

        Raises:
            ConfigError: the folder has no such adapter, or another version of it, or it does not fit
                the model. Nothing has changed then.
        """
        adapter = read_adapter(adapter_folder(self._folder, adapter_name(key)))
        self._description.load_adapter(self._model, adapter, key)

    def drop(self, key: str) -> None:
        """Release an adapter that no batch has any more. The thread of the stage."""
        self._forget(key)
        self._model.adapters.drop(key)
