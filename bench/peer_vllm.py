"""vLLM's side of `bench.peers` and `bench.mixed`, for a Python that has vLLM and none of our
packages:

    PYTHON -P peer_vllm.py turns CHECKPOINT MAX_ROWS CONTEXT
    PYTHON -P peer_vllm.py streams CHECKPOINT MAX_ROWS CHUNK

`turns` reads one JSON command per line and responds with one line, as `bench.engine_sides` does.
`streams` takes requests while others run ({"do": "add", "name", "prompt", "max_tokens"}, {"do":
"abort", "name"}) and writes a line per step with the number of tokens of each request. Both write a
first line when the model is loaded.
"""

import json
import os
import queue
import random
import sys
import threading
import time
from typing import Any, TextIO


class VllmEngine:
    """vLLM's engine in this process, stepped manually."""

    def __init__(self, checkpoint: str, max_rows: int, **settings: int) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        self._new_parameters = SamplingParams
        self._delta = RequestOutputKind.DELTA
        engine = LLM(
            model=checkpoint,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=4096,
            enable_prefix_caching=False,
            max_num_seqs=max_rows,
            seed=0,
            **settings,
        ).llm_engine
        self.step = engine.step
        self.abort = engine.abort_request
        self.has_requests = engine.has_unfinished_requests
        self._add = engine.add_request

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self._add(
            name,
            {"prompt_token_ids": prompt},
            self._new_parameters(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                output_kind=self._delta,
            ),
        )


class VllmTurns:
    """Side that computes only on command."""

    def __init__(self, engine: VllmEngine, context: int) -> None:
        self._engine = engine
        self._context, self._random, self._num_requests = context, random.Random(1), 0
        self._running: list[str] = []

    def prefill(self, tokens: int) -> list[float]:
        self._end()
        self._add(tokens, 1)
        began = time.perf_counter()
        while self._engine.has_requests():
            self._engine.step()
        return [time.perf_counter() - began]

    def begin(self, rows: int) -> None:
        self._end()
        self._running = [self._add(self._context, 1000) for _ in range(rows)]
        begun: set[str] = set()
        while len(begun) < rows:
            begun |= {
                output.request_id for output in self._engine.step() if output.outputs[0].token_ids
            }
        self._engine.step()

    def decode(self, steps: int) -> list[float]:
        """Return the seconds of steps in which every row gains a token."""
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - began)
        return seconds

    def _add(self, tokens: int, max_tokens: int) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        self._engine.add(
            name, [self._random.randrange(1000, 150000) for _ in range(tokens)], max_tokens
        )
        return name

    def _end(self) -> None:
        if self._running:
            self._engine.abort(self._running)
            self._running = []
        while self._engine.has_requests():
            self._engine.step()


def serve_turns(side: VllmTurns, answers: TextIO) -> None:
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


def serve_streams(engine: VllmEngine, answers: TextIO) -> None:
    """Step while there are requests; end with the input."""
    commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        commands.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        while not commands.empty() or not engine.has_requests():
            command = commands.get()
            if command is None:
                return
            if command["do"] == "add":
                engine.add(command["name"], command["prompt"], command["max_tokens"])
            else:
                engine.abort([command["name"]])
        counts = {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
        print(
            json.dumps({name: count for name, count in counts.items() if count}),
            file=answers,
            flush=True,
        )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep vLLM's prints out of the responses
    what = sys.argv[1]
    checkpoint = sys.argv[2]
    max_rows = int(sys.argv[3])
    number = int(sys.argv[4])
    if what == "turns":
        turns = VllmTurns(VllmEngine(checkpoint, max_rows), number)
        print(json.dumps({"ready": []}), file=answers, flush=True)
        serve_turns(turns, answers)
    else:
        engine = VllmEngine(checkpoint, max_rows, max_num_batched_tokens=number)
        print(json.dumps({}), file=answers, flush=True)
        serve_streams(engine, answers)


if __name__ == "__main__":
    main()
