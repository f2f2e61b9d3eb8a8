"""Bounds that pages state are those of the code: each is read there, without loading it, and looked
for on the page."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from operator import add, floordiv, lshift, mul, or_, sub
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

_OPERATIONS = {
    ast.LShift: lshift,
    ast.Mult: mul,
    ast.Add: add,
    ast.Sub: sub,
    ast.FloorDiv: floordiv,
    ast.BitOr: or_,
}
KIB, MIB = 1 << 10, 1 << 20


@cache
def constants(path: str) -> Mapping[str, ast.expr]:
    """Return what a module assigns at its top level and, as CLASS.FIELD, in its classes, and what
    it imports by name: a literal, or the default of a `Field`."""
    found: dict[str, ast.expr] = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        source = (
            f"{(node.module or '').replace('.', '/')}.py"
            if isinstance(node, ast.ImportFrom)
            else ""
        )
        if isinstance(node, ast.ImportFrom) and (ROOT / source).is_file():
            found |= {
                alias.name: constants(source)[alias.name]
                for alias in node.names
                if alias.name.isupper() and alias.name in constants(source)
            }
        body, prefix = (
            (node.body, f"{node.name}.") if isinstance(node, ast.ClassDef) else ([node], "")
        )
        for line in body:
            targets = (
                line.targets
                if isinstance(line, ast.Assign)
                else [line.target]
                if isinstance(line, ast.AnnAssign)
                else []
            )
            value = line.value if isinstance(line, ast.Assign | ast.AnnAssign) else None
            for target in targets:
                if isinstance(target, ast.Name) and value is not None:
                    found[prefix + target.id] = _default(value)
                elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    found |= {
                        prefix + name.id: each
                        for name, each in zip(target.elts, value.elts, strict=True)
                        if isinstance(name, ast.Name)
                    }
    return found


def _default(value: ast.expr) -> ast.expr:
    if isinstance(value, ast.Call):
        return next((word.value for word in value.keywords if word.arg == "default"), value)
    return value


def number(place: str) -> float:
    """Return the number that PATH:NAME is."""
    path, _, name = place.partition(":")
    return _number(constants(path)[name], path)


def _number(node: ast.expr, path: str) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, path)
        case ast.BinOp(left=left, op=operation, right=right):
            result: float = _OPERATIONS[type(operation)](_number(left, path), _number(right, path))
            return result
        case ast.Name(id=name):
            return _number(constants(path)[name], path)
    raise ValueError(f"{path}: {ast.unparse(node)} is no number")


@dataclass(frozen=True)
class Stated:
    """A sentence of a page with places for numbers, and where these are; `unit`: what one of the
    page's is of the code's."""

    page: str
    text: str
    places: tuple[str, ...]
    unit: float = 1

    def sentence(self) -> str:
        return self.text.format(*(_spelled(number(place) / self.unit) for place in self.places))


def _spelled(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:g}"


SERVER, CALLS, INTAKE = (
    "runtime/rpc/server.py",
    "runtime/rpc/interceptor.py",
    "runtime/rpc/message_bounds.py",
)
ROUTER, GRAMMAR, LANGUAGE = (
    "router/config.py",
    "runtime/grammar/process.py",
    "runtime/grammar/language.py",
)
LINE, TIMES = "router/request/waiting_line.py", "router/request/service_times.py"
SECURITY, API, CLIENT = "docs/security.md", "docs/api.md", "docs/client.md"
OPERATIONS, MODELS, PREFIX = "docs/operations.md", "docs/models.md", "docs/prefix-cache.md"
STATED = [
    Stated(OPERATIONS, "at most {} tables", ("router/request/client_limits.py:MAX_TABLES",)),
    Stated(
        OPERATIONS,
        "the messages that carry requests, now {} |",
        ("runtime/version.py:WIRE_VERSION",),
    ),
    Stated(
        OPERATIONS,
        "schema version of the handoff, now {}, the weights",
        ("transfer/plan/compatibility.py:SCHEMA_VERSION",),
    ),
    Stated(SECURITY, "costs one window of {} KiB", (f"{SERVER}:WINDOW_BYTES",), KIB),
    Stated(
        SECURITY, "`max_message_bytes` ({} MiB)", (f"{ROUTER}:RouterConfig.max_message_bytes",), MIB
    ),
    Stated(
        SECURITY,
        "of calls with one answer {} KiB; of health and reflection {} KiB",
        (f"{CALLS}:MAX_QUESTION_BYTES", f"{CALLS}:MAX_OPEN_BYTES"),
        KIB,
    ),
    Stated(
        SECURITY, "if it has more than {} KiB", (f"{INTAKE}:MessageBounds.uncounted_bytes",), KIB
    ),
    Stated(SECURITY, "({} MiB of a router's call)", (f"{CALLS}:SHARED_MESSAGE_BYTES",), MIB),
    Stated(
        SECURITY,
        "| {} fields and entries, {} numbers |",
        (f"{INTAKE}:MAX_PARTS", f"{INTAKE}:MAX_NUMBERS"),
    ),
    Stated(SECURITY, "inflated, {} KiB and", (f"{INTAKE}:FREE_INFLATED_BYTES",), KIB),
    Stated(SECURITY, "and {} times its own size", (f"{INTAKE}:MAX_INFLATION",)),
    Stated(SECURITY, "| Messages being read | {} MiB in all", (f"{CALLS}:RECEIVING_BYTES",), MIB),
    Stated(SECURITY, "makes room for others after {} s", (f"{CALLS}:_CROWDED_TIMEOUT_S",)),
    Stated(SECURITY, "a token id counts as {} bytes more", (f"{INTAKE}:_HELD_NUMBER_BYTES",)),
    Stated(SECURITY, "bytes more | {} MiB |", (f"{ROUTER}:RouterConfig.max_held_bytes",), MIB),
    Stated(SECURITY, "`max_calls` | {},", (f"{ROUTER}:RouterConfig.max_calls",)),
    Stated(
        SECURITY,
        "`max_streams` | {}; {} of a worker |",
        (f"{ROUTER}:RouterConfig.max_streams", f"{SERVER}:ServerOptions.max_streams"),
    ),
    Stated(SECURITY, "of one peer half of them | {};", (f"{ROUTER}:RouterConfig.max_connections",)),
    Stated(
        SECURITY,
        "| {} more than the pool runs and queues; {} inputs in a message;",
        ("pool/request/router_call.py:SPARE_OPEN", "pool/request/router_call.py:MAX_INPUTS"),
    ),
    Stated(
        SECURITY, "{} of one request that are unread |", ("pool/request/streams.py:MAX_UNREAD",)
    ),
    Stated(
        SECURITY, "{} messages of scores for each", ("prefill/event_sender.py:MAX_UNREAD_SCORES",)
    ),
    Stated(SECURITY, "and endless ones: {} of those", (f"{CALLS}:_MAX_BACKGROUND_CALLS",)),
    Stated(SECURITY, "| A handshake | {} s |", (f"{SERVER}:HANDSHAKE_S",)),
    Stated(
        SECURITY, "{} are kept from connections", ("runtime/rpc/connections.py:RESERVED_FILES",)
    ),
    Stated(SECURITY, "{} of reflection;", (f"{CALLS}:_MAX_OTHER_OPEN_CALLS",)),
    Stated(SECURITY, "| Metadata of a call | {} KiB |", (f"{SERVER}:MAX_METADATA_BYTES",), KIB),
    Stated(
        SECURITY,
        "`client_stall_s` | {} s, then the call ends; {} s on workers",
        (
            f"{ROUTER}:RouterConfig.client_stall_s",
            "pool/stage/config.py:WorkerConfig.caller_stall_s",
        ),
    ),
    Stated(SECURITY, "closer together than {} s", (f"{SERVER}:MIN_PING_INTERVAL_S",)),
    Stated(
        SECURITY,
        "| {} connections: one more ends the oldest; one that is silent ends after {} s",
        (
            "runtime/observe/exposition.py:MAX_SCRAPES",
            "runtime/observe/exposition.py:SCRAPE_SILENCE_S",
        ),
    ),
    Stated(
        SECURITY,
        "| `--health-listen` | {0} connections, of one peer {0},",
        (f"{SERVER}:HEALTH_CONNECTIONS",),
    ),
    Stated(
        SECURITY, "messages of {} KiB; separate places", (f"{SERVER}:HEALTH_MESSAGE_BYTES",), KIB
    ),
    Stated(SECURITY, "(up to {} more)", ("runtime/rpc/connections.py:MAX_MARGIN",)),
    Stated(
        SECURITY,
        "Servers detect that within {} ms",
        ("runtime/rpc/rebinding_server.py:LOOK_S",),
        1e-3,
    ),
    Stated(
        SECURITY,
        "a value has at most {} characters, a message {},",
        (
            "runtime/observe/log.py:MAX_VALUE_CHARACTERS",
            "runtime/observe/log.py:MAX_MESSAGE_CHARACTERS",
        ),
    ),
    Stated(
        SECURITY, "at least {} characters", ("runtime/security/tokens.py:MIN_TOKEN_CHARACTERS",)
    ),
    Stated(SECURITY, "`Abort` takes {} ids", ("router/api/generation.py:MAX_ABORT_IDS",)),
    Stated(API, "the first {} of them", ("runtime/rpc/status.py:MAX_VIOLATIONS",)),
    Stated(
        API,
        "at most {} s, or {} s while workers are gone",
        ("router/request/demand.py:MAX_RETRY_S", "router/request/rejections.py:MAX_AWAY_S"),
    ),
    Stated(
        API,
        "schema or expression; of one expression or `pattern` | {}; {} |",
        (f"{LANGUAGE}:MAX_GRAMMAR_BYTES", f"{LANGUAGE}:MAX_REGEX_BYTES"),
    ),
    Stated(
        API,
        "| nesting, values, properties of a schema | {}, {}, {} |",
        (
            f"{LANGUAGE}:MAX_SCHEMA_DEPTH",
            f"{LANGUAGE}:MAX_SCHEMA_VALUES",
            f"{LANGUAGE}:MAX_PROPERTIES",
        ),
    ),
    Stated(
        API, "and similar | {}; {} |", (f"{LANGUAGE}:MAX_REPETITIONS", f"{LANGUAGE}:MAX_LENGTH")
    ),
    Stated(
        API,
        "| CPU time to compile it | {} s |",
        ("runtime/grammar/checking.py:LAST_CPU_S",),
    ),
    Stated(API, "if many choices share a step | {} s;", (f"{GRAMMAR}:BURST_CPU_S",)),
    Stated(API, "s; {} ms |", (f"{GRAMMAR}:TOKEN_CPU_S",), 1e-3),
    Stated(API, "after its forward | {} s |", (f"{GRAMMAR}:ANSWER_S",)),
    Stated(API, "with {} MiB beyond the tokenizer", (f"{GRAMMAR}:MEMORY_BYTES",), MIB),
    Stated(API, "Clients may ping every {} s", (f"{SERVER}:MIN_PING_INTERVAL_S",)),
    Stated(
        API,
        "The server pings every {} s and drops a silent client after another {} s",
        (f"{ROUTER}:RouterConfig.keepalive_s", f"{ROUTER}:RouterConfig.keepalive_timeout_s"),
    ),
    Stated(
        API, "`--max-message-bytes` ({} MiB)", (f"{ROUTER}:RouterConfig.max_message_bytes",), MIB
    ),
    Stated(
        API,
        "each of up to {} stop strings {} bytes",
        (
            "router/request/validate.py:MAX_STOP_STRINGS",
            "router/request/validate.py:MAX_STOP_STRING_BYTES",
        ),
    ),
    Stated(
        API, "come together in the next one, at most {}.", ("router/request/answer.py:MAX_JOINED",)
    ),
    Stated(
        API,
        "unread for `client_stall_s` ({} s) gets `CANCELLED`",
        (f"{ROUTER}:RouterConfig.client_stall_s",),
    ),
    Stated(API, "at most every {} s", ("router/api/load.py:MIN_INTERVAL_S",)),
    Stated(
        API,
        "or one that has more than {} inputs ends the call",
        ("pool/request/router_call.py:MAX_INPUTS",),
    ),
    Stated(API, "more than {} that are unread", ("pool/request/streams.py:MAX_UNREAD",)),
    Stated(
        CLIENT,
        "pauses grow from {} s to {} s",
        ("baton/retry.py:Retry.first_pause_s", "baton/retry.py:Retry.last_pause_s"),
    ),
    Stated(
        OPERATIONS,
        "A request may lose `migrations` pools ({})",
        (f"{ROUTER}:RouterConfig.migrations",),
    ),
    Stated(
        OPERATIONS,
        "and no more than {} s; {} s while workers are gone",
        ("router/request/demand.py:MAX_RETRY_S", "router/request/rejections.py:MAX_AWAY_S"),
    ),
    Stated(OPERATIONS, "; of {} clients", (f"{TIMES}:MAX_CLIENTS",)),
    Stated(OPERATIONS, "Of the first {} requests the one goes first", (f"{LINE}:LOOK_AHEAD",)),
    Stated(
        OPERATIONS,
        "as long as {} MiB are free for each",
        ("engine/kernels/host/aot/precompile.py:PROCESS_BYTES",),
        MIB,
    ),
    Stated(
        OPERATIONS,
        "the worker receives no new requests | {} s |",
        ("router/workers/watch.py:MIN_SILENCE_S",),
    ),
    Stated(
        OPERATIONS,
        "or messages of which none ends | {} s |",
        ("transfer/ucx/silence.py:PEER_SILENCE_S",),
    ),
    Stated(
        OPERATIONS,
        "(`frame_timeout_s`, {} s)",
        ("pool/stage/config.py:WorkerConfig.frame_timeout_s",),
    ),
    Stated(
        PREFIX, "goes to one of the first {} requests of equal urgency", (f"{LINE}:LOOK_AHEAD",)
    ),
    Stated(PREFIX, "No request is passed more than {} times", (f"{LINE}:LOOK_AHEAD",)),
    Stated(PREFIX, "placed itself ({} blocks)", ("router/api/kv_events.py:MAX_BLOCKS",)),
    Stated(
        "docs/openai.md",
        "strings of more than {} bytes",
        ("router/request/validate.py:MAX_STOP_STRING_BYTES",),
    ),
    Stated(
        "docs/openai.md",
        "Baton's limit is {}.",
        ("router/request/validate.py:MAX_REQUEST_ID_BYTES",),
    ),
    Stated(
        "docs/openai.md",
        "sets the limit of a body: {} MiB",
        ("baton/gateway.py:GatewayConfig.max_body_bytes",),
        MIB,
    ),
    Stated(
        "docs/load.md",
        "number of requests: {}, or all of the trace",
        ("baton/load_command.py:DEFAULT_COUNT",),
    ),
    Stated(
        "docs/scale.md",
        "of more than {0} workers of a role, the router looks at {0} random workers and at up to {0}",
        ("router/workers/placement.py:MOST_COMPARED",),
    ),
    Stated(
        "docs/speculation.md",
        "| continuations drafted per node; 1 drafts chains | {} |",
        ("pool/stage/config.py:WorkerConfig.spec_topk",),
    ),
    Stated(
        "docs/speculation.md",
        "| maximum depth of a draft | {} |",
        ("pool/stage/config.py:WorkerConfig.spec_steps",),
    ),
    Stated(
        "docs/speculation.md",
        "| drafted tokens verified per step and request | {} |",
        ("pool/stage/config.py:WorkerConfig.spec_draft_tokens",),
    ),
]
# Numbers that pages write in words, and their values.
WORDS = [
    (SECURITY, "twice a second or twenty times", "runtime/rpc/connections.py:LOOK_S", 1 / 2),
    (SECURITY, "twenty times while many come", "runtime/rpc/connections.py:BUSY_LOOK_S", 1 / 20),
    (SECURITY, "five closer together", f"{SERVER}:MAX_PING_STRIKES", 5),
    (API, "A refusal is cached for ten minutes", "runtime/grammar/checking.py:REMEMBER_S", 600),
    (API, "the sixth ping that comes sooner", f"{SERVER}:MAX_PING_STRIKES", 5),
    (CLIENT, "within a twentieth of a second", "baton/retry.py:SPREAD_S", 1 / 20),
    (CLIENT, "and up to a quarter more", "baton/retry.py:MAX_JITTER", 1 / 4),
    (CLIENT, "Four attempts before anything has come", "baton/retry.py:Retry.attempts", 4),
    (CLIENT, "ten in a row without a new token", "baton/retry.py:Retry.resumptions", 10),
    (
        OPERATIONS,
        "from its own reports, four times a second",
        f"{ROUTER}:RouterConfig.watch_interval_s",
        1 / 4,
    ),
    (OPERATIONS, "stay for half a minute", "router/workers/discovery.py:DnsSource.keep_s", 30),
    (
        OPERATIONS,
        "a stage other than the leader three more",
        "pool/pipeline/follower.py:GOODBYE_S",
        3,
    ),
    (OPERATIONS, "half as long again", "router/workers/directory.py:START_MARGIN", 1.5),
    (
        OPERATIONS,
        "at least four seconds",
        "router/request/retries.py:FlowLimits.peer_wait_s",
        4,
    ),
    (OPERATIONS, "three times at most", f"{ROUTER}:RouterConfig.prefill_attempts", 3),
    (
        OPERATIONS,
        "remembers the pair for half a minute",
        "router/workers/links.py:SEVERED_MEMORY_S",
        30,
    ),
    (
        OPERATIONS,
        "was not measured within the last half minute",
        "router/workers/pace.py:MEMORY_S",
        30,
    ),
    (OPERATIONS, "the best prefill of the last minute", "runtime/pace.py:MEMORY_S", 60),
    (OPERATIONS, "lose half of their weight in a minute", f"{TIMES}:HALF_LIFE_S", 60),
    (OPERATIONS, "forgotten after five", f"{TIMES}:FORGET_S", 300),
    (OPERATIONS, "the median of three others and more", f"{TIMES}:MIN_CLIENTS", 3),
    (OPERATIONS, "is served every two seconds", f"{TIMES}:TRIAL_S", 2),
    (OPERATIONS, "to begin within five seconds", f"{LINE}:LEAST_SLACK_S", 5),
    (
        OPERATIONS,
        "together with prompts of four times its length",
        "router/workers/candidate.py:SHORT_RATIO",
        4,
    ),
    (OPERATIONS, "a quarter of the worker's tokens", "prefill/scheduler.py:SHORT_SHARE", 4),
    (
        OPERATIONS,
        "computes in half a second (three prompts",
        "router/workers/worker.py:PREFILL_LOOKAHEAD_S",
        0.5,
    ),
    (OPERATIONS, "three prompts at least", "router/workers/worker.py:PREFILL_LOOKAHEAD", 3),
    (
        OPERATIONS,
        "longer than a minute for a kernel",
        "engine/kernels/host/codegen/compiled.py:PATIENCE_S",
        60,
    ),
    (OPERATIONS, "reports every five seconds the progress", "baton/cluster.py:PROGRESS_S", 5),
    (PREFIX, "lengthen a step by a tenth", "decode/step_meter.py:REST_SHARE", 0.1),
    (PREFIX, "in the last half minute", "decode/step_meter.py:PACE_MEMORY_S", 30),
    (PREFIX, "must begin within five seconds", f"{LINE}:LEAST_SLACK_S", 5),
    (PREFIX, "does not answer within a second", "pool/pulls/puller.py:OFFER_S", 1),
    (PREFIX, "is not asked for ten seconds", "pool/pulls/puller.py:AVOID_S", 10),
    (PREFIX, "lends to sixteen", "pool/pulls/lender.py:MAX_LOANS", 16),
    (PREFIX, "silent for ten seconds", "pool/pulls/lender.py:MESSAGE_S", 10),
    (PREFIX, "which may take a minute", "pool/pulls/lender.py:LOAN_S", 60),
    (PREFIX, "At most eight prompts pull", "pool/prefix/block_reads.py:MAX_READS", 8),
    (PREFIX, "sends nothing for two seconds", "pool/tiers/cache_server.py:SILENT_S", 2),
    (PREFIX, "takes more than 30 for a prompt", "pool/tiers/stage_blocks.py:LIMIT_S", 30),
    (PREFIX, "is left alone for ten", "pool/tiers/cache_server.py:AVOID_S", 10),
    (PREFIX, "does not answer within 30 seconds", "pool/tiers/block_tier.py:READ_LIMIT_S", 30),
    (PREFIX, "a half before the first", "router/workers/holders.py:UNSEEN_COST", 0.5),
    (PREFIX, "of more than 16384 blocks", "pool/tiers/copies.py:MAX_POINTS", 16_384),
    (
        "docs/roles.md",
        "about twice as long as a decode step by default",
        "worker/chunk_budget.py:STEP_RATIO",
        2.0,
    ),
    ("docs/roles.md", "counts four times as busy", "router/workers/packing.py:STREAMS_WEIGHT", 4.0),
    ("docs/roles.md", "60 % of its capacity", "router/workers/packing.py:MOST_PACKED", 0.6),
    ("docs/roles.md", "more than a tenth of", "router/workers/packing.py:MOST_HANDOFF", 0.1),
    ("docs/roles.md", "the headroom by a quarter", "planner/planner.py:LEAST_GAIN", 1.25),
    ("docs/roles.md", "there is none for 30 s", "planner/planner.py:MIN_REST_S", 30.0),
    ("docs/roles.md", "four standard deviations", "planner/estimates.py:DEVIATIONS", 4.0),
    ("docs/roles.md", "less than 40 % of what", "planner/planner.py:CALM", 2.5),
    (
        "docs/parallel.md",
        "If a rank would receive a megabyte or more",
        "models/blocks/linear.py:SHARED_OUT_BYTES",
        MIB,
    ),
    (
        "docs/parallel.md",
        "three quarters of what a step may take",
        "engine/pipeline/ranks.py:_SHARE_OF_STEP",
        0.75,
    ),
]


@cache
def page(path: str) -> str:
    """Return a page on one line and its numbers without commas, so that sentences are found however
    they are set."""
    return re.sub(r"\s+", " ", re.sub(r"(?<=\d),(?=\d{3}\b)", "", (ROOT / path).read_text()))


@pytest.mark.parametrize(
    "stated", STATED, ids=lambda stated: f"{Path(stated.page).stem}: {stated.text}"
)
def test_a_number_of_a_page_is_that_of_the_code(stated: Stated) -> None:
    assert stated.sentence() in page(stated.page)


@pytest.mark.parametrize(("path", "words", "place", "expected"), WORDS)
def test_a_number_in_words_is_that_of_the_code(
    path: str, words: str, place: str, expected: float
) -> None:
    assert number(place) == pytest.approx(expected)
    assert words in page(path)


def test_numbers_are_read_in_every_notation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.architecture.test_figures.ROOT", tmp_path)
    (tmp_path / "code.py").write_text(
        "A, B = 1 << 10, -2.5\nC: int = 3 * A\nclass D:\n    e: int = Field(default=7)\n"
        "    f: float = 0.5\nG = call(1)\n"
    )
    assert [number(f"code.py:{name}") for name in ("A", "B", "C", "D.e", "D.f")] == [
        1024,
        -2.5,
        3072,
        7,
        0.5,
    ]
    with pytest.raises(ValueError, match="no number"):
        number("code.py:G")


@pytest.mark.parametrize(
    ("alert", "bound", "words"),
    [
        ("BatonRequestsFail", "> 0.05", "More than one request in twenty"),
        ("BatonErrorBudgetFast", "ratio_1h > 0.144", "More than 14.4 % of requests"),
        ("BatonErrorBudgetSlow", "ratio_6h > 0.06", "More than 6 % of requests"),
        (
            "BatonFirstTokenSlow",
            "p99_5m > 5",
            "One request in a hundred waits longer than five seconds",
        ),
        ("BatonQueueOld", "> 30", "for more than half a minute"),
        ("BatonPagesShort", "for: 15m", "for a quarter of an hour"),
        ("BatonPipelineIdle", "> 0.5", "more than half of the time"),
        ("BatonProcessDown", "[1h]", "within the hour"),
        ("BatonQuotaSpent", "> 0.1", "More than a tenth of a request per second"),
        ("BatonCacheMispredicted", "> 0.25", "More than a quarter of the prompts"),
        ("BatonDraftsRejected", "< 0.05", "Fewer than one drafted token in twenty"),
    ],
)
def test_a_runbook_names_the_threshold_of_its_alert(alert: str, bound: str, words: str) -> None:
    rule = (
        (ROOT / "deploy/alerts/rules.yaml")
        .read_text()
        .split(f"- alert: {alert}\n")[1]
        .split("- alert: ")[0]
    )
    entry = page("docs/runbooks.md").split(f"## {alert} ")[1].split(" ## ")[0]
    assert bound in rule
    assert words in entry


def test_time_limits_of_the_gpu_script_equal_those_of_its_page() -> None:
    script = (ROOT / "bench/gpu_all.sh").read_text()
    given = dict(re.findall(r"^ *part (\w+) (\d+) ", script, re.MULTILINE))
    rows = re.findall(
        r"^\| ((?:`\w+`(?:, )?)+) \| (\d+) \|", (ROOT / "docs/gpu.md").read_text(), re.MULTILINE
    )
    stated = {name: seconds for names, seconds in rows for name in re.findall(r"`(\w+)`", names)}
    assert stated == given
    assert f"`GPU_ALL_SECONDS` ({re.findall(r'GPU_ALL_SECONDS:-([0-9]+)', script)[0]})" in page(
        "docs/gpu.md"
    )
