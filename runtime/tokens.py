"""Bearer tokens: one per line of a file; blank lines and lines that begin with # do not count.

    TokenList(path).check("Bearer abc...")      servers: any token of the file is good, so that clients can change over
    OwnToken(path).current()                    clients: the first token of the file

Both look at the file again whenever they are asked.
"""

import hashlib
import hmac
from pathlib import Path

from runtime.errors import ConfigError, UnauthenticatedError
from runtime.watched import Contents, Watched

AUTHORIZATION_KEY = "authorization"
MIN_TOKEN_CHARACTERS = 16
_SETTING = "token_file"
_SCHEME = "bearer"


class TokenList:
    """The tokens that open a server. Only their digests are kept."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be read, has no token, or one that is easily guessed."""
        self._digests = Watched({_SETTING: path}, lambda contents: tuple(map(_digest, _tokens_in(path, contents))))

    def check(self, authorization: str | None) -> None:
        """Raises UnauthenticatedError unless the header carries one of the tokens. Takes the same time whichever of
        them it is, and how much of it is right."""
        if authorization is None:
            raise UnauthenticatedError("no token: send the metadata authorization: Bearer TOKEN")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != _SCHEME:
            raise UnauthenticatedError("the authorization metadata must be: Bearer TOKEN")
        given = _digest(token.strip())
        if sum([hmac.compare_digest(given, digest) for digest in self._digests.current()]) == 0:
            raise UnauthenticatedError("the token is not one of those this server accepts")


class OwnToken:
    """The token a client shows."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError as TokenList does."""
        self._token = Watched({_SETTING: path}, lambda contents: _tokens_in(path, contents)[0])

    def metadata(self) -> tuple[str, str]:
        return AUTHORIZATION_KEY, f"Bearer {self._token.current()}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _tokens_in(path: Path, contents: Contents) -> list[str]:
    try:
        lines = [line.strip() for line in contents[_SETTING].decode("ascii").splitlines()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_SETTING}: {path} has bytes that are not ASCII", field=_SETTING) from error
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ConfigError(f"{_SETTING}: {path} has no token", field=_SETTING)
    for number, token in enumerate(tokens, 1):
        if len(token) < MIN_TOKEN_CHARACTERS or not token.isprintable() or " " in token:
            raise ConfigError(f"{_SETTING}: token {number} of {path} must be at least {MIN_TOKEN_CHARACTERS} "
                              "characters without spaces", field=_SETTING)
    return tokens
