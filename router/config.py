"""Settings of a router: flags and the [router] table of a TOML file."""

from enum import StrEnum
from pathlib import Path

from pydantic import Field

from router.request.holdback import Holdback, HoldbackField
from router.request.priorities import DEFAULT_LIMITS, MAX_PRIORITY, PriorityLimitField
from router.text.control_tokens import UserControlTokens
from router.workers.discovery import DiscoveryOptions, TargetField
from router.workers.policy import Policy
from runtime.config import MAX_WAIT_S, AddressField, parse_address
from runtime.errors import ConfigError
from runtime.observe.log import LogStyle
from runtime.observe.tracing_setup import check_endpoint
from runtime.security.access import ClientCertificates, TlsConfig


class GenerationConfigUse(StrEnum):
    """Source of the sampling parameters that a request leaves open."""

    AUTO = "auto"
    NONE = "none"


_TARGETS = (
    "HOST:PORT of the leader of a {} pool, dns:///NAME:PORT for all addresses of a name, "
    "k8s:///[NAMESPACE/]SERVICE:PORT for the endpoints of a Kubernetes service, or file:///PATH for a "
    "leader that announces itself in a file; several are allowed."
)


class RouterConfig(TlsConfig):
    """Settings of a router: seconds and counts. Every wait of the router has its limit here."""

    model: Path = Field(description="Model directory; its configuration and tokenizer are read.")
    model_name: str = Field(
        default="", description="Model name that clients use; default: the directory's name."
    )
    model_alias: tuple[str, ...] = Field(
        default=(), description="Another model name that clients may use; repeatable."
    )
    prefill: tuple[TargetField, ...] = Field(min_length=1, description=_TARGETS.format("prefill"))
    decode: tuple[TargetField, ...] = Field(min_length=1, description=_TARGETS.format("decode"))
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
    listen: AddressField = Field(
        default="127.0.0.1:7000", description="HOST:PORT to serve on; port 0 takes a free one."
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of Prometheus /metrics; 0 takes a free one; default: none.",
    )
    metrics_host: str = Field(default="127.0.0.1", description="Address /metrics is served on.")
    announce: Path | None = Field(
        default=None, description="File to write addresses to once listening (JSON)."
    )
    client_certificates: ClientCertificates = Field(
        default=ClientCertificates.REQUIRED,
        description="With TLS: whether clients must show a certificate of the authority.",
    )
    token_file: Path | None = Field(
        default=None, description="Bearer tokens that clients must show, one per line."
    )
    operator_tokens: tuple[str, ...] = Field(
        default=(),
        description="Names of tokens whose holders may do what the role operator may.",
    )
    tenants_from: tuple[str, ...] = Field(
        default=(),
        description="Names of tokens or certificates, such as a gateway's, whose calls may name the "
        "tenant that they are for (metadata baton-tenant); repeatable.",
    )
    priority_limits: tuple[PriorityLimitField, ...] = Field(
        default=DEFAULT_LIMITS,
        description="NAME=PRIORITY: most urgent priority of a token's holder or of a "
        "certificate's name; *: of every other client.",
    )
    holdback: tuple[HoldbackField, ...] = Field(
        default=(),
        description="PRIORITY=SHARE: requests of this priority or a less urgent one are placed only "
        "while a decode pool is used less than this; repeatable.",
    )
    preempt_from: int = Field(
        default=1,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY + 1,
        description="When decode pools are full, running requests of this priority or a less "
        "urgent one pause for more urgent ones; 101: none do.",
    )
    client_limits: Path | None = Field(
        default=None,
        description="TOML file with a table for each client: its weight and quotas; read again when "
        "it changes.",
    )
    request_log: Path | None = Field(
        default=None,
        description="File to which a line of JSON is appended for each request that ends; -: standard "
        "output.",
    )
    log_level: str = Field(
        default="info", description="Least level logged: debug, info, warning or error."
    )
    log_style: LogStyle = Field(
        default=LogStyle.HUMAN, description="Log lines for people, or one JSON object per line."
    )
    otel_endpoint: str = Field(
        default="", description="URL of an OTLP collector over gRPC; traces go there."
    )
    generation_config: GenerationConfigUse = Field(
        default=GenerationConfigUse.AUTO,
        description="auto: requests that omit temperature, top_p, top_k, min_p or "
        "repetition_penalty get the values of the model's "
        "generation_config.json; none: they get Baton's defaults.",
    )
    policy: Policy = Field(
        default=Policy.PREFIX_CACHE, description="How workers are chosen for a request."
    )
    pull_tokens: int = Field(
        default=512,
        ge=0,
        le=1 << 30,
        description="Prompt tokens that a prefill worker must save by pulling them from another "
        "worker's prefix cache; 0: it never does.",
    )
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
    max_connection_age_s: float | None = Field(
        default=None,
        gt=0,
        le=MAX_WAIT_S,
        description="Ask clients to reconnect after this many seconds, so that load balancers "
        "spread them again; default: never.",
    )
    max_connection_age_grace_s: float = Field(
        default=3600.0,
        ge=0,
        le=MAX_WAIT_S,
        description="Seconds that calls in flight get after --max-connection-age-s.",
    )
    reflection: bool = Field(default=True, description="Describe the services to every client.")
    channelz: bool = Field(
        default=False, description="Show sockets and calls to clients that may watch workers."
    )
    vllm_engine: bool = Field(
        default=False,
        description="Serve vllm.grpc.engine.VllmEngine, too, for gateways that speak it.",
    )
    kv_events: str = Field(
        default="",
        description="ZeroMQ address, like tcp://*:5557, on which to publish cached blocks with their "
        "tokens, as vLLM's engines do; needs baton[zmq]; empty: none.",
    )
    kv_events_replay: str = Field(
        default="",
        description="ZeroMQ address on which subscribers of --kv-events ask for missed events.",
    )
    kv_events_topic: str = Field(
        default="", description="Topic of --kv-events; default: kv@HOST@MODEL."
    )
    adapter_listen: tuple[str, ...] = Field(
        default=(),
        description="NAME=HOST:PORT: a further address of vllm.grpc.engine.VllmEngine, of which the "
        "model is this one with the adapter NAME; needs --vllm-engine; repeatable.",
    )
    user_control_tokens: UserControlTokens = Field(
        default=UserControlTokens.TOKENS,
        description="Whether control tokens such as <|im_end|> in the texts of a chat are read "
        "as tokens or as text.",
    )
    salt_by_client: bool = Field(
        default=False,
        description="Share cached prompts only among requests of one client, "
        "by its token or certificate.",
    )

    def check(self) -> None:
        """Check the values that field types cannot validate.

        Raises:
            ConfigError: the settings do not fit together.
        """
        _ = self.adapter_addresses
        check_endpoint(self.otel_endpoint)
        for field in ("kv_events", "kv_events_replay"):
            if address := getattr(self, field):
                _check_zmq_address(address, field)
        if self.kv_events_replay and not self.kv_events:
            raise ConfigError("kv_events_replay needs kv_events", field="kv_events_replay")
        Holdback.parse(self.holdback)

    @property
    def adapter_addresses(self) -> dict[str, str]:
        """Return the address of each adapter that has one.

        Raises:
            ConfigError: an entry has another form or repeats a name, or there is no engine service.
        """
        found: dict[str, str] = {}
        for entry in self.adapter_listen:
            name, equals, address = entry.partition("=")
            if not name or not equals or name in found:
                raise ConfigError(
                    f"adapter_listen must be NAME=HOST:PORT, once per adapter, got {entry!r}",
                    field="adapter_listen",
                )
            found[name] = str(parse_address(address, field="adapter_listen"))
        if found and not self.vllm_engine:
            raise ConfigError("adapter_listen needs vllm_engine", field="adapter_listen")
        return found


def _check_zmq_address(text: str, field: str) -> None:
    """Raise ConfigError if ZeroMQ cannot listen on an address; some it would take for another."""
    kind, _, place = text.partition("://")
    if kind == "tcp":
        parse_address(place, field=field)
    elif kind != "ipc" or not place:
        raise ConfigError(
            f"{field} must be tcp://HOST:PORT or ipc://PATH, got {text!r}", field=field
        )
