"""The adapters in the memory of a stage."""

from collections.abc import Callable
from pathlib import Path

from models.adapters import Adapter, read_adapter
from models.decoder import DecoderStage
from models.loader import ModelDescription
from runtime.errors import ConfigError
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

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the adapters in memory. Any thread."""
        return self._model.adapters.rows.names

    def load(self, key: str) -> None:
        """Load an adapter while the stage serves. Any thread but that of the stage, one at a time.

        Raises:
            ConfigError: the folder has no such adapter, or another version of it, or it does not fit
                the model. Nothing has changed then.
        """
        self._description.load_adapter(self._model, self._read(key))
        try:
            self._read(key)
        except ConfigError:
            # The file changed while it was read. No batch has had the adapter yet.
            self._model.adapters.drop(key)
            raise

    def drop(self, key: str) -> None:
        """Release an adapter that no batch has any more. The thread of the stage."""
        self._forget(key)
        self._model.adapters.drop(key)

    def _read(self, key: str) -> Adapter:
        adapter = read_adapter(adapter_folder(self._folder, adapter_name(key)))
        if adapter.key != key:
            raise ConfigError(
                f"{adapter.folder} has another version of the adapter than {key}: {adapter.key}",
                field="adapters",
            )
        return adapter
