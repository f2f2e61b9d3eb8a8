"""Models of the Hugging Face Hub, downloaded once into its cache."""

import re
from pathlib import Path

from runtime.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What a checkpoint needs: weights, settings, tokenizer, chat template.
_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
# The same weights in other formats.
_OTHER_FORMATS = ("original/*", "consolidated*", "onnx/*", "*/*")


def is_hub_name(text: str) -> bool:
    """Return whether a text that names no folder has the form of a name on the Hub, OWNER/NAME."""
    return _NAME.fullmatch(text) is not None and not Path(text).exists()


def download(name: str, revision: str = "") -> Path:
    """Return the folder of a model of the Hub. Shows a progress bar while files are downloaded.

    Without a network it is the folder of an earlier download.

    Raises:
        ConfigError: there is no such model or revision, access to it is restricted, the Hub cannot be
            reached, or the disk is full.
    """
    # Imported here, because it takes a third of a second.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=list(_FILES),
            ignore_patterns=list(_OTHER_FORMATS),
        )
    except GatedRepoError:
        reason = f"its access is restricted: accept its terms at {hub}/{name}, then `hf auth login`"
    except RevisionNotFoundError:
        reason = f"{hub} has no revision {revision!r} of it"
    except RepositoryNotFoundError:
        reason = f"{hub} has no such model, or it is private: `hf auth login`"
    except LocalEntryNotFoundError:
        reason = f"{hub} cannot be reached, and it was not downloaded before"
    except HfHubHTTPError as error:
        reason = f"{hub} refused: {_first_line(error)}"
    except OSError as error:
        reason = f"it cannot be stored in {constants.HF_HUB_CACHE}: {error.strerror or error}"
    else:
        return Path(folder)
    raise ConfigError(
        f"{name} is not a folder here. On the Hugging Face Hub: {reason}", field="model"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
