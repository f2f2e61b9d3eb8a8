"""A prompt as those see it who choose workers."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protos import types_pb2
from runtime.prefix_blocks import block_names


@dataclass(frozen=True)
class RoutedPrompt:
    """`salt` and `uses_cache` as in `baton.v1.EngineRequest`."""

    token_ids: Sequence[int]
    salt: str = ""
    uses_cache: bool = True
    _names: dict[tuple[int, str], tuple[bytes, ...]] = field(default_factory=dict, init=False, compare=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def block_names(self, page_size: int, compatibility: str) -> tuple[bytes, ...]:
        """Of the blocks that a worker may have and need not compute: all but the last token, which draws the next one.
        Digested once for workers that are alike."""
        if not self.uses_cache:
            return ()
        key = page_size, compatibility
        if key not in self._names:
            self._names[key] = block_names(self.token_ids[:-1], page_size, compatibility=compatibility, salt=self.salt)
        return self._names[key]


def prompt_of(request: types_pb2.EngineRequest) -> RoutedPrompt:
    uses_cache = request.prefix_cache if request.HasField("prefix_cache") else True
    is_scored = request.HasField("num_prompt_logprobs")  # then every token is computed
    return RoutedPrompt(request.prompt_token_ids, request.cache_salt, uses_cache and not is_scored)
