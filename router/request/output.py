"""What the client gets of the tokens: ids, text up to a stop string, logprobs, usage."""

from collections.abc import Sequence

from protos import generation_pb2, types_pb2
from router.text.detokenise import Detokeniser, StopMatcher


class Output:
    """One request's output so far. Every token passes through `add` exactly once, in order."""

    def __init__(self, engine: types_pb2.EngineRequest, stop_strings: Sequence[str],
                 detokeniser: Detokeniser | None) -> None:
        """`detokeniser` is None when the client wants ids only."""
        self._num_prompt_tokens = len(engine.prompt_token_ids)
        self._min_tokens = engine.min_tokens
        self._stop_token_ids = frozenset(engine.stop_token_ids)
        self._detokeniser = detokeniser
        self._stops = StopMatcher(stop_strings)
        self._num_scored = 1  # the first token of a prompt has no score
        self.num_tokens = 0
        self.stop_string: str | None = None  # the one that ended the request

    def add(self, tokens: types_pb2.TokenChunk) -> generation_pb2.GenerateChunk:
        """The chunk to send. If a stop string matched, it ends with the token that completed it."""
        text, used = "", 0
        for token_id in tokens.token_ids:
            used += 1
            self.num_tokens += 1
            text += self._text_of(token_id)
            if self.stop_string is not None:
                break
        return generation_pb2.GenerateChunk(token_ids=tokens.token_ids[:used], text=text,
                                            logprobs=tokens.logprobs[:used], usage=self.usage())

    def unseen(self, scores: types_pb2.PromptLogprobs) -> types_pb2.PromptLogprobs | None:
        """What of `scores` follows the positions that came before; None if nothing does."""
        skipped = self._num_scored - scores.first_position
        if skipped >= len(scores.token_ids):
            return None
        self._num_scored = scores.first_position + len(scores.token_ids)
        return types_pb2.PromptLogprobs(first_position=scores.first_position + skipped,
                                        token_ids=scores.token_ids[skipped:], logprobs=scores.logprobs[skipped:])

    def finish(self) -> str:
        """Text that was held back, now that no token follows."""
        if self._detokeniser is None or self.stop_string is not None:
            return ""
        text, self.stop_string = self._stops.feed(self._detokeniser.finish())
        return text if self.stop_string is not None else text + self._stops.finish()

    def usage(self) -> generation_pb2.Usage:
        return generation_pb2.Usage(prompt_tokens=self._num_prompt_tokens, completion_tokens=self.num_tokens)

    def _text_of(self, token_id: int) -> str:
        # A stop token can only be drawn as the last one; like a stop string, it is not part of the text.
        if self._detokeniser is None or token_id in self._stop_token_ids:
            return ""
        text = self._detokeniser.add(token_id)
        if self.num_tokens < self._min_tokens:
            return text  # stop strings count from the token that may be the last
        text, self.stop_string = self._stops.feed(text)
        return text
