"""Check of a local cluster's role settings: each role's own command validates them before the
start.

Only the role knows its settings. It loads them in a quarter of a second, before it loads torch.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence

from baton.cluster_config import ClusterConfig
from baton.fork_server import spawn
from baton.gateway import GatewayConfig
from baton.preflight import roles_of
from runtime.config import load
from runtime.errors import ConfigError, UnavailableError
from runtime.observe.log import message_of
from runtime.process.announce import FILE
from runtime.process.child_process import ALL_CORES
from runtime.process.supervision import EXIT_CONFIG

_CHECK_S = 60.0  # on a busy machine


async def check_settings(config: ClusterConfig) -> None:
    """Raise ConfigError with the message of the first role that rejects its flags or table.

    Roles without either are not run, which saves half a second of two cores.
    """
    own = (
        config.worker_flags,
        config.router_flags,
        config.config_file,
        config.memory_mb,
        config.max_context,
        config.adapters,
    )
    if not any(own) and config.log_level == ClusterConfig.model_fields["log_level"].default:
        return
    if config.config_file is not None:  # the gateway starts last, and only with --http
        load(
            GatewayConfig,
            section="gateway",
            flags={"router": ("127.0.0.1:1",)},
            file=config.config_file,
        ).check()
    asked = [
        _ask(shape.role, [*config.shared_flags, *shape.process_flags(0)]) for shape in config.shapes
    ]
    nowhere = [
        word
        for shape in config.shapes
        for role in roles_of(shape)
        for word in (f"--{role}", f"{FILE}/{shape.role}")
    ]
    for refusal in await asyncio.gather(
        *asked, _ask("router", [*config.shared_flags, *config.router_flags, *nowhere])
    ):
        if refusal is not None:
            raise refusal


async def _ask(role: str, flags: Sequence[str]) -> ConfigError | UnavailableError | None:
    child = await spawn(role, [*flags, "--check-settings"], core=ALL_CORES, environment=os.environ)
    assert child.stdout is not None
    try:
        async with asyncio.timeout(_CHECK_S):
            said = (await child.stdout.read()).decode(errors="replace").strip()
            code = await child.wait()
    except TimeoutError:
        return UnavailableError(f"{role} has not checked its settings after {_CHECK_S:.0f} s")
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    if not code:
        return None
    line = (
        message_of(said.splitlines()[-1]).removeprefix(f"{role}: ")
        if said
        else f"{role} ended with exit code {code}"
    )
    return (
        ConfigError(line, field=role)
        if code == EXIT_CONFIG
        else UnavailableError(f"{role}: {line}")
    )
