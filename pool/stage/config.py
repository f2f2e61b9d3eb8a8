"""The settings of a prefill or decode process. Flags and one TOML file fill it; it never changes
after."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from engine.core.layer_range import Placement
from runtime.config import MAX_WAIT_S, AddressField, parse_peer
from runtime.errors import ConfigError
from runtime.model_files.model_folder import check_model_folder
from runtime.observe.tracing_setup import check_endpoint
from runtime.process.announce import announcement_path
from runtime.security.access import TlsConfig
from transfer.ucx.binding import UcxBinding, parse_ports

TransportName = Literal["auto", "shm", "tcp", "cuda"]
StageChannelName = Literal["auto", "ucx", "nccl"]
BALANCED = "balanced"  # a partition of as much weight for every stage
MIN_CONTEXT_TOKENS = (
    16  # a router's own first request needs six, and waits for a pool that can hold them
)


class WorkerConfig(TlsConfig):
    """One process of a pool: its place, its memory, its limits."""

    model: Path = Field(description="directory of the checkpoint (config.json, *.safetensors)")
    model_name: str = Field(
        default="", description="name clients know the model by; default: the directory's name"
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
        description="which process of the pool this is, counted stage by stage; 0 leads",
    )
    world_size: int = Field(
        default=1, ge=1, le=64, description="processes of the pool: its stages times --tp"
    )
    tp: int = Field(
        default=1,
        ge=1,
        le=8,
        description="ranks that share each stage, with equal parts of its weights "
        "and cache: 1, 2, 4 or 8 (device cpu)",
    )
    ep: int = Field(
        default=0,
        ge=0,
        le=8,
        description="ranks of a stage that experts are spread over, whole ones: all "
        "of them, so as many as --tp; 0: likewise",
    )
    dp_attention: int = Field(
        default=1,
        ge=1,
        le=8,
        description="data ranks: groups of these ranks, of which each has "
        "requests, and a cache of them, of its own",
    )
    overlap_tokens: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="batches of so many tokens or more run in two "
        "halves on the ranks of a stage, and one "
        "computes while the other's parts are under "
        "way; 0: none do",
    )
    overlap_steps: bool = Field(
        default=False,
        description="prepare a decode step while the one before it computes (a "
        "decode pool of one process, without a draft)",
    )
    leader: str = Field(
        default="",
        description="HOST:PORT of stage 0's gRPC server, or the file:///PATH that it "
        "announces itself in; needed by the other stages",
    )
    partition: str = Field(
        default="",
        description='layers per stage, as "3,5"; balanced: so that all stages read '
        "about as much of the weights in a step; default: even, later "
        "stages one more",
    )
    page_size: int = Field(default=64, ge=1, le=4096, description="tokens per cache page")
    max_context: int = Field(
        default=0,
        ge=0,
        description="tokens of prompt and answer together, at least "
        f"{MIN_CONTEXT_TOKENS}; 0: the model's, or as many as the "
        "cache can hold",
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
        description="share of the memory of the machine, container or device that weights and "
        "cache may take together, when --memory-mb is 0; 0: 0.4 of a host, 0.8 of a "
        "container's limit, 0.85 of a device",
    )
    max_running: int = Field(
        default=16, ge=1, le=4096, description="requests that compute at the same time"
    )
    max_landing: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="requests that hold memory beyond them while their "
        "prompts land or they wait for a turn (decode); 0: "
        "twice --max-running up to 32, none above",
    )
    max_queued: int = Field(
        default=256, ge=1, le=65536, description="requests that may wait (prefill)"
    )
    chunk_tokens: int = Field(default=512, ge=1, le=65536, description="prompt tokens per forward")
    prefix_cache: bool = Field(
        default=True,
        description="keep what prompts left and compute only what follows it (prefill)",
    )
    decode_cache: bool = Field(
        default=True,
        description="keep prompts that landed and what was drawn, and be sent "
        "only what follows it (decode)",
    )
    prefix_snapshots: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="recurrent states to keep with it, where the "
        "model has any (prefill); 0: twice "
        "--max-running, as far as a fifth of the "
        "cache holds them",
    )
    local_rest_tokens: int = Field(
        default=0,
        ge=0,
        le=65536,
        description="a decode pool that holds all but so many tokens of a prompt, or fewer "
        "where its streams would suffer, computes these itself, without a "
        "prefill worker, where the model has attention alone; 0: never",
    )
    step_limit_s: float = Field(
        default=0,
        ge=0,
        le=86400,
        description="seconds a step may take; then the engine counts as hung, its requests "
        "move elsewhere and the process ends; 0: 20 times the longest step of "
        "late, at least 60",
    )
    numerics: Literal["exact", "fast"] = Field(
        default="exact", description="exact: the same bits from every topology"
    )
    weights: Literal["model", "int8"] = Field(
        default="model",
        description="model: in the model's type; int8: matrices of projections in eight bits, "
        "multiplied by activations in eight bits (device cpu)",
    )
    device: str = Field(
        default="cpu",
        description="what layers and cache memory are on: cpu, cuda or cuda:N (with numerics fast)",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="replay steps: where device is cuda decode and verify "
        "steps as captured graphs, where it is cpu these and whole "
        "chunks of prompts as recorded kernels",
    )
    threads: int = Field(default=1, ge=1, le=256, description="compute threads of this process")
    transport: TransportName = Field(
        default="auto",
        description="UCX profile: shm within a host, tcp between hosts, "
        "cuda between devices of one host",
    )
    transport_interface: str = Field(
        default="",
        description="network devices UCX listens on, as eth0 or mlx5_0:1,eth0; default: all",
    )
    transport_ports: str = Field(
        default="", description="TCP ports UCX listens in, as 7300-7363; default: any"
    )
    stage_channel: StageChannelName = Field(
        default="auto",
        description="how tensors go from stage to stage: nccl between devices, ucx through host "
        "memory; auto: nccl when every stage has a device of its own",
    )
    frame_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="a stage that does not take a frame for so long is lost; grows to "
        "8 times the longest of the last 64 steps",
    )
    draft: Path | None = Field(
        default=None, description="directory of a draft model; a decode pool then speculates"
    )
    spec_topk: int = Field(
        default=1,
        ge=1,
        le=32,
        description="continuations drafted per node, alike in pools of both roles; 1 drafts chains",
    )
    spec_steps: int = Field(default=5, ge=1, le=16, description="tokens drafted ahead at most")
    spec_draft_tokens: int = Field(
        default=5, ge=1, le=128, description="drafted tokens verified per step and request"
    )
    spec_prompt: bool = Field(
        default=True,
        description="the draft's state of the prompt is handed over between pools "
        "that both have --draft; no: it never is",
    )
    spec_adaptive: bool = Field(
        default=True, description="shorten drafts, or draft nothing, while that yields more"
    )
    caller_stall_s: float = Field(
        default=120.0,
        gt=0,
        le=MAX_WAIT_S,
        description="how long a router may leave a response unread; above its client_stall_s",
    )
    drain_s: float = Field(
        default=10.0,
        ge=0,
        le=MAX_WAIT_S,
        description="how long SIGTERM lets running requests finish",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least level logged"
    )
    log_style: Literal["human", "json"] = Field(
        default="human", description="for people or for machines"
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
        """Raises ConfigError for what the single settings do not show, and needs neither torch nor
        the model to be seen."""
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
        if self.draft is not None:
            check_model_folder(self.draft, field="draft")
        _ = self.placement
        self.binding.check()

    @property
    def placement(self) -> Placement:
        """Which stage, and which rank of it. Raises ConfigError when processes and ranks do not fit
        together."""
        return Placement.of(self.rank, self.world_size, self.tp, self.dp_attention)

    @property
    def binding(self) -> UcxBinding:
        """Where UCX listens. Raises ConfigError."""
        return UcxBinding.parse(self.transport_interface, self.transport_ports)
