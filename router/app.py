"""Composition root of a router: construction, start order and shutdown."""

import asyncio
import logging
import os
import random
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from protos import (
    adapters_pb2_grpc,
    caches_pb2_grpc,
    generation_pb2_grpc,
    orca_service_pb2_grpc,
)
from router.api.adapters import AdaptersService
from router.api.caches import CachesService
from router.api.generation import GenerationService, RequestLimits
from router.api.kv_events import CacheEvents
from router.api.load import ORCA_METHODS, ORCA_SERVICE, OpenRcaService
from router.api.readiness import SERVICE, Readiness
from router.api.status_page import status_pages
from router.cache_events import followed_events, published_events
from router.config import GenerationConfigUse, RouterConfig
from router.request.admission import Admission
from router.request.client_limits import LimitsFile
from router.request.flow import Services
from router.request.holdback import Holdback
from router.request.priorities import PriorityLimits
from router.request.rejections import AdmissionLimits
from router.request.request_log import RequestLog
from router.request.retries import FlowLimits
from router.request.service_times import ServiceTimeModel
from router.text.model_facts import ModelLimits, ServedModel, load_served_model
from router.workers.directory import Directory, DirectoryOptions
from router.workers.discovery import DiscoveryOptions
from runtime.clock import SystemClock
from runtime.config import describe
from runtime.errors import ConfigError
from runtime.model_files.model_folder import check_model_folder
from runtime.model_files.tokenizer_files import cache_folder, make_tokenizer
from runtime.observe.exposition import Exposition, Page, new_registry
from runtime.observe.metrics.calls import RpcMetrics
from runtime.observe.metrics.router import ClientMetrics, RouterMetrics
from runtime.observe.tracing import Tracing
from runtime.observe.tracing_setup import open_tracing
from runtime.process.announce import Announcement, write_announcement
from runtime.process.supervision import StopSignal, background
from runtime.rpc.server import GrpcServer, ServerOptions
from runtime.security.access import ChannelSecurity, ServerSecurity
from runtime.security.tokens import TokenList
from runtime.version import VERSION

VLLM_SERVICE = "vllm.grpc.engine.VllmEngine"
ENDLESS_METHODS = ORCA_METHODS | {f"/{VLLM_SERVICE}/SubscribeKvEvents"}

logger = logging.getLogger(__name__)


async def serve(
    config: RouterConfig, stop: StopSignal, *, on_start: Callable[[], None] = lambda: None
) -> None:
    """Run a router until `stop`, then drain it.

    `on_start` is called once every object that lives as long as the router has been built.

    Raises:
        ConfigError: the model directory, a certificate or token file, an address or a port cannot
            be used.
    """
    logger.debug("settings", extra=describe(config))
    security = _server_security(config)
    model = await _load_model(config)
    incarnation = uuid.uuid4().hex
    tracing = open_tracing(config.otel_endpoint, role="router", worker=incarnation)
    registry = new_registry(role="router", version=VERSION)
    services = _services(
        config,
        model.facts,
        registry,
        ChannelSecurity(security.certificates),
    )
    names = (SERVICE, VLLM_SERVICE) if config.vllm_engine else (SERVICE,)
    rpc_metrics = RpcMetrics.create(registry)
    server = _server(_server_options(config), names, ORCA_SERVICE, rpc_metrics, security, tracing)
    of_adapters = _adapter_servers(config, rpc_metrics, security, tracing)
    request_log = None if config.request_log is None else RequestLog(config.request_log)
    events = followed_events(config, services.directory.caches.prefill)
    generation = _add_apis(
        server, config, model, services, security, request_log, events, of_adapters
    )
    pages = status_pages(partial(generation.cluster_status, for_operators=True), generation.problem)
    try:
        async with (
            published_events(config, model.facts.name, events) as publishing,
            _listening(server, config, registry, incarnation, pages) as address,
        ):
            logger.info("router listens", extra={"address": address, "model": model.facts.name})
            readiness = Readiness(services, server.health, config.warm_up_s, names)
            for each in of_adapters.values():
                await each.start()
            on_start()
            async with background(
                stop,
                services.directory.run(),
                services.admission.run(),
                readiness.run(),
                publishing(),
            ):
                await stop.wait()
                servers = (server, *of_adapters.values())
                await asyncio.gather(*(each.drain(grace_s=config.drain_s) for each in servers))
    finally:
        await asyncio.gather(*(each.stop() for each in of_adapters.values()))
        if model.grammars is not None:
            await asyncio.to_thread(model.grammars.close)
        await asyncio.to_thread(tracing.close)
        if request_log is not None:
            await asyncio.to_thread(request_log.close)


