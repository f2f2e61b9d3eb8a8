"""S1-3, S1-5, S1-7 and S1-11: each place that plans, marks, asks or refuses is needed, and none is
without a check.

The sites are read from the source. Each is taken out in turn, and the check of its file must then
fail; a file with a site and without a check fails by itself.
"""

import ast
import importlib
import inspect
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import cast

import pytest
import torch
from torch import Tensor

from engine.backends.cpu.attention import CpuAttention
from engine.backends.cpu.recurrent import CpuRecurrent
from engine.contracts.model import ExpertTokens, ForwardContext, StageOutput
from engine.core.batch import FieldRule, ForwardBatch, ForwardMode
from engine.core.draft_trees import SpecRow
from engine.core.numerics import Numerics
from engine.core.rows import Row, build_batch
from engine.pipeline.stage_executor import StageExecutor
from engine.speculative.attention.multistep import MultiStepAttention
from engine.speculative.attention.multistep_device import DeviceRounds
from engine.speculative.attention.multistep_latent import MultiStepLatentAttention
from engine.speculative.attention.multistep_paged import PagedRounds
from runtime.errors import StalePlanError
from testing.batches import unmarked
from tests.decode import test_layerwise as layerwise
from tests.engine.backends import test_device_latent as device_latent
from tests.engine.backends import test_flashinfer as flashinfer
from tests.engine.backends.test_latent import make as cpu_latent
from tests.engine.core import test_batch
from tests.engine.graphs import test_host_steps as host_steps
from tests.engine.graphs import test_runner as graphs
from tests.engine.speculative import test_draft_graphs as draft_graphs
from tests.engine.speculative import test_multistep_device
from tests.engine.speculative import test_plan_marker as rounds
from tests.engine.speculative import test_recorded_drafts as recorded_drafts
from tests.support.contracts import latent
from tests.support.contracts.attention import GEOMETRY as FLASHINFER
from tests.support.kernels.attention import LAYER
from tests.support.kernels.flashinfer import FakeWrappers
from tests.support.models.tiny_models import LLAMA

ROOT = Path(__file__).parents[3]
PACKAGES = ("engine", "models", "decode", "prefill", "pool")
GEOMETRY = rounds.GEOMETRY


# What is planned: a backend, a batch for it, and how it runs on one (`extra` more tokens than the
# batch has).


@dataclass(frozen=True)
class Case:
    """`plans_again`: the same batch may be planned twice."""

    make: Callable[[], object]
    batch: Callable[[], ForwardBatch]
    run: Callable[..., Tensor]
    plans_again: bool = True
    more: Callable[[], None] = lambda: None


def kv_pools() -> dict[int, Tensor]:
    return {0: torch.zeros(20, 2, 1, rounds.PAGE_SIZE, rounds.HIDDEN)}


def paged(pools: Mapping[int, Tensor] = MappingProxyType({})) -> CpuAttention:
    return CpuAttention(kv_pools=pools or kv_pools(), geometry=GEOMETRY)


def tree_batch() -> ForwardBatch:
    return build_batch(
        ForwardMode.VERIFY,
        [
            Row(key, [3, 4, 5], 5 + key, [1 + key], 0, None, SpecRow(parents=(-1, 0, 0)))
            for key in range(2)
        ],
    )


def run_kv(backend: CpuAttention, batch: ForwardBatch, extra: int = 0) -> Tensor:
    x = torch.ones(batch.num_tokens + extra, 1, rounds.HIDDEN)
    return backend.run(0, x.expand(-1, 2, -1).contiguous(), x, x, batch)


def run_flashinfer(backend: CpuAttention, batch: ForwardBatch, extra: int = 0) -> Tensor:
    geometry = FLASHINFER
    kv = torch.ones(batch.num_tokens + extra, geometry.num_kv_heads, geometry.head_dim)
    return backend.run(
        LAYER, torch.ones(len(kv), geometry.num_heads, geometry.head_dim), kv, kv, batch
    )


def flashinfer_backend() -> object:
    geometry = FLASHINFER
    return flashinfer.make(
        geometry, torch.zeros(9, 2, geometry.num_kv_heads, geometry.page_size, geometry.head_dim)
    )


