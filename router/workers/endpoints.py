"""Endpoints of one Kubernetes service from its EndpointSlices: a list, then a watch, repeatedly.

An endpoint counts while it is ready and not terminating. A watch that the API server ends is
resumed at its last version. After 410 Gone the endpoints are listed again. A lost connection is
retried with growing pauses. Until then the last known addresses are kept. Kubernetes replaces the
token every hour: it is read for each request, and certificates for each connection.
"""

import asyncio
import json
import logging
import os
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from prometheus_client import Counter

from router.workers.discovery import DiscoveryOptions, OnTargets, ServiceTarget
from runtime.config import Address
from runtime.errors import BatonError, UnavailableError

logger = logging.getLogger(__name__)

GROUP = "/apis/discovery.k8s.io/v1"
WATCH_S = 60.0  # requested duration of a watch; a server that is silent for longer is lost
SILENCE_S = WATCH_S + 15.0
ANSWER_S = 10.0
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 30.0

Slices = dict[str, frozenset[str]]  # addresses by slice name


@dataclass(frozen=True)
class _AccountToken(httpx2.Auth):
    """The service account's present token, in each request."""

    file: Path

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        token = await asyncio.to_thread(self.file.read_text)
        request.headers["Authorization"] = f"Bearer {token.strip()}"
        yield request


class _GoneError(Exception):
    """The API server no longer has the version to watch from."""


@dataclass(frozen=True)
class EndpointSource:
    """The ready endpoints of a service. Implements `Source`."""

    target: ServiceTarget
    options: DiscoveryOptions
    errors: Counter
    rng: random.Random

    async def run(self, found: OnTargets) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with self._connection() as client:
                    slices, version = await self._list(client)
                    found(_union(slices))
                    pause_s = FIRST_PAUSE_S
                    while True:
                        version = await self._watch(client, slices, version, found)
                        await asyncio.sleep(
                            FIRST_PAUSE_S
                        )  # in case the server ends each watch at once
            except _GoneError:
                logger.info("listing the endpoints of %s again", self.target.service)
            except (BatonError, OSError, httpx2.HTTPError, ValueError, KeyError) as error:
                self.errors.labels("kubernetes").inc()
                logger.warning(
                    "cannot follow the endpoints of %s, keeping the last ones: %s: %s",
                    self.target.service,
                    type(error).__name__,
                    error,
                )
            await asyncio.sleep(pause_s * self.rng.uniform(0.8, 1.2))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx2.AsyncClient]:
        account = self.options.service_account
        base = self.options.kubernetes_api or _in_cluster_api()
        verify: ssl.SSLContext | bool = True
        if base.startswith("https:"):
            verify = await asyncio.to_thread(
                ssl.create_default_context, cafile=str(account / "ca.crt")
            )
        timeout = httpx2.Timeout(ANSWER_S, read=SILENCE_S)
        async with httpx2.AsyncClient(
            base_url=base,
            verify=verify,
            timeout=timeout,
            trust_env=False,
            auth=_AccountToken(account / "token"),
        ) as client:
            yield client

    async def _list(self, client: httpx2.AsyncClient) -> tuple[Slices, str]:
        """Return every slice of the service, and the version to watch from."""
        response = await client.get(await self._path(), params=self._selector(), timeout=ANSWER_S)
        _check(response.status_code, response.text)
        answer = response.json()
        slices = {
            item["metadata"]["name"]: self._addresses(item) for item in answer.get("items") or []
        }
        return slices, str(answer["metadata"]["resourceVersion"])

    async def _watch(
        self, client: httpx2.AsyncClient, slices: Slices, version: str, found: OnTargets
    ) -> str:
        """Apply changes until the server ends the watch; return the version to continue from."""
        parameters = {
            **self._selector(),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(round(WATCH_S)),
        }
        async with client.stream("GET", await self._path(), params=parameters) as response:
            if response.status_code != httpx2.codes.OK:
                _check(response.status_code, (await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                event = json.loads(line)
                item = event["object"]
                if event["type"] == "ERROR":
                    _check(int(item.get("code", 0)), str(item.get("message", item)))
                version = str(item["metadata"]["resourceVersion"])
                if self._apply(event["type"], item, slices):
                    found(_union(slices))
        return version

    def _apply(self, kind: str, item: dict[str, Any], slices: Slices) -> bool:
        """Apply an event; return whether the addresses may have changed."""
        name = item["metadata"].get("name", "")
        if kind in ("ADDED", "MODIFIED"):
            slices[name] = self._addresses(item)
        elif kind == "DELETED":
            slices.pop(name, None)
        return kind != "BOOKMARK"

    def _addresses(self, item: dict[str, Any]) -> frozenset[str]:
        ports = [
            port["port"]
            for port in item.get("ports") or []
            if self.target.port in (port.get("name"), str(port.get("port")))
        ]
        return frozenset(
            str(Address(host, port))
            for port in ports
            for endpoint in item.get("endpoints") or []
            if _is_usable(endpoint.get("conditions") or {})
            for host in endpoint["addresses"]
        )

    def _selector(self) -> dict[str, str]:
        return {"labelSelector": f"kubernetes.io/service-name={self.target.service}"}

    async def _path(self) -> str:
        namespace = self.target.namespace
        if not namespace:
            namespace = await asyncio.to_thread(
                (self.options.service_account / "namespace").read_text
            )
        return f"{GROUP}/namespaces/{namespace.strip()}/endpointslices"


def _in_cluster_api() -> str:
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise UnavailableError(
            "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: not running in a pod"
        )
    return f"https://{Address(host, int(port))}"


def _check(code: int, text: str) -> None:
    """Check the status code of the API server.

    Raises:
        _GoneError: the watched version is too old.
        UnavailableError: any other code but 200.
    """
    if code == httpx2.codes.GONE:
        raise _GoneError
    if code != httpx2.codes.OK:
        raise UnavailableError(f"the API server answered {code}: {text[:200]}")


def _is_usable(conditions: dict[str, Any]) -> bool:
    """Return whether an endpoint is ready and not terminating.

    A missing condition means unknown and counts as ready by Kubernetes' rules. Services that
    publish not-ready addresses report terminating endpoints as ready, too.
    """
    return conditions.get("ready") is not False and not conditions.get("terminating")


def _union(slices: Slices) -> frozenset[str]:
    return frozenset().union(*slices.values())
