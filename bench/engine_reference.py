"""transformers' `generate` in a process of its own, as anybody starts it: without the allocator setting that Baton's
roles make for themselves (huge pages). Between its turns it sleeps."""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from models.weights import RandomWeights

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
START_TIMEOUT_S = 120.0
TURN_TIMEOUT_S = 120.0


class _Stamps(StoppingCriteria):
    """Never stops; notes when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class _Generator:
    """The model with the same weights: greedy, static cache."""

    def __init__(self, model: dict[str, object], max_tokens: int) -> None:
        config = Qwen3Config.from_dict(model)
        loaded = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]  # noqa: SLF001
        self._model = loaded.eval()
        source = RandomWeights(seed=0)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                source.read(name.removeprefix("model."), parameter.data)
        self._max_tokens = max_tokens
        self._cache = self._new_cache()

    def _new_cache(self) -> StaticCache:
        return StaticCache(config=self._model.config, max_cache_len=self._max_tokens)

    @torch.inference_mode()
    def generate(self, token_ids: Tensor, num_tokens: int, *, afresh: bool) -> tuple[Tensor, list[float], Tensor]:
        if afresh:
            self._cache = self._new_cache()
        stamps = _Stamps()
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens, disable_compile=True,
            return_dict_in_generate=True, output_logits=True)
        started = time.perf_counter()
        out = self._model.generate(token_ids, generation_config=settings, past_key_values=self._cache,
                                   attention_mask=torch.ones_like(token_ids),
                                   stopping_criteria=StoppingCriteriaList([stamps]))
        return out.sequences, [stamp - started for stamp in stamps.times], out.logits[-1].float()


def _serve(pipe: Connection, model: dict[str, object], max_tokens: int, threads: int) -> None:
    torch.set_num_threads(threads)
    generator = _Generator(model, max_tokens)
    pipe.send(None)
    while (turn := pipe.recv()) is not None:
        ids, stamps, logits = generator.generate(torch.tensor(turn[0]), turn[1], afresh=turn[2])
        pipe.send((ids.tolist(), stamps, logits.numpy()))


class Reference:
    """The other process. `close` it."""

    def __init__(self, model: dict[str, object], *, max_tokens: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        setting = os.environ.pop(HUGE_PAGES, None)
        try:
            self._process: SpawnProcess = context.Process(target=_serve, args=(theirs, model, max_tokens, threads),
                                                          daemon=True)
            self._process.start()
        finally:
            if setting is not None:
                os.environ[HUGE_PAGES] = setting
        self._take(START_TIMEOUT_S)

    def generate(self, token_ids: Tensor, num_tokens: int, *, afresh: bool) -> tuple[Tensor, list[float], Tensor]:
        """Continue token_ids [rows, n], of which the cache holds a beginning unless it is made `afresh`. Returns all
        ids, seconds from the call to each new token, and the logits of the last one."""
        self._pipe.send((token_ids.tolist(), num_tokens, afresh))
        ids, stamps, logits = self._take(TURN_TIMEOUT_S)
        return torch.tensor(ids), stamps, torch.from_numpy(logits)

    def cpu_s(self) -> float:
        """CPU time of the process so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(10)
        self._process.kill()

    def _take(self, timeout_s: float):  # type: ignore[no-untyped-def]  # noqa: ANN202 - whatever the child sends
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the reference said nothing for {timeout_s:g} s")
        return self._pipe.recv()