def latent_pools() -> dict[str, object]:
    geometry = replace(latent.GEOMETRY, max_selected=0)
    return {
        "latent_pools": {latent.LAYER: torch.zeros(100, geometry.page_size, geometry.entry_dim)},
        "index_pools": {},
        "geometry": geometry,
    }


def run_latent(backend: MultiStepLatentAttention, batch: ForwardBatch, extra: int = 0) -> Tensor:
    count = batch.num_tokens + extra
    return backend.run(
        latent.LAYER,
        torch.ones(count, 4, latent.GEOMETRY.entry_dim),
        torch.ones(count, latent.GEOMETRY.entry_dim),
        None,
        batch,
    )


def in_turn(*checks: Callable[[], None]) -> Callable[[], None]:
    def all_of_them() -> None:
        for check in checks:
            check()

    return all_of_them


CASES = {
    "engine/backends/cpu/attention.py": Case(
        paged,
        rounds.round_batch,
        run_kv,
        more=lambda: check_backend(Case(paged, tree_batch, run_kv)),
    ),
    "engine/backends/cuda/flashinfer.py": Case(
        flashinfer_backend,
        lambda: flashinfer.decode_batch(3, 4),
        run_flashinfer,
        more=in_turn(
            flashinfer.test_a_wrapper_that_was_planned_for_another_batch_is_never_run,
            graphs.test_s1_3_a_batch_planned_for_a_graph_is_not_run_eagerly,
        ),
    ),
    "engine/backends/cpu/latent.py": Case(
        lambda: latent.over_poison(cpu_latent),
        lambda: latent.batch_of({0: (0, 5), 1: (3, 2)}),
        run_latent,
    ),
    "engine/backends/cuda/latent.py": Case(
        device_latent.dense,
        lambda: latent.batch_of({0: (0, 5), 1: (3, 2)}),
        run_latent,
        more=device_latent.test_a_wrapper_that_was_planned_for_another_batch_is_never_run,
    ),
    "engine/speculative/attention/multistep.py": Case(
        lambda: MultiStepAttention(kv_pools=kv_pools(), geometry=GEOMETRY),
        rounds.round_batch,
        run_kv,
        plans_again=False,
    ),
    "engine/speculative/attention/multistep_paged.py": Case(
        lambda: PagedRounds(kv_pools=kv_pools(), geometry=GEOMETRY),
        rounds.round_batch,
        run_kv,
        plans_again=False,
    ),
    "engine/speculative/attention/multistep_device.py": Case(
        lambda: DeviceRounds(
            kv_pools=kv_pools(),
            geometry=GEOMETRY,
            wrappers=FakeWrappers(),
            device=torch.device("cpu"),
        ),
        rounds.round_batch,
        run_kv,
        plans_again=False,
        more=test_multistep_device.test_a_wrapper_that_was_planned_for_another_round_is_never_run,
    ),
    "engine/speculative/attention/multistep_latent.py": Case(
        lambda: MultiStepLatentAttention(**latent_pools()),  # type: ignore[arg-type]
        lambda: latent.batch_of({0: (4, 2), 1: (3, 2)}, mode=ForwardMode.DRAFT),
        run_latent,
        plans_again=False,
    ),
}


def check_backend(case: Case) -> None:
    """Check for one plan, marked by its planner for these rows; everything else is refused."""
    backend, other, batch = case.make(), case.make(), case.batch()
    with pytest.raises(StalePlanError):
        case.run(backend, batch)
    backend.plan(batch)  # type: ignore[attr-defined]
    assert not batch.needs_forward_metadata_init()
    assert batch.forward_metadata_planned_bs == batch.num_rows
    assert batch.forward_metadata_planner is backend
    assert case.run(backend, batch).shape[0] == batch.num_tokens
    for stale in (other, case.make()):
        with pytest.raises(StalePlanError):
            case.run(stale, batch)
    for derived in (unmarked(batch), batch.filter([0])):
        with pytest.raises(StalePlanError):
            case.run(backend, derived)
    if case.plans_again:
        with pytest.raises(StalePlanError):
            case.run(backend, batch, 1)
        backend.plan(batch)  # type: ignore[attr-defined]
    else:
        with pytest.raises(StalePlanError):
            backend.plan(batch)  # type: ignore[attr-defined]
    batch.request_keys += (9,)
    assert not batch.needs_forward_metadata_init(), "not declared equivalent"
    with pytest.raises(StalePlanError):
        case.run(backend, batch)
    case.more()


