"""Simulated clients: each sends its request on time and resumes at another router after a loss."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.load import Outcome
from baton.workload import Planned
from protos import generation_pb2, types_pb2
from router.request.resumption import workers_of
from router.request.validate import AdmissibleRequest
from runtime.errors import BatonError, InternalError, UnavailableError
from sim.cores import Machine
from sim.prompts import PromptBook, SimulatedPrompt
from sim.router import RouterProcess
from sim.worker import SimulatedPrompts

MAX_ROUTERS = 3  # routers that a client tries


@dataclass
class _Reader:
    """The part of the response that a client has received. Times are loop time."""

    num_tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    workers: str = ""  # compatibility of the workers
    num_finishes: int = 0
    usage: generation_pb2.Usage = field(default_factory=generation_pb2.Usage)

    def take(self, response: generation_pb2.GenerateResponse) -> None:
        if response.HasField("finish"):
            self.num_finishes += 1
            self.usage = response.finish.usage
        elif response.chunk.token_ids:
            self.last_s = asyncio.get_running_loop().time()
            self.first_s = self.last_s if self.first_s is None else self.first_s
            self.num_tokens += len(response.chunk.token_ids)
            self.workers = self.workers or workers_of(response.chunk.compatibility)


@dataclass(frozen=True)
class Answered:
    """One request as its client saw it.

    `cached_tokens` of its prompt were not computed. By source, `brought_tokens` has those of them
    that were not in the worker's memory.
    """

    outcome: Outcome
    prompt_tokens: int
    cached_tokens: int
    client: str = ""
    brought_tokens: Mapping[str, int] = field(default_factory=dict)


class Clients:
    """All clients of a run. `ask` sends one request; one seed determines the choice of routers."""

    def __init__(
        self,
        routers: Sequence[RouterProcess],
        rng: random.Random,
        prompts: SimulatedPrompts,
        machine: Machine,
    ) -> None:
        self._machine = machine
        self._routers = routers
        self._rng = rng
        self._prompts = prompts
        self._book = PromptBook()
        self._loop = asyncio.get_running_loop()
        self.answered: list[Answered] = []

    async def ask(self, index: int, planned: Planned) -> bool:
        """Send a request now, and record its outcome when it has ended.

        Return whether it was answered.

        Raises:
            InternalError: the response ended more than once or with the wrong number of tokens.
        """
        began_s = self._loop.time()
        reader = _Reader()
        error = ""
        engine = self._book.request(planned.prompt_tokens)
        prompt = self._book.prompt(index, planned)
        engine.request_id = f"r{index}"
        engine.max_tokens = planned.output_tokens
        engine.sampling.seed = index
        try:
            self._prompts[engine.request_id] = prompt
            await self._machine.receive(planned.prompt_tokens)
            await self._resumed(engine, prompt, reader, planned.client)
        except BatonError as failure:
            error = failure.reason
        finally:
            self._prompts.pop(engine.request_id, None)
        if reader.num_finishes != (not error) or (
            not error and reader.num_tokens != planned.output_tokens
        ):
            raise InternalError(
                f"request {index} ended {reader.num_finishes} times with {reader.num_tokens} tokens, "
                f"{error or 'without an error'}"
            )
        times = (
            () if reader.first_s is None else (reader.first_s - began_s, reader.last_s - began_s)
        )
        self.answered.append(
            Answered(
                Outcome(
                    times[0] if times else None,
                    times,
                    reader.num_tokens,
                    None,
                    error or None,
                    planned.at_s,
                ),
                planned.prompt_tokens,
                reader.usage.cached_tokens,
                planned.client,
                {
                    "host": reader.usage.host_tokens,
                    "disk": reader.usage.disk_tokens,
                    "pulled": reader.usage.pulled_tokens,
                },
            )
        )
        return not error

    async def _resumed(
        self,
        engine: types_pb2.EngineRequest,
        prompt: SimulatedPrompt,
        reader: _Reader,
        client: str,
    ) -> None:
        for attempt in range(1, MAX_ROUTERS + 1):
            alive = [router for router in self._routers if router.is_up]
            if not alive:
                raise UnavailableError("no router is up")
            router = self._rng.choice(alive)
            resumed = ((1,) * reader.num_tokens,) if reader.num_tokens else ()
            request = AdmissibleRequest(
                engine,
                (),
                wants_text=False,
                resumed=resumed,
                resumed_from=(reader.workers,) if resumed else (),
                routed=prompt,
                client=client,
            )
            try:
                async for response in router.answer(request):
                    if reader.first_s is None:
                        self._machine.answer(prompt.num_tokens)
                    reader.take(response)
                return
            except UnavailableError:
                if router.is_up or attempt == MAX_ROUTERS:
                    raise
