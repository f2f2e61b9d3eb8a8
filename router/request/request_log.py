"""The request log: a line of JSON for each choice of each request, when it ends.

A thread writes the lines, because a disk may be slow. A record that finds the queue full is dropped
and counted in the log: no request waits for its record. The file is opened again after it was moved
or removed, as programs that rotate logs do.
"""

import json
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from ipaddress import IPv6Network, ip_address
from pathlib import Path
from queue import Full, Queue
from typing import BinaryIO

from router.request.answer import Answer
from router.request.timeline import STAGES, Timeline
from router.request.validate import AdmissibleRequest
from runtime.errors import BatonError, ConfigError
from runtime.observe.tracing import trace_ids
from runtime.security.access import Caller

logger = logging.getLogger(__name__)

STANDARD_OUTPUT = Path("-")
MAX_QUEUED = 8192
REPORT_S = 60.0  # between two log lines about dropped records
CLOSE_S = 5.0
_DIGITS = 6  # microseconds


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One choice of a request: no text and no token, only sizes, durations and workers.

    Attributes:
        time: of arrival, in UTC.
        client: the name of its token or certificate, or else its address (of IPv6 the network).
        outcome: `stop`, `length`, `aborted`, `cancelled` (the client left, or another choice
            failed), `failed` (for lack of capacity, too), or `refused` (invalid, or beyond a quota).
        error: ErrorInfo.reason of a request that failed or was refused.
        timings: seconds of each stage that happened, by their names in `Timings`; `ttft_s` is the
            time to the first token, `total_s` the whole.
        adapter: that the request has.
        prefill: address of the last prefill worker, and `decode` of the last decode pool.
        trace_id: of the call, if its client or this router traces it.
        retries: attempts that were repeated on another worker; `migrations`: lost decode pools.
    """

    time: str
    request_id: str
    choice: int
    client: str
    outcome: str
    error: str = ""
    priority: int = 0
    adapter: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    pulled_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    server_tokens: int = 0
    completion_tokens: int | None = None
    timings: dict[str, float] = field(default_factory=dict)
    prefill: str = ""
    decode: str = ""
    trace_id: str = ""
    retries: int = 0
    migrations: int = 0

    def line(self) -> bytes:
        """Return the record as JSON, without fields that have their default."""
        values = {
            each.name: value
            for each in fields(self)
            if (value := getattr(self, each.name)) != each.default
        }
        return json.dumps(values, separators=(",", ":")).encode()


def refused(
    request_id: str, caller: Caller, timeline: Timeline, error: BatonError
) -> RequestRecord:
    """Return the record of a request that was refused before it was admitted."""
    return RequestRecord(
        time=_time(timeline.age_s),
        request_id=request_id,
        choice=0,
        client=client_of(caller),
        outcome="refused",
        error=error.reason,
        timings={"total_s": round(timeline.age_s, _DIGITS)},
        trace_id=trace_ids().get("trace_id", ""),
    )


def ended(
    request: AdmissibleRequest, caller: Caller, answer: Answer, error: BaseException | None
) -> RequestRecord:
    """Return the record of a choice that has ended, with the error that its client received."""
    timeline, usage = answer.timeline, answer.usage
    timings = {
        name: round(getattr(timeline.timings, name), _DIGITS)
        for name in (*STAGES.values(), "total_s")
        if timeline.timings.HasField(name)
    }
    if timeline.ttft_s is not None:
        timings["ttft_s"] = round(timeline.ttft_s, _DIGITS)
    return RequestRecord(
        time=_time(timeline.age_s),
        request_id=request.engine.request_id,
        choice=answer.index,
        client=client_of(caller),
        outcome=timeline.outcome,
        error=error.reason if isinstance(error, BatonError) else "",
        priority=request.engine.priority,
        adapter=request.engine.adapter,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        pulled_tokens=usage.pulled_tokens,
        host_tokens=usage.host_tokens,
        disk_tokens=usage.disk_tokens,
        server_tokens=usage.server_tokens,
        completion_tokens=usage.completion_tokens,
        timings=timings,
        prefill=timeline.workers[0].address if timeline.workers else "",
        decode=timeline.workers[1].address if timeline.workers else "",
        trace_id=trace_ids().get("trace_id", ""),
        retries=timeline.num_retries,
        migrations=timeline.num_migrations,
    )


def client_of(caller: Caller) -> str:
    """Return a client as people know it: a name, or else an address."""
    if caller.names:
        return min(caller.names)
    try:
        packed = bytes.fromhex(caller.address)
    except ValueError:
        return caller.address
    if len(packed) == 8:  # the network of an IPv6 address
        return str(IPv6Network((packed + bytes(8), 64)))
    return str(ip_address(packed)) if packed else ""


def _time(age_s: float) -> str:
    moment = datetime.fromtimestamp(time.time() - age_s, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class RequestLog:
    """A file of records, or standard output for the path `-`, and the thread that writes it."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._path = path
        try:
            self._stream = self._open()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}", field="request_log"
            ) from error
        self._queue: Queue[RequestRecord | None] = Queue(MAX_QUEUED)
        self._num_dropped = 0
        self._reported_at_s = -REPORT_S
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def write(self, record: RequestRecord) -> None:
        """Queue a record, or drop it if the queue is full."""
        try:
            self._queue.put_nowait(record)
        except Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Write what is queued, within five seconds, and close the file."""
        with suppress(Full):  # a disk that stalls: what is queued is lost with the process
            self._queue.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._append(record.line())
            except OSError:  # such as a full disk
                self._num_dropped += 1
            self._report()
        if self._path != STANDARD_OUTPUT:
            self._stream.close()

    def _append(self, line: bytes) -> None:
        if self._was_moved():
            self._stream.close()
            self._stream = self._open()
        self._stream.write(line + b"\n")
        self._stream.flush()

    def _open(self) -> BinaryIO:
        if self._path == STANDARD_OUTPUT:
            return sys.stdout.buffer
        return self._path.open("ab", buffering=0)

    def _was_moved(self) -> bool:
        if self._path == STANDARD_OUTPUT:
            return False
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._stream.fileno()))
        except (FileNotFoundError, ValueError):  # removed, or closed before it could be opened
            return True

    def _report(self) -> None:
        if not self._num_dropped or time.monotonic() - self._reported_at_s < REPORT_S:
            return
        self._reported_at_s = time.monotonic()
        dropped, self._num_dropped = self._num_dropped, 0
        logger.warning("request log: %d records were not written", dropped)