@pytest.mark.parametrize("path", CASES)
def test_s1_7_a_plan_serves_its_planner_and_its_rows_only(path: str) -> None:
    check_backend(CASES[path])


# What asks: the executor.


class Recorder:
    """A `StageModel` that notes the plan each forward runs on."""

    layer_range = None
    expert_tokens: Mapping[int, ExpertTokens] = {}

    def __init__(self) -> None:
        self.plans: list[object] = []

    def forward(
        self,
        batch: ForwardBatch,
        hidden: Tensor | None,
        context: ForwardContext,
        aux_hidden: Mapping[int, Tensor],
        selected_keys: Tensor | None,
    ) -> StageOutput:
        assert batch.forward_metadata_ready
        self.plans.append(batch.forward_metadata_plan)
        return StageOutput()


def executor() -> tuple[StageExecutor, CpuAttention, Recorder]:
    attention, model = paged(), Recorder()
    recurrent = CpuRecurrent(conv_pools={}, state_pools={}, numerics=Numerics.EXACT)
    return StageExecutor(model=model, attention=attention, recurrent=recurrent), attention, model  # type: ignore[arg-type]


def pad(batch: ForwardBatch) -> None:
    """Add one row of one token, as padding to a bucket does."""
    rows = [
        Row(key, [3], context, [1 + key], 0, None)
        for key, context in zip(batch.request_keys, batch.context_lens, strict=True)
    ]
    padded = build_batch(batch.mode, [*rows, Row(7, [0], 0, [0], 0, None)])
    for f in fields(ForwardBatch):
        if f.metadata["rule"] is FieldRule.RECOMPUTED:
            setattr(batch, f.name, getattr(padded, f.name))


def decode_batch() -> ForwardBatch:
    return build_batch(
        ForwardMode.DECODE, [Row(key, [3], 5 + key, [1 + key], 0, None) for key in range(2)]
    )


def check_executor() -> None:
    stage, attention, model = executor()
    fresh, planned = decode_batch(), decode_batch()
    stage.run(fresh)
    assert attention.num_plans == 1, "a fresh batch is planned once"
    attention.plan(planned)
    stage.run(planned)
    stage.run(planned)
    assert attention.num_plans == 2, "a batch that was planned outside is not planned again"
    assert model.plans[1:] == [planned.forward_metadata_plan] * 2
    ahead = decode_batch()
    stage.plan_ahead(ahead)
    assert ahead.forward_metadata_planner is attention, "a batch is planned while another one runs"
    stage.run(ahead)
    assert attention.num_plans == 3, "a plan made ahead is the one that the forward uses"
    assert model.plans[-1] is ahead.forward_metadata_plan


def test_s1_2_a_forward_plans_only_an_unplanned_batch() -> None:
    check_executor()


@pytest.mark.parametrize("replan_equivalent", [True, False])
def test_s1_5_padding_plans_again_only_if_declared_equivalent(*, replan_equivalent: bool) -> None:
    stage, attention, model = executor()
    batch = decode_batch()
    attention.plan(batch, replan_equivalent=replan_equivalent)
    before = batch.forward_metadata_plan
    pad(batch)
    stage.run(batch)
    assert attention.num_plans == 1 + replan_equivalent
    (ran,) = model.plans
    assert (ran is before) is not replan_equivalent, (
        "what was planned stays, or covers the padded rows"
    )
    assert batch.forward_metadata_planned_bs == 2 + replan_equivalent


