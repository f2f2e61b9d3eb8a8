"""From flags to a running worker process; everything that loads torch is imported from here on."""

import logging
import os
import threading
from pathlib import Path

from engine.loop import ENGINE_THREAD
from engine.pipeline.ahead import STEPS_THREAD
from pool.process import PoolRole, run_worker
from pool.stage.config import WorkerConfig
from runtime.clock import process_age_s
from runtime.config import describe, load
from runtime.errors import ConfigError
from runtime.observe.log import LogStyle, configure
from runtime.process.supervision import StopSignal, run_process

logger = logging.getLogger(__name__)


def start(role: PoolRole, flags: dict[str, object], file: Path | None) -> int:
    """Run until stopped; returns the exit code."""

    async def run(stop: StopSignal) -> None:
        if (
            flags.get("log_style") == LogStyle.JSON
        ):  # before the settings are read: their errors are lines, too
            configure(level="info", style=LogStyle.JSON, role=role.name)
        config = load(WorkerConfig, section=role.name, flags=flags, file=file)
        configure(
            level=config.log_level,
            style=LogStyle(config.log_style),
            role=f"{role.name}{config.rank}",
        )
        config.check()
        check_ranks(config)
        check_overlap(config, role)
        logger.debug("settings", extra=describe(config))
        await run_worker(config, role, stop, age_s=process_age_s())

    code = run_process(role.name, run)
    if any(thread.name in (ENGINE_THREAD, STEPS_THREAD) for thread in threading.enumerate()):
        # It hangs, perhaps in native code: the interpreter's orderly end would take from under it
        # what it uses.
        logging.shutdown()
        os._exit(code)
    return code


def check_ranks(config: WorkerConfig) -> None:
    """Raises ConfigError for what stages of several ranks do not offer, or others."""
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
            f"--tp {config.tp} is for device cpu: between devices there is no exchange yet",
            field="tp",
        )


def check_overlap(config: WorkerConfig, role: PoolRole) -> None:
    """Raises ConfigError for pools that prepare no step ahead: of several processes, which keep as
    many batches in flight as they have stages; with a draft, where all of a step follows from what
    the one before accepted; and of prompts, whose chunks are long beside their planning, and one
    more in flight would hold up a more urgent prompt."""
    if config.overlap_steps and (
        role.name != "decode" or config.world_size > 1 or config.draft is not None
    ):
        raise ConfigError(
            "--overlap-steps is for a decode pool of one process, without a draft",
            field="overlap_steps",
        )