def _server(
    options: ServerOptions,
    services: tuple[str, ...],
    also_served: str,
    metrics: RpcMetrics,
    security: ServerSecurity,
    tracing: Tracing,
) -> GrpcServer:
    return GrpcServer(
        options,
        services=services,
        metrics=metrics,
        security=security,
        background_methods=ENDLESS_METHODS,
        also_served=(also_served,),
        tracing=tracing,
    )


def _adapter_servers(
    config: RouterConfig, metrics: RpcMetrics, security: ServerSecurity, tracing: Tracing
) -> dict[str, GrpcServer]:
    """Return a server for each adapter that has an address, by name."""
    return {
        adapter: _server(
            replace(_server_options(config), listen=address, health_listen=None),
            (),
            VLLM_SERVICE,
            metrics,
            security,
            tracing,
        )
        for adapter, address in config.adapter_addresses.items()
    }


def _server_security(config: RouterConfig) -> ServerSecurity:
    """Return the requirements for clients.

    Raises:
        ConfigError: a file cannot be used, `operator_tokens` is set without `token_file`, or
            `salt_by_client` or `tenants_from` is set and nothing names clients.
    """
    security = ServerSecurity(
        config.certificates(),
        config.client_certificates,
        None if config.token_file is None else TokenList(config.token_file),
        operators=frozenset(config.operator_tokens),
        tenant_sources=frozenset(config.tenants_from),
    )
    if config.operator_tokens and config.token_file is None:
        raise ConfigError("operator_tokens needs token_file", field="operator_tokens")
    for field in ("salt_by_client", "tenants_from"):
        if getattr(config, field) and not security.names_clients:
            raise ConfigError(
                f"{field} needs token_file or clients' certificates: nothing else names a client",
                field=field,
            )
    return security


async def _load_model(config: RouterConfig) -> ServedModel:
    """Load the tokenizer and the facts of the model, and log what an operator should know.

    Raises:
        ConfigError: the model directory cannot be used.
    """
    check_model_folder(config.model, needs_weights=False)
    if notice := await asyncio.to_thread(make_tokenizer, config.model):
        logger.warning(notice)
    model = load_served_model(
        config.model,
        config.model_name,
        aliases=config.model_alias,
        own_sampling=config.generation_config is GenerationConfigUse.AUTO,
        user_control_tokens=config.user_control_tokens,
    )
    for notice in model.notices:
        logger.warning(notice)
    return model


@asynccontextmanager
async def _listening(
    server: GrpcServer,
    config: RouterConfig,
    registry: CollectorRegistry,
    incarnation: str,
    pages: Mapping[str, Page],
) -> AsyncIterator[str]:
    """Serve gRPC, metrics and pages for the length of the block; announce and yield the gRPC
    address.
    """
    exposition = None
    if config.metrics_port is not None:
        exposition = Exposition.start(
            registry, port=config.metrics_port, host=config.metrics_host, pages=pages
        )
    try:
        address = await server.start()
        if config.announce is not None:
            write_announcement(
                config.announce,
                Announcement(
                    address, exposition.port if exposition else None, os.getpid(), incarnation
                ),
            )
        yield address
    finally:
        await server.stop()
        if exposition is not None:
            exposition.close()