@pytest.mark.parametrize("steps", [3, 5])
def test_s1_3_a_captured_round_is_planned_once_and_each_replay_once_more(steps: int) -> None:
    """A recording replaces a graph: the batch of a capture is marked, so its steps plan nothing; a
    replay is another batch of the same shape and has no plan of its own."""
    attention, captured = (
        MultiStepAttention(kv_pools=kv_pools(), geometry=GEOMETRY),
        rounds.round_batch(),
    )
    attention.plan(captured)
    recorded = [run_kv(attention, captured) for _ in range(steps - 1)]  # type: ignore[arg-type]
    assert attention.num_plans == 1
    for replay in range(1, 4):
        batch = unmarked(captured)
        assert batch.needs_forward_metadata_init()
        with pytest.raises(StalePlanError):
            run_kv(attention, batch)  # type: ignore[arg-type]
        attention.plan(batch)
        for expected in recorded:
            assert torch.equal(run_kv(attention, batch), expected)  # type: ignore[arg-type]
        assert attention.num_plans == 1 + replay


def test_s1_3_a_captured_forward_is_planned_before_it_and_never_by_it() -> None:
    stage, attention, model = executor()
    captured = decode_batch()
    attention.plan(captured)
    for _ in range(3):  # warm-ups and the capture itself
        stage.run(captured)
    assert (attention.num_plans, len(set(map(id, model.plans)))) == (1, 1)
    replayed = unmarked(captured)
    attention.plan(replayed)
    stage.run(replayed)
    assert attention.num_plans == 2
    assert model.plans[-1] is not model.plans[0]


def check_layerwise() -> None:
    with tempfile.TemporaryDirectory() as folder:
        layerwise.test_s1_chains_of_several_layers_are_the_formulas(
            Path(folder), "deepseek_v32", 2, 2, shares=False
        )


# S1-11: nothing of it may be missing.


CHECKS: dict[str, Callable[[], None]] = {
    **{path: (lambda case=case: check_backend(case)) for path, case in CASES.items()},  # type: ignore[misc]
    "engine/backends/plan.py": lambda: check_backend(CASES["engine/backends/cpu/attention.py"]),
    "engine/contracts/latent.py": lambda: check_backend(CASES["engine/backends/cpu/latent.py"]),
    "engine/core/batch.py": check_executor,
    "engine/pipeline/stage_executor.py": in_turn(
        check_executor,
        host_steps.test_a_row_that_starts_in_a_used_slot_has_no_earlier_state,
    ),
    "engine/graphs/host_steps.py": in_turn(
        lambda: host_steps.test_trees_of_one_size_are_replayed_with_any_branches(LLAMA),
        host_steps.test_a_plan_of_another_shape_is_refused,
    ),
    "engine/graphs/buckets.py": graphs.test_s1_3_a_replay_is_planned_once_and_a_planned_batch_runs_eagerly,
    "engine/speculative/replay/draft_graphs.py": draft_graphs.test_s1_3_a_draft_follows_captured_as_it_does_eagerly,
    "engine/speculative/replay/round_graphs.py": in_turn(
        draft_graphs.test_s1_3_a_draft_follows_captured_as_it_does_eagerly,
        draft_graphs.test_s1_3_a_round_planned_outside_is_not_replayed_from_a_graph,
    ),
    "engine/graphs/runner.py": in_turn(
        graphs.test_s1_3_a_replay_without_a_plan_of_its_own_is_refused,
        graphs.test_s1_3_a_replay_is_planned_once_and_a_planned_batch_runs_eagerly,
    ),
    "engine/speculative/replay/recorded_drafts.py": lambda: (
        recorded_drafts.test_trees_are_those_of_eager_steps(1)
    ),
    "engine/speculative/drafters/layerwise.py": check_layerwise,
    "engine/speculative/drafters/frozen.py": rounds.test_s1_2_a_chain_over_frozen_keys_is_planned_once,
    "engine/speculative/drafters/eagle.py": lambda: (
        rounds.test_s1_2_one_plan_per_step_and_path_none_inside_the_loop(2, 3)
    ),
}


@dataclass(frozen=True)
class Site:
    """The `number`-th statement of this kind in a function."""

    path: str
    function: str  # "Class.method"
    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.path} {self.function} {self.kind} {self.number}"


