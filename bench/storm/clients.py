"""Clients of a storm that its routers tell apart, with weights and quotas of their own."""

import secrets
from collections.abc import Sequence
from pathlib import Path

from runtime.security.access import PLAIN_CHANNEL, ChannelSecurity, client_security

OPERATOR = "operator"  # changes adapters, and looks at the workers


class StormClients:
    """Holders of tokens in `folder`; with no `names`, all calls are of one client without any."""

    def __init__(self, names: Sequence[str], limits: str, folder: Path) -> None:
        """Write the tokens, and the file of limits."""
        self._names = names
        self._folder = folder
        if not names:
            return
        folder.mkdir()
        tokens = {name: secrets.token_hex() for name in (*names, OPERATOR)}
        for name, token in tokens.items():
            self._file(name).write_text(token)
        (folder / "tokens").write_text("".join(f"{name} {tokens[name]}\n" for name in tokens))
        (folder / "limits").write_text(limits)

    @property
    def router_flags(self) -> tuple[str, ...]:
        if not self._names:
            return ()
        files = {
            "--token-file": self._folder / "tokens",
            "--client-limits": self._folder / "limits",
        }
        paths = [part for flag, path in files.items() for part in (flag, str(path))]
        return (*paths, "--operator-tokens", OPERATOR)

    @property
    def operator(self) -> ChannelSecurity:
        return self._security(OPERATOR)

    @property
    def clients(self) -> list[ChannelSecurity]:
        """Return how each client connects."""
        return [self._security(name) for name in self._names] or [PLAIN_CHANNEL]

    def _security(self, name: str) -> ChannelSecurity:
        return client_security(token_file=self._file(name)) if self._names else PLAIN_CHANNEL

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.token"
