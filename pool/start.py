"""The start of a worker process from its flags. This module imports torch."""

import logging
import os
import threading
from pathlib import Path

from engine.loop import ENGINE_THREAD
from engine.pipeline.ahead import STEPS_THREAD
from pool.process import run_worker
from pool.role import PoolRole
from pool.stage.config import WorkerConfig
from runtime.clock import process_age_s
from runtime.config import describe, load
from runtime.errors import ConfigError
from runtime.observe.log import LogStyle, configure
from runtime.process.supervision import StopSignal, run_process

logger = logging.getLogger(__name__)


def start(
    role: PoolRole,
    flags: dict[str, object],
    file: Path | None,
    *,
    name: str,
    settings: type[WorkerConfig] = WorkerConfig,
) -> int:
    """Run until stopped; return the exit code.

    `name` is the program's, and that of its table in the file.
    """

    async def run(stop: StopSignal) -> None:
        # Before the settings are read, so that their errors are JSON lines as well.
        if flags.get("log_style") == LogStyle.JSON:
            configure(level="info", style=LogStyle.JSON, role=name)
        config = load(settings, section=name, flags=flags, file=file)
        configure(
            level=config.log_level,
            style=LogStyle(config.log_style),
            role=f"{name}{config.rank}",
        )
        config.check()
        check_ranks(config)
        check_overlap(config, role)
        logger.debug("settings", extra=describe(config))
        await run_worker(config, role, stop, age_s=process_age_s())

    code = run_process(name, run)
    if any(thread.name in (ENGINE_THREAD, STEPS_THREAD) for thread in threading.enumerate()):
        # The engine thread hangs, perhaps in native code. The interpreter's orderly shutdown would
        # free objects that it uses.
        logging.shutdown()
        os._exit(code)
    return code


def check_ranks(config: WorkerConfig) -> None:
    """Check flags that only stages of several ranks support, or only stages of one rank.

    Raises:
        ConfigError: a flag is not supported.
    """
    own = config.placement.tensor
    if config.overlap_tokens and (own.size == 1 or own.data_size > 1):
        raise ConfigError(
            f"--overlap-tokens {config.overlap_tokens} is for stages of several ranks (--tp) that share "
            f"all requests (--dp-attention 1)",
            field="overlap_tokens",
        )
    if own.size == 1:
        return
    if config.device != "cpu":
        raise ConfigError(
            f"--tp {config.tp} is for device cpu: ranks on devices cannot exchange data yet",
            field="tp",
        )


def check_overlap(config: WorkerConfig, role: PoolRole) -> None:
    """Check that the pool supports `overlap_steps`.

    Pools of several processes already keep one batch in flight per stage. With a draft model, a
    step depends on the tokens that the previous one accepted. Chunks of prompts take long compared
    with their planning, and one more in flight would delay a more urgent prompt.

    Raises:
        ConfigError: it does not.
    """
    if config.overlap_steps and (
        role.name != "decode" or config.world_size > 1 or config.draft is not None
    ):
        raise ConfigError(
            "--overlap-steps is for a decode pool of one process, without a draft",
            field="overlap_steps",
        )