def kind_of(node: ast.AST) -> str:
    """Classify a call: mark, plan, question or refusal; empty for everything else."""
    if isinstance(node, ast.Raise) and "StalePlanError" in ast.unparse(node):
        return "refusal"
    if (
        isinstance(node, ast.Expr | ast.AugAssign)
        and isinstance(node.value, ast.Call)
        and (ast.unparse(node.value.func) == "plan_where_needed")
    ):
        return "plan"
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
    ):
        called = node.value.func
        owner = ast.unparse(called.value)
        if called.attr == "mark_forward_metadata_ready":
            return "mark"
        if called.attr == "plan" and not owner.endswith("wrapper"):
            return "plan"
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ".needs_forward_metadata_init"
    ):
        return "question"
    return ""


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(path.read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {
            prefix + member.name: member
            for member in members
            if isinstance(member, ast.FunctionDef)
        }
    return found


def sites() -> list[Site]:
    found = []
    for path in sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for name, function in functions(path).items():
            kinds = [kind for node in ast.walk(function) if (kind := kind_of(node))]
            found += [
                Site(path.relative_to(ROOT).as_posix(), name, kind, kinds[:place].count(kind))
                for place, kind in enumerate(kinds)
            ]
    return found


class Without(ast.NodeTransformer):
    """A patch that removes one site; a question returns yes, plan."""

    def __init__(self, target: ast.AST) -> None:
        self._target = target

    def visit(self, node: ast.AST) -> ast.AST:
        if node is not self._target:
            return self.generic_visit(node)
        return ast.copy_location(
            ast.Constant(value=True) if isinstance(node, ast.Call) else ast.Pass(), node
        )


def mutated(module: ModuleType, site: Site) -> FunctionType:
    function = functions(ROOT / site.path)[site.function]
    target = [node for node in ast.walk(function) if kind_of(node) == site.kind][site.number]
    tree = ast.fix_missing_locations(
        ast.Module([cast(ast.stmt, Without(target).visit(function))], [])
    )
    namespace: dict[str, FunctionType] = {}
    exec(compile(tree, site.path, "exec"), module.__dict__, namespace)
    return namespace[site.function.rpartition(".")[2]]


def test_s1_11_every_site_has_a_check() -> None:
    found = sites()
    assert {site.path for site in found} == set(CHECKS)
    assert {"mark", "plan", "question", "refusal"} == {site.kind for site in found}


@pytest.mark.parametrize("path", CHECKS)
def test_s1_11_with_all_sites_in_place_the_checks_pass(path: str) -> None:
    CHECKS[path]()


@pytest.mark.parametrize("site", sites(), ids=str)
def test_s1_11_a_site_that_is_taken_out_is_missed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(site.path.removesuffix(".py").replace("/", "."))
    owner, _, name = site.function.rpartition(".")
    original = inspect.unwrap(getattr(getattr(module, owner) if owner else module, name))
    mutant = cast(FunctionType, inspect.unwrap(mutated(module, site)))
    monkeypatch.setattr(original, "__code__", mutant.__code__)  # for modules that imported it, too
    with pytest.raises(BaseException):  # noqa: B017, PT011 - pytest's own failures are no Exceptions
        CHECKS[site.path]()


OF_NO_ROWS = {
    "idle_batch",
    "ForwardBatch.inner_idle",
}  # they have no parent whose mark they could keep
OPERATIONS = [
    name
    for name, function in functions(ROOT / "engine/core/batch.py").items()
    if name not in OF_NO_ROWS
    and function.returns is not None
    and "ForwardBatch" in ast.unparse(function.returns)
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_s1_11_a_reset_that_is_left_out_is_missed(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children that keep their parent's mark."""
    owner, _, name = operation.rpartition(".")
    place = ForwardBatch if owner else test_batch
    original = getattr(place, name)

    def forgetful(first: ForwardBatch, *others: object) -> object:
        made = original(first, *others)
        for child in made if isinstance(made, tuple) else (made,):
            child.plan_mark = first.plan_mark
        return made

    monkeypatch.setattr(place, name, forgetful)
    with pytest.raises(AssertionError):
        test_batch.test_s1_6_membership_operations_drop_the_marker(name)


def test_s1_11_every_membership_operation_is_tried() -> None:
    assert {name.rpartition(".")[2] for name in OPERATIONS} <= set(test_batch.OPERATIONS)
    assert {"filter", "split"} == {name.rpartition(".")[2] for name in OPERATIONS}
