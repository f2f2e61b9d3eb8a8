"""Settings of the planner: flags and the [planner] table of a TOML file."""

from pathlib import Path

from pydantic import Field, field_validator

from baton.load import Slo
from runtime.config import Config, PeerField
from runtime.errors import ConfigError
from runtime.observe.log import LEVELS, LogStyle


class PlannerConfig(Config):
    """Settings of the planner."""

    router: tuple[PeerField, ...] = Field(
        min_length=1,
        description="HOST:PORT of a router; a name stands for all of its addresses. Name every router.",
    )
    slo: str = Field(
        default="ttft=2s,tpot=50ms",
        description="Service level: seconds to the first token and per token after it.",
    )
    interval_s: float = Field(
        default=1.0, ge=0.1, le=60, description="Interval at which routers are read."
    )
    dry_run: bool = Field(
        default=False, description="Export and log what would be switched, and switch nothing."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of Prometheus /metrics; 0 takes a free one; default: none.",
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address /metrics is served on.")
    tls_ca: Path | None = Field(
        default=None, description="PEM certificates of the authority of all roles; enables TLS."
    )
    tls_cert: Path | None = Field(
        default=None, description="PEM certificate to present; it must name the role operator."
    )
    tls_key: Path | None = Field(default=None, description="PEM key of the certificate.")
    token_file: Path | None = Field(
        default=None, description="File with the bearer token to present to routers."
    )
    log_level: str = Field(
        default="info", description="Least level logged: debug, info, warning or error."
    )
    log_style: LogStyle = Field(
        default=LogStyle.HUMAN, description="Log lines for people, or one JSON object per line."
    )

    @field_validator("slo")
    @classmethod
    def _is_slo(cls, value: str) -> str:
        Slo.parse(value)
        return value

    @property
    def promise(self) -> Slo:
        return Slo.parse(self.slo)

    def check(self) -> None:
        """Check the values that field types cannot validate.

        Raises:
            ConfigError: a value is not allowed.
        """
        if self.log_level not in LEVELS:
            raise ConfigError(
                f"log level must be one of {', '.join(LEVELS)}, got {self.log_level!r}",
                field="log_level",
            )
