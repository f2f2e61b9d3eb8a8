"""Bearer tokens: one per line of a file; blank lines and lines that begin with # are ignored.

    7f3a...             a token
    batch 7f3a...       a token whose holder is named batch; several tokens may have one name

    TokenList(path).check("Bearer abc...")      servers: accept any token of the file, so that clients can switch
    OwnToken(path).current()                    clients: the first token of the file

Both check the file for changes at every call.
"""

import hashlib
import hmac
import re
from pathlib import Path

from runtime.errors import ConfigError, UnauthenticatedError
from runtime.security.file_reload import Contents, Watched

AUTHORIZATION_KEY = "authorization"
MIN_TOKEN_CHARACTERS = 16
_SETTING = "token_file"
_SCHEME = "bearer"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,15}")  # shorter than any token, so a token never matches


class TokenList:
    """Tokens that a server accepts. Only their digests are kept."""

    def __init__(self, path: Path) -> None:
        """Load the tokens.

        Raises ConfigError if the file cannot be read, has no token, or has one that is too short.
        """
        self._holders = Watched(
            {_SETTING: path},
            lambda contents: tuple(
                (_digest(token), name) for name, token in _tokens_in(path, contents)
            ),
        )

    def check(self, authorization: str | None) -> str:
        """Return the name of the token's holder, or a part of its digest if it has no name.

        Takes the same time whichever token matches, and however much of it is right.

        Raises:
            UnauthenticatedError: the header does not carry one of the tokens.
        """
        if authorization is None:
            raise UnauthenticatedError("no token: send the metadata authorization: Bearer TOKEN")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != _SCHEME:
            raise UnauthenticatedError("the authorization metadata must be: Bearer TOKEN")
        given = _digest(token.strip())
        found = [
            name or f"token-{hashlib.sha256(digest).hexdigest()[:12]}"
            for digest, name in self._holders.current()
            if hmac.compare_digest(given, digest)
        ]
        if not found:
            raise UnauthenticatedError("the token is not one of those this server accepts")
        return found[0]


class OwnToken:
    """Token that a client presents."""

    def __init__(self, path: Path) -> None:
        """Load the token. Raises ConfigError as TokenList does."""
        self._token = Watched({_SETTING: path}, lambda contents: _tokens_in(path, contents)[0][1])

    def metadata(self) -> tuple[str, str]:
        return AUTHORIZATION_KEY, f"Bearer {self._token.current()}"


def read_tokens(path: Path) -> list[tuple[str, str]]:
    """Return (name or "", token) pairs, for code that compares tokens itself.

    Raises ConfigError as TokenList does.
    """
    return Watched({_SETTING: path}, lambda contents: _tokens_in(path, contents)).current()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _tokens_in(path: Path, contents: Contents) -> list[tuple[str, str]]:
    """Return (name or "", token) pairs."""
    try:
        lines = [line.strip() for line in contents[_SETTING].decode("ascii").splitlines()]
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{_SETTING}: {path} has bytes that are not ASCII", field=_SETTING
        ) from error
    tokens = [_named(line) for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ConfigError(f"{_SETTING}: {path} has no token", field=_SETTING)
    for number, (_, token) in enumerate(tokens, 1):
        if not is_token(token):
            raise ConfigError(
                f"{_SETTING}: token {number} of {path} must be at least {MIN_TOKEN_CHARACTERS} "
                "characters without spaces",
                field=_SETTING,
            )
    return tokens


def is_token(text: str) -> bool:
    """Return whether a text can be a token: long enough, printable ASCII without spaces."""
    is_long = len(text) >= MIN_TOKEN_CHARACTERS
    return is_long and text.isascii() and text.isprintable() and " " not in text


def _named(line: str) -> tuple[str, str]:
    name, space, token = line.partition(" ")
    return (name, token.strip()) if space and _NAME.fullmatch(name) else ("", line)
