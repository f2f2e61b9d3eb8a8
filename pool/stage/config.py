"""The settings of a prefill or decode process, filled from flags and one TOML file, then frozen."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from engine.core.layer_range import Placement
from engine.speculative.contracts.config import SUFFIX
from runtime.config import MAX_WAIT_S, AddressField, parse_peer
from runtime.errors import ConfigError
from runtime.model_files.adapter_folders import adapter_folders
from runtime.model_files.model_folder import check_model_folder
from runtime.observe.tracing_setup import check_endpoint
from runtime.process.announce import announcement_path
from runtime.security.access import TlsConfig
from transfer.transport.binding import NetworkBinding, parse_ports

TransportName = Literal["auto", "shm", "tcp", "cuda"]
StageChannelName = Literal["auto", "ucx", "nccl"]
LEAST_ADAPTER_MB = 64  # memory for adapters by default, where those at the start need less
BALANCED = "balanced"  # the partition that gives every stage about the same weight bytes
# A router's own first request needs six tokens, and it waits for a pool that can hold them.
MIN_CONTEXT_TOKENS = 16


class WorkerConfig(TlsConfig):
    """The settings of one process of a pool: its place, its memory, its limits."""

    model: Path = Field(description="directory of the checkpoint (config.json, *.safetensors)")
    model_name: str = Field(
        default="", description="model name that clients use; default: the directory's name"
    )
    listen: AddressField = Field(
        default="127.0.0.1:0", description="HOST:PORT of the gRPC server; port 0: any"
    )
    metrics_port: int = Field(
        default=0, ge=0, le=65535, description="port of Prometheus /metrics; 0 takes a free one"
    )
    metrics_host: str = Field(default="127.0.0.1", description="address /metrics is served on")
    announce: Path | None = Field(
        default=None, description="file to write addresses to once listening (JSON)"
    )
    rank: int = Field(
        default=0,
        ge=0,
        description="which process of the pool this is, counted stage by stage; 0: the leader",
    )
    world_size: int = Field(
        default=1, ge=1, le=64, description="processes of the pool: its stages times --tp"
    )
    tp: int = Field(
        default=1,
        ge=1,
        le=8,
        description="ranks that share each stage, dividing its weights and cache (device cpu)",
    )
    ep: int = Field(
        default=0,
        ge=0,
        le=8,
        description="ranks of a stage over which whole experts are spread: must be "
        "equal to --tp; 0: the same",
    )
    dp_attention: int = Field(
        default=1,
        ge=1,
        le=8,
        description="data ranks: groups of these ranks, each with its own requests and cache",
    )
    overlap_tokens: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="batches of at least this number of tokens run in two "
        "halves on the ranks of a stage; one "
        "computes while the other's partial results are "
        "exchanged; 0: never",
    )
    overlap_steps: bool = Field(
        default=False,
        description="prepare a decode step while the previous one computes (a "
        "decode pool of one process, without a draft model)",
    )
    leader: str = Field(
        default="",
        description="HOST:PORT of stage 0's gRPC server, or the file:///PATH to which it "
        "writes it; needed by the other stages",
    )
    partition: str = Field(
        default="",
        description='layers per stage, like "3,5"; balanced: all stages read '
        "about the same weight bytes per step; default: even, later "
        "stages get one more",
    )
    page_size: int = Field(default=64, ge=1, le=4096, description="tokens per cache page")
    max_context: int = Field(
        default=0,
        ge=0,
        description="tokens of prompt and output together, at least "
        f"{MIN_CONTEXT_TOKENS}; 0: the model's limit, or as many as the "
        "cache holds",
    )
    num_pages: int = Field(
        default=0,
        ge=0,
        le=1 << 28,
        description="cache pages, the null page included; 0: from --memory-mb",
    )
    memory_mb: int = Field(
        default=0,
        ge=0,
        description="cache memory per stage in MiB, on its device, when "
        "--num-pages is 0; 0: from --memory-share",
    )
    memory_share: float = Field(
        default=0,
        ge=0,
        le=1,
        description="share of the memory of the machine, container or device for weights and "
        "cache together, when --memory-mb is 0; 0: 0.4 of a host, 0.8 of a "
        "container's limit, 0.85 of a device",
    )
    max_running: int = Field(
        default=16, ge=1, le=4096, description="requests that compute at the same time"
    )
    max_landing: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="further requests that hold memory while their "
        "prompts land or they wait for their turn (decode); 0: "
        "twice --max-running up to 32, none above",
    )
    max_queued: int = Field(
        default=256, ge=1, le=65536, description="requests that may be queued (prefill)"
    )
    chunk_tokens: int = Field(default=512, ge=1, le=65536, description="prompt tokens per forward")
    prefix_cache: bool = Field(
        default=True,
        description="cache prompts, and compute only the part after a cached prefix (prefill)",
    )
    decode_cache: bool = Field(
        default=True,
        description="cache prompts that landed and sampled tokens, and receive "
        "only the part after a cached prefix (decode)",
    )
    prefix_snapshots: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="recurrent states to cache, if the "
        "model has any (prefill); 0: twice "
        "--max-running, but at most a fifth of the "
        "cache memory",
    )
    host_cache_mb: int = Field(
        default=0,
        ge=0,
        le=1 << 30,
        description="host memory in MiB of each process for a copy of the prefix cache, where its pools "
        "are on a device; 0: none",
    )
    disk_cache: Path | None = Field(
        default=None,
        description="directory for a copy of the prefix cache, which outlives the process; pools of "
        "the same model may share it, also of other roles and layouts",
    )
    disk_cache_mb: int = Field(
        default=16384,
        ge=64,
        le=1 << 30,
        description="size in MiB to which this process bounds --disk-cache",
    )
    cache_server: str | None = Field(
        default=None,
        description="redis://HOST:PORT (rediss:// for TLS) of a server that speaks the Redis protocol, "
        "for a copy of the prefix cache that all pools of the same model share",
    )
    cache_server_key: Path | None = Field(
        default=None,
        description="file with at least 32 random bytes, the same for all pools: what is at "
        "--cache-server is authenticated with it",
    )
    cache_server_expire_s: int = Field(
        default=86400,
        ge=60,
        le=1 << 30,
        description="seconds after which blocks at --cache-server expire that are not used",
    )
    local_rest_tokens: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="most uncached tokens of a prompt that a decode pool prefills by itself, "
        "without a prefill worker; fewer if its streams would slow down; only for "
        "models with attention layers only; 0: never",
    )
    step_limit_s: float = Field(
        default=0,
        ge=0,
        le=86400,
        description="seconds that a step may take; after that the engine counts as hung, its requests "
        "move elsewhere and the process ends; 0: 20 times the longest recent "
        "step, at least 60",
    )
    numerics: Literal["exact", "fast"] = Field(
        default="exact", description="exact: the same bits in every topology"
    )
    weights: Literal["model", "int8", "int4"] = Field(
        default="model",
        description="model: the model's type; int8, int4: projection matrices in eight or "
        "four bits, multiplied by eight-bit activations (device cpu)",
    )
    adapters: Path | None = Field(
        default=None,
        description="directory of LoRA adapters in PEFT's format: every subfolder is one, and its "
        "name is that of the adapter; the same in pools of both roles",
    )
    adapters_mb: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="memory in MiB for loaded adapters, on all stages together; default: what those "
        f"at the start need, rounded up to a power of two, at least {LEAST_ADAPTER_MB}",
    )
    device: str = Field(
        default="cpu",
        description="device of layers and cache memory: cpu, cuda or cuda:N (with numerics fast)",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="replay steps: on device cuda, decode and verify "
        "steps as captured graphs; on device cpu, these and whole "
        "prompt chunks as recorded kernels",
    )
    threads: int = Field(default=1, ge=1, le=256, description="compute threads of this process")
    transport: TransportName = Field(
        default="auto",
        description="UCX profile: shm within a host, tcp between hosts, "
        "cuda between devices of one host",
    )
    transport_interface: str = Field(
        default="",
        description="network devices for UCX to listen on, like eth0 or mlx5_0:1,eth0; default: all",
    )
    transport_ports: str = Field(
        default="", description="TCP ports for UCX, like 7300-7363; default: any"
    )
    stage_channel: StageChannelName = Field(
        default="auto",
        description="how tensors go from stage to stage: nccl between devices, ucx through host "
        "memory; auto: nccl if every stage has its own device",
    )
    frame_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="seconds after which a stage that accepts no frame is lost; grows to "
        "8 times the longest of the last 64 steps",
    )
    draft: Path | None = Field(
        default=None,
        description="directory of a draft model, or suffix: drafts from the request's own text; a "
        "decode pool then speculates",
    )
    spec_topk: int = Field(
        default=1,
        ge=1,
        le=32,
        description="continuations drafted per node, the same in pools of both roles; 1: chains",
    )
    spec_steps: int = Field(default=5, ge=1, le=16, description="most tokens drafted ahead")
    spec_draft_tokens: int = Field(
        default=5, ge=1, le=128, description="draft tokens verified per step and request"
    )
    spec_prompt: bool = Field(
        default=True,
        description="send the draft model's state of the prompt between pools "
        "that both have --draft; no: never",
    )
    spec_suffix: bool = Field(
        default=True,
        description="beside a draft model, draft from the request's own text where that is "
        "likelier to be accepted",
    )
    spec_adaptive: bool = Field(
        default=True, description="shorten drafts, or draft nothing, while that raises throughput"
    )
    caller_stall_s: float = Field(
        default=120.0,
        gt=0,
        le=MAX_WAIT_S,
        description="seconds that a router may leave a response unread; must exceed its client_stall_s",
    )
    drain_s: float = Field(
        default=10.0,
        ge=0,
        le=MAX_WAIT_S,
        description="seconds that running requests have to finish after SIGTERM",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest level logged"
    )
    log_style: Literal["human", "json"] = Field(
        default="human", description="lines for people or for machines"
    )
    otel_endpoint: str = Field(
        default="", description="URL of an OTLP collector over gRPC; empty: no traces"
    )

    @field_validator("max_context")
    @classmethod
    def _checked_context(cls, num_tokens: int) -> int:
        if 0 < num_tokens < MIN_CONTEXT_TOKENS:
            raise ValueError(
                f"max_context must be 0 or at least {MIN_CONTEXT_TOKENS} tokens, got {num_tokens}"
            )
        return num_tokens

    @field_validator("device")
    @classmethod
    def _checked_device(cls, text: str) -> str:
        if re.fullmatch(r"cpu|cuda(:[0-9]+)?", text) is None:
            raise ValueError(f"device must be cpu, cuda or cuda:N, got {text!r}")
        return text

    @field_validator("transport_ports")
    @classmethod
    def _checked_ports(cls, text: str) -> str:
        try:
            return text and "{}-{}".format(*parse_ports(text))
        except ConfigError as error:
            raise ValueError(str(error)) from None

    def check(self) -> None:
        """Check the settings against each other, without torch and without the model.

        Raises:
            ConfigError: they contradict each other or are out of range.
        """
        if self.rank >= self.world_size:
            raise ConfigError(f"rank {self.rank} is outside 0..{self.world_size - 1}", field="rank")
        if self.rank > 0 and not self.leader:
            raise ConfigError(
                "a process other than 0 needs --leader HOST:PORT (or MASTER_ADDR and MASTER_PORT)",
                field="leader",
            )
        if self.leader and announcement_path(self.leader) is None:
            parse_peer(self.leader, field="--leader")
        check_endpoint(self.otel_endpoint)
        if self.draft is not None and self.draft != SUFFIX:
            check_model_folder(self.draft, field="draft")
        if self.adapters is not None:
            adapter_folders(self.adapters)
        elif self.adapters_mb is not None:
            raise ConfigError("adapters_mb needs adapters", field="adapters_mb")
        self._check_tiers()
        _ = self.placement
        self.binding.check()

    @property
    def tiers(self) -> tuple[str, ...]:
        """Return the settings that give the prefix cache a tier each, of those that are set."""
        found = {
            "host_cache_mb": self.host_cache_mb > 0,
            "disk_cache": self.disk_cache is not None,
            "cache_server": self.cache_server is not None,
        }
        return tuple(name for name, is_set in found.items() if is_set)

    def _check_tiers(self) -> None:
        if (self.cache_server is None) != (self.cache_server_key is None):
            raise ConfigError(
                "cache_server and cache_server_key need each other", field="cache_server_key"
            )

    @property
    def placement(self) -> Placement:
        """Return this process's stage and its rank within it.

        Raises:
            ConfigError: processes and ranks do not fit together.
        """
        return Placement.of(self.rank, self.world_size, self.tp, self.dp_attention)

    @property
    def binding(self) -> NetworkBinding:
        """Return the devices and ports on which the transport listens.

        Raises:
            ConfigError: one of them is invalid or missing.
        """
        return NetworkBinding.parse(self.transport_interface, self.transport_ports)