def _services(
    config: RouterConfig,
    facts: ModelLimits,
    registry: CollectorRegistry,
    security: ChannelSecurity,
) -> Services:
    """Build the objects that discover workers, admit requests and drive them. `security`
    authenticates the router to workers.
    """
    metrics = RouterMetrics.create(registry)
    discovery = DiscoveryOptions(
        config.discovery_interval_s, config.kubernetes_api, config.service_account
    )
    options = DirectoryOptions(
        config.prefill,
        config.decode,
        config.policy,
        config.watch_interval_s,
        security,
        discovery,
        longest_restart_s=0.0 if config.peer_wait_s else config.max_wait_s,
        pull_tokens=config.pull_tokens,
    )
    directory = Directory(options, facts, metrics, random.Random())
    # A measured restart time replaces the default only if no wait is configured.
    peer_wait_s = config.peer_wait_s or FlowLimits().peer_wait_s
    service_model = ServiceTimeModel(SystemClock())
    admission = Admission(
        directory,
        AdmissionLimits(
            config.max_waiting,
            config.max_wait_s,
            peer_wait_s,
            Holdback.parse(config.holdback),
            config.preempt_from,
        ),
        metrics,
        service_model,
    )
    limits = FlowLimits(
        prefill_attempts=config.prefill_attempts,
        peer_wait_s=peer_wait_s,
        capacity_wait_s=config.max_wait_s,
        migrations=config.migrations,
    )
    return Services(
        admission, directory, limits, metrics, service_model, ClientMetrics.create(registry)
    )


def _add_apis(
    server: GrpcServer,
    config: RouterConfig,
    model: ServedModel,
    services: Services,
    security: ServerSecurity,
    request_log: RequestLog | None,
    events: CacheEvents,
    of_adapters: Mapping[str, GrpcServer],
) -> GenerationService:
    """Register every service that clients call; return the one of the public API."""
    limits = RequestLimits(
        config.max_request_s,
        config.client_stall_s,
        PriorityLimits.parse(config.priority_limits),
        config.salt_by_client,
        None if config.client_limits is None else LimitsFile(config.client_limits, SystemClock()),
    )
    generation = GenerationService(
        model, services, limits, SystemClock(), security.caller, request_log
    )
    generation_pb2_grpc.add_GenerationServicer_to_server(generation, server.grpc)
    orca_service_pb2_grpc.add_OpenRcaServiceServicer_to_server(
        OpenRcaService(generation.load, generation.counts), server.grpc
    )
    adapters_pb2_grpc.add_AdaptersServicer_to_server(
        AdaptersService(services.directory), server.grpc
    )
    caches_pb2_grpc.add_CachesServicer_to_server(CachesService(services.directory), server.grpc)
    if config.vllm_engine:
        _add_vllm_engine(
            server,
            generation,
            config.model,
            model,
            events,
            of_adapters,
        )
    return generation


def _server_options(config: RouterConfig) -> ServerOptions:
    names = (
        "listen",
        "health_listen",
        "max_message_bytes",
        "max_calls",
        "max_held_bytes",
        "max_streams",
        "max_connections",
        "keepalive_s",
        "keepalive_timeout_s",
        "max_connection_age_s",
        "max_connection_age_grace_s",
        "reflection",
        "channelz",
    )
    return ServerOptions(
        write_s=config.client_stall_s, **{name: getattr(config, name) for name in names}
    )


def _add_vllm_engine(
    server: GrpcServer,
    generation: GenerationService,
    model_dir: Path,
    model: ServedModel,
    events: CacheEvents,
    of_adapters: Mapping[str, GrpcServer],
) -> None:
    """Register vLLM's engine service, and that of each adapter with its own server.

    Raises:
        ConfigError: its stubs are not installed.
    """
    try:
        from smg_grpc_proto.generated import vllm_engine_pb2_grpc

        from router.api.vllm_engine import VllmEngineService
        from router.api.vllm_tokenizer import gateway_tokenizer
    except ImportError as error:
        raise ConfigError(
            f"vllm_engine needs the package smg-grpc-proto: pip install 'baton[vllm]' ({error})",
            field="vllm_engine",
        ) from error
    tokenizer = gateway_tokenizer(model_dir, model, cache_folder() / "gateways")
    if tokenizer is not None and tokenizer.carrier is None:
        logger.warning(
            "gateways render chats and tokenize texts of this model by themselves: its tokenizer cannot "
            "carry texts, so HTTP completions lack the special tokens that begin a text"
        )
    service = VllmEngineService(generation, model_dir, tokenizer, events)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(service, server.grpc)
    for adapter, its_server in of_adapters.items():
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
            service.with_adapter(adapter), its_server.grpc
        )
