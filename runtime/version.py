"""The version of this tree; pyproject.toml reads it here."""

VERSION = "0.1.0"
