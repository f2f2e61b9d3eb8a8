"""Pages that remember which tokens their entries are of: what a scheduler plans is checked as a
model would use it."""

from collections.abc import Collection, Sequence


class TokenMemory:
    """Memory in which a read must return the request's own tokens, and shared pages are never
    written."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: dict[int, dict[int, int]] = {}

    def read(self, page_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """Return the entries of a request's first tokens."""
        for place, token in enumerate(tokens):
            entry = self._pages[page_ids[place // self._page_size]][place % self._page_size]
            assert entry == token, "another request's entry"

    def write(
        self, page_ids: Sequence[int], start: int, tokens: Sequence[int], *, kept: Collection[int]
    ) -> None:
        """Write entries of the tokens from `start` on; `kept` pages are shared and read-only."""
        for place, token in enumerate(tokens, start):
            page_id = page_ids[place // self._page_size]
            assert page_id not in kept, "what others read is written"
            self._pages.setdefault(page_id, {})[place % self._page_size] = token

    def spoil(self, page_ids: Sequence[int], start: int, end: int) -> None:
        """Invalidate the entries."""
        self.write(page_ids, start, [-1] * (end - start), kept=())
