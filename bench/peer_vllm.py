"""vLLM's side of `bench.peers`: `PYTHON -P peer_vllm.py CHECKPOINT CONTEXT MAX_ROWS`, with a Python that has vLLM.

Reads one JSON command per line and answers with one, as `bench.engine_sides` does.
"""

import json
import os
import random
import sys
import time


class VllmSide:
    def __init__(self, checkpoint: str, context: int, max_rows: int) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

        self._new_parameters = SamplingParams
        self._engine = LLM(model=checkpoint, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=4096,
                           enable_prefix_caching=False, max_num_seqs=max_rows, seed=0).llm_engine
        self._context, self._random, self._num_requests = context, random.Random(1), 0
        self._running: list[str] = []

    def prefill(self, tokens: int) -> list[float]:
        self._end()
        self._add(tokens, 1)
        began = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return [time.perf_counter() - began]

    def begin(self, rows: int) -> None:
        self._end()
        self._running = [self._add(self._context, 1000) for _ in range(rows)]
        begun: set[str] = set()
        while len(begun) < rows:
            begun |= {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}
        self._engine.step()

    def decode(self, steps: int) -> list[float]:
        """Seconds of steps in which every row gains a token."""
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - began)
        return seconds

    def _add(self, tokens: int, max_tokens: int) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        prompt = {"prompt_token_ids": [self._random.randrange(1000, 150000) for _ in range(tokens)]}
        self._engine.add_request(name, prompt, self._new_parameters(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False))
        return name

    def _end(self) -> None:
        if self._running:
            self._engine.abort_request(self._running)
            self._running = []
        while self._engine.has_unfinished_requests():
            self._engine.step()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    side = VllmSide(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"ready": []}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        seconds: list[float] = []
        if command["do"] == "prefill":
            seconds = side.prefill(command["tokens"])
        elif command["do"] == "begin":
            side.begin(command["rows"])
        else:
            seconds = side.decode(command["steps"])
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
