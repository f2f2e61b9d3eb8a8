"""First question that `baton up` suggests."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from urllib.request import getproxies, proxy_bypass

from baton.values import ModelInfo


@dataclass(frozen=True)
class FirstQuestion:
    """Prompt in the form that a model responds to, and the length of the response."""

    prompt: str
    is_chat: bool = False
    is_ids: bool = False
    max_tokens: int | None = None

    @classmethod
    def of(cls, model: ModelInfo | None) -> Self:
        """Return the question for a model; None is the demo model, which can count."""
        if model is None:
            return cls("Count from 3 by 2.", is_chat=True)
        if model.has_chat_template:
            return cls("Hello!", is_chat=True, max_tokens=64)
        if model.has_tokenizer:
            return cls("Once upon a time", max_tokens=32)
        return cls("1,2,3", is_ids=True, max_tokens=8)

    def words(self) -> str:
        """Return the question as arguments of `baton generate`."""
        prompt = (
            f"--ids {self.prompt}" if self.is_ids else f'{"--chat " * self.is_chat}"{self.prompt}"'
        )
        return prompt if self.max_tokens is None else f"{prompt} --max-tokens {self.max_tokens}"

    def curl(self, address: str, model: str, *, has_keys: bool = False) -> str:
        """Return the question as a `curl` command for the gateway at HOST:PORT.

        With keys the command takes one from the variable BATON_API_KEY.
        If the environment names a proxy for that address, curl bypasses it.
        """
        asked: Mapping[str, object] = {"prompt": self.prompt}
        if self.is_chat:
            asked = {"messages": [{"role": "user", "content": self.prompt}]}
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        path = "chat/completions" if self.is_chat else "completions"
        header = shlex.quote("content-type: application/json")
        data = shlex.quote(json.dumps({"model": model, "temperature": 0, **limit, **asked}))
        proxy = "--noproxy '*' " if _goes_by_proxy(address) else ""
        key = ' -H "authorization: Bearer $BATON_API_KEY"' if has_keys else ""
        return f"curl {proxy}http://{address}/v1/{path} -H {header}{key} -d {data}"


def _goes_by_proxy(address: str) -> bool:
    return bool({"http", "all"} & getproxies().keys()) and not proxy_bypass(address)
