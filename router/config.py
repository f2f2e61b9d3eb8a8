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
    """Source of the sampling parameters that a request leaves open."""

    AUTO = "auto"
    NONE = "none"


class RouterConfig(TlsConfig):
    """Settings of a router: seconds and counts. Every wait of the router has its limit here."""

    model: Path
    model_name: str = ""
    prefill: tuple[TargetField, ...] = Field(min_length=1)
    decode: tuple[TargetField, ...] = Field(min_length=1)
    discovery_interval_s: float = Field(
        default=2.0, ge=0.1, le=3600, description="Pause between two DNS lookups."
    )
    kubernetes_api: str = Field(
        default="", description="URL of the API server; default: the pod's own cluster."
    )
    service_account: Path = Field(
        default=DiscoveryOptions().service_account,
        description="Folder with the token, ca.crt and namespace for the API server.",
    )
    listen: AddressField = "127.0.0.1:7000"
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    metrics_host: str = Field(default="127.0.0.1", description="Address to serve /metrics on.")
    announce: Path | None = None
    client_certificates: ClientCertificates = ClientCertificates.REQUIRED
    token_file: Path | None = None
    priority_limits: tuple[PriorityLimitField, ...] = Field(
        default=DEFAULT_LIMITS,
        description="NAME=PRIORITY: most urgent priority of a token's holder or of a "
        "certificate's name; *: of every other client.",
    )
    log_level: str = "info"
    log_style: LogStyle = LogStyle.HUMAN
    otel_endpoint: str = ""
    generation_config: GenerationConfigUse = Field(
        default=GenerationConfigUse.AUTO,
        description="auto: requests that omit temperature, top_p, top_k, min_p or "
        "repetition_penalty get the values of the model's "
        "generation_config.json; none: they get Baton's defaults.",
    )
    policy: Policy = Policy.PREFIX_CACHE
    watch_interval_s: float = Field(
        default=0.25, ge=0.05, le=60, description="Interval of the workers' load reports."
    )
    max_waiting: int = Field(
        default=1024,
        ge=0,
        le=1 << 20,
        description="Maximum number of queued requests, however short the wait.",
    )
    max_wait_s: float = Field(
        default=60.0,
        gt=0,
        le=MAX_WAIT_S,
        description="How long a request may be queued for lack of capacity; one that would wait "
        "longer is rejected at once.",
    )
    peer_wait_s: float | None = Field(
        default=None,
        gt=0,
        le=MAX_WAIT_S,
        description="How long to wait for a lost worker or its successor; default: 1.5 times "
        "the measured start time of workers, between 4 and max_wait_s.",
    )
    prefill_attempts: int = Field(
        default=3, ge=1, le=1000, description="Prefill attempts of a request before its commit."
    )
    migrations: int = Field(
        default=3, ge=0, le=1000, description="Decode pools that one request may lose."
    )
    max_request_s: float = Field(
        default=3600.0, gt=0, le=MAX_WAIT_S, description="Limit for clients without a deadline."
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
        description="Time limit of the warm-up token before readiness.",
    )
    drain_s: float = Field(
        default=30.0,
        ge=0,
        le=MAX_WAIT_S,
        description="How long running requests may take to finish after SIGTERM.",
    )
    max_message_bytes: int = Field(
        default=16 << 20, ge=1 << 10, le=1 << 29, description="Largest request message."
    )
    max_calls: int = Field(
        default=2048, ge=1, le=1 << 20, description="Concurrent calls; one more is rejected unread."
    )
    max_held_bytes: int = Field(
        default=128 << 20,
        ge=1 << 20,
        le=1 << 40,
        description="Messages of all concurrent calls, together.",
    )
    # More than the number of requests that may be queued or running. Beyond this limit the client's
    # own gRPC library holds calls back, and no component rejects them in time.
    max_streams: int = Field(
        default=4096, ge=1, le=1 << 20, description="Concurrent calls on one connection."
    )
    max_connections: int = Field(
        default=1024, ge=1, le=1 << 20, description="Concurrent connections of clients."
    )
    keepalive_s: float = Field(
        default=1.5, gt=0, le=MAX_WAIT_S, description="Interval of keepalive pings to clients."
    )
    keepalive_timeout_s: float = Field(
        default=2.5,
        gt=0,
        le=MAX_WAIT_S,
        description="Time after which a client that does not answer a ping is disconnected.",
    )
    max_connection_age_s: float | None = Field(default=None, gt=0, le=MAX_WAIT_S)
    max_connection_age_grace_s: float = Field(
        default=3600.0, ge=0, le=MAX_WAIT_S, description="Time that calls in flight get after that."
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
        """Check what single fields cannot show.

        Raises:
            ConfigError: the settings do not fit together.
        """
        check_endpoint(self.otel_endpoint)
