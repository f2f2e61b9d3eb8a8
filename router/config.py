"""Settings of a router: flags and the [router] table of a TOML file."""

from enum import StrEnum
from pathlib import Path

from pydantic import Field

from router.request.validate import DEFAULT_LIMITS, PriorityLimitField
from router.text.control_tokens import UserControlTokens
from router.workers.discovery import DiscoveryOptions, TargetField
from router.workers.policy import Policy
from runtime.config import MAX_WAIT_S, AddressField
from runtime.observe.log import LogStyle
from runtime.observe.tracing_setup import check_endpoint
from runtime.security.access import ClientCertificates, TlsConfig


class GenerationConfigUse(StrEnum):
    """Whether a model's own sampling defaults are those of its requests."""

    AUTO = "auto"
    NONE = "none"


class RouterConfig(TlsConfig):
    """Seconds and counts; every wait of the router has its limit here."""

    model: Path
    model_name: str = ""
    prefill: tuple[TargetField, ...] = Field(min_length=1)
    decode: tuple[TargetField, ...] = Field(min_length=1)
    discovery_interval_s: float = Field(
        default=2.0, ge=0.1, le=3600, description="Pause between two looks at DNS."
    )
    kubernetes_api: str = Field(
        default="", description="URL of the API server; default: as every pod finds it."
    )
    service_account: Path = Field(
        default=DiscoveryOptions().service_account,
        description="Folder with token, ca.crt and namespace for the API server.",
    )
    listen: AddressField = "127.0.0.1:7000"
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    metrics_host: str = Field(default="127.0.0.1", description="Address /metrics is served on.")
    announce: Path | None = None
    client_certificates: ClientCertificates = ClientCertificates.REQUIRED
    token_file: Path | None = None
    priority_limits: tuple[PriorityLimitField, ...] = Field(
        default=DEFAULT_LIMITS,
        description="NAME=PRIORITY: the most urgent priority of a token's holder or a "
        "certificate's name; *: of everybody else.",
    )
    log_level: str = "info"
    log_style: LogStyle = LogStyle.HUMAN
    otel_endpoint: str = ""
    generation_config: GenerationConfigUse = Field(
        default=GenerationConfigUse.AUTO,
        description="auto: requests that leave temperature, top_p, top_k, min_p or "
        "repetition_penalty open get what the model's "
        "generation_config.json states; none: they get Baton's defaults.",
    )
    policy: Policy = Policy.PREFIX_CACHE
    watch_interval_s: float = Field(
        default=0.25, ge=0.05, le=60, description="How often workers report their load."
    )
    max_waiting: int = Field(
        default=1024,
        ge=0,
        le=1 << 20,
        description="Requests held back at most, however short the wait.",
    )
    max_wait_s: float = Field(
        default=60.0,
        gt=0,
        le=MAX_WAIT_S,
        description="How long a request is held back for want of room; one that would wait "
        "longer is refused at once.",
    )
    peer_wait_s: float | None = Field(
        default=None,
        gt=0,
        le=MAX_WAIT_S,
        description="How long to wait for a lost worker or its successor; default: half "
        "as long again as workers took to start, from 4 to max_wait_s.",
    )
    prefill_attempts: int = Field(
        default=3, ge=1, le=1000, description="Prefill workers a request may try before its commit."
    )
    migrations: int = Field(
        default=3, ge=0, le=1000, description="Decode pools that may be lost under one request."
    )
    max_request_s: float = Field(
        default=3600.0, gt=0, le=MAX_WAIT_S, description="Limit for clients that set no deadline."
    )
    client_stall_s: float = Field(
        default=60.0,
        gt=0,
        le=MAX_WAIT_S,
        description="How long a client may leave its stream unread.",
    )
    warm_up_s: float = Field(
        default=60.0,
        gt=0,
        le=MAX_WAIT_S,
        description="Limit of the warm-up token before readiness.",
    )
    drain_s: float = Field(
        default=30.0,
        ge=0,
        le=MAX_WAIT_S,
        description="How long SIGTERM lets running requests finish.",
    )
    max_message_bytes: int = Field(
        default=16 << 20, ge=1 << 10, le=1 << 29, description="Largest request."
    )
    max_calls: int = Field(
        default=2048, ge=1, le=1 << 20, description="Calls under way; one more is refused unread."
    )
    max_held_bytes: int = Field(
        default=128 << 20,
        ge=1 << 20,
        le=1 << 40,
        description="Messages of all calls under way, together.",
    )
    # More than may wait or run: beyond this a client's own gRPC holds calls back, where nobody
    # refuses them in time.
    max_streams: int = Field(
        default=4096, ge=1, le=1 << 20, description="Calls under way on one connection."
    )
    max_connections: int = Field(
        default=1024, ge=1, le=1 << 20, description="Connections of clients at once."
    )
    keepalive_s: float = Field(
        default=1.5, gt=0, le=MAX_WAIT_S, description="How often clients are pinged."
    )
    keepalive_timeout_s: float = Field(
        default=2.5,
        gt=0,
        le=MAX_WAIT_S,
        description="When a client that does not answer is given up.",
    )
    max_connection_age_s: float | None = Field(default=None, gt=0, le=MAX_WAIT_S)
    max_connection_age_grace_s: float = Field(
        default=3600.0, ge=0, le=MAX_WAIT_S, description="What calls in flight get beyond that."
    )
    reflection: bool = True
    channelz: bool = False
    vllm_engine: bool = False
    user_control_tokens: UserControlTokens = UserControlTokens.TOKENS
    salt_by_client: bool = Field(
        default=False,
        description="Share cached prompts only among requests of one client, "
        "by its token or certificate.",
    )

    def check(self) -> None:
        """Raises ConfigError for what the single settings do not show."""
        check_endpoint(self.otel_endpoint)
