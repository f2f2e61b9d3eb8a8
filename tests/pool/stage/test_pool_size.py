"""Cache and context from flags and from the memory that is there, against sums done by hand, in
published shapes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from models.loader import read_model
from models.weights_digest import PoolWeights
from pool.stage.config import MIN_CONTEXT_TOKENS, WorkerConfig
from pool.stage.plan import plan_stage
from pool.stage.pool_size import PoolNeeds, PoolSize, plan_pool_size
from router.api.readiness import WARM_UP_PROMPT, WARM_UP_TOKENS
from runtime.config import load
from runtime.errors import ConfigError
from runtime.process.host_memory import HostMemory
from tests.support.models.checkpoints import make_checkpoint
from tests.support.models.published import LLAMA_3_1_8B, QWEN3_0_6B, QWEN3_5_9B, write_published

MIB, GIB = 1 << 20, 1 << 30
PROCESS = 384 * MIB
QWEN3_TOKEN = 28 * 2 * 8 * 128 * 2  # layers, keys and values, kv heads, head_dim, bf16
QWEN3_PARAMETERS = 596_049_920  # as published; the embedding is counted once
LLAMA_PARAMETERS = 8_030_261_248


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(
        tmp_path_factory.mktemp("published") / "Qwen3-0.6B", "Qwen3Config", QWEN3_0_6B
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published(
        tmp_path_factory.mktemp("published") / "Llama-3.1-8B", "LlamaConfig", LLAMA_3_1_8B
    )


def machine(total_bytes: int, available_bytes: int | None = None) -> Callable[[str], HostMemory]:
    return lambda device: HostMemory(
        total_bytes, total_bytes if available_bytes is None else available_bytes
    )


def size(
    model: Path, memory: Callable[[str], HostMemory], *, max_held: int = 16, **settings: object
) -> PoolSize:
    config = WorkerConfig.model_validate({"model": model, **settings})
    plan = plan_stage(
        config.model_copy(update={"num_pages": 2, "max_context": 0}), memory=machine(1024 * GIB)
    )
    return plan_pool_size(
        config, plan.description, plan.ranges, PoolNeeds(plan.geometry.specs, max_held), memory
    )


def test_published_shapes_have_their_published_parameters(qwen3: Path, llama: Path) -> None:
    for folder, count in ((qwen3, QWEN3_PARAMETERS), (llama, LLAMA_PARAMETERS)):
        description = read_model(folder)
        plan = plan_stage(WorkerConfig(model=folder, num_pages=2), memory=machine(1024 * GIB))
        assert description.weight_bytes(plan.model_layers) == 2 * count


def test_the_smallest_real_model_gets_its_whole_context_if_it_fits(qwen3: Path) -> None:
    """0.4 of 32 GiB, less its weights and a process, is above 40960 tokens."""
    found = size(qwen3, machine(32 * GIB))
    cache = int(0.4 * 32 * GIB) - PROCESS - 2 * QWEN3_PARAMETERS
    assert found == PoolSize(cache // (64 * QWEN3_TOKEN), 0, 40960)


def test_a_container_has_one_worker(qwen3: Path) -> None:
    """0.8 of 4 GiB, less its weights and a process: its context is shorter than a machine of that
    size would give."""
    cache = int(0.8 * 4 * GIB) - PROCESS - 2 * QWEN3_PARAMETERS
    found = size(qwen3, lambda device: HostMemory(4 * GIB, 4 * GIB, is_limited=True))
    assert found.num_pages == cache // (64 * QWEN3_TOKEN)


def test_a_context_that_does_not_fit_is_shortened_with_one_line(qwen3: Path) -> None:
    """256 MiB are 36 pages of 7 MiB; one is the null page. 40960 tokens are 640 pages and the null
    page, 4487 MiB."""
    found = size(qwen3, machine(32 * GIB), memory_mb=256)
    assert (found.num_pages, found.context_tokens) == (36, 35 * 64)
    assert found.notice == (
        "the context is 2240 tokens, not the model's 40960: the cache of 256 MiB per stage holds no longer request; "
        "--memory-mb 4487 would, and --max-context chooses a shorter one"
    )
    assert size(qwen3, machine(32 * GIB), memory_mb=4487) == PoolSize(641, 0, 40960)


def test_a_requested_context_is_given_or_refused(qwen3: Path) -> None:
    assert size(qwen3, machine(32 * GIB), memory_mb=256, max_context=2000) == PoolSize(36, 0, 2000)
    with pytest.raises(
        ConfigError,
        match=r"of 4000 tokens: stage 0 .*; --memory-mb 448 would do, or a shorter "
        r"--max-context$",
    ) as refused:
        size(qwen3, machine(32 * GIB), memory_mb=256, max_context=4000)
    assert refused.value.field == "memory_mb"
    with pytest.raises(ConfigError, match="--max-context must be at most 40960, the model's own"):
        size(qwen3, machine(32 * GIB), max_context=40961)
    with pytest.raises(
        ConfigError, match="--num-pages 5 hold 256 tokens, and --max-context asks for 257"
    ):
        size(qwen3, machine(32 * GIB), num_pages=5, max_context=257)
    assert size(qwen3, machine(32 * GIB), num_pages=5, max_context=256).context_tokens == 256


def test_pages_that_no_memory_holds_are_refused_with_the_sum(qwen3: Path) -> None:
    """A page is 7 MiB, weights are 1137 MiB (1136.9): 4096 MiB hold them and 422 pages."""
    assert size(qwen3, machine(4 * GIB), num_pages=422).num_pages == 422
    with pytest.raises(
        ConfigError,
        match=r"--num-pages 423 make a cache of 2961 MiB on stage 0 \(layers 0-28\), and "
        r"next to its weights this machine has 2959 MiB: fewer pages",
    ) as refused:
        size(qwen3, machine(4 * GIB), num_pages=423)
    assert refused.value.field == "num_pages"
    assert size(qwen3, machine(4 * GIB), memory_mb=422 * 7).num_pages == 422
    with pytest.raises(
        ConfigError,
        match=r"--memory-mb 2961 make a cache of 2961 MiB on stage 0 \(layers 0-28\), and "
        r"next to its weights this machine has 2959 MiB: less of it",
    ) as refused:
        size(qwen3, machine(4 * GIB), memory_mb=423 * 7)
    assert refused.value.field == "memory_mb"


def test_a_context_that_no_router_could_warm_up_is_refused() -> None:
    """Its first request has four tokens and draws two; shorter pools would let it wait for longer
    ones."""
    assert len(WARM_UP_PROMPT) + WARM_UP_TOKENS <= MIN_CONTEXT_TOKENS
    with pytest.raises(ConfigError, match=r"max_context must be 0 or at least 16 tokens, got 15$"):
        load(WorkerConfig, section="decode", flags={"model": Path("x"), "max_context": 15})


def test_a_pool_too_small_for_any_request_is_refused(qwen3: Path) -> None:
    """512 tokens are 8 pages and the null page: 63 MiB."""
    assert size(qwen3, machine(32 * GIB), memory_mb=63).context_tokens == 512
    with pytest.raises(ConfigError, match=r"--memory-mb 63 would do$"):
        size(qwen3, machine(32 * GIB), memory_mb=62)


def test_weights_that_do_not_fit_are_refused_with_the_sum(llama: Path) -> None:
    """16060522496 bytes are 15316.5 MiB."""
    with pytest.raises(
        ConfigError,
        match=r"stage 0 \(layers 0-32\) has 15317 MiB of weights, and 15000 MiB are free "
        r"on this machine: more stages",
    ):
        size(llama, machine(64 * GIB, 15000 * MIB))
    with pytest.raises(
        ConfigError,
        match=r"0.4 \(--memory-share\) of the 24576 MiB of this machine are 9830 MiB, "
        r"stage 0 \(layers 0-32\) has 15317 MiB of weights and a process takes 384",
    ) as refused:
        size(llama, machine(24 * GIB))
    assert refused.value.field == "memory_share"
    found = size(llama, machine(24 * GIB), memory_share=0.8)
    assert 3000 < found.context_tokens < 131072
    assert "not the model's 131072" in found.notice


def test_stages_count_with_the_largest_of_them(llama: Path) -> None:
    """Two stages of 16 layers: the embedding on one, the head on the other, both the same size."""
    counts = [
        size(llama, machine(32 * GIB), world_size=2, rank=rank, memory_share=0.5)
        for rank in range(2)
    ]
    page = 64 * 16 * 2 * 8 * 128 * 2
    largest = LLAMA_PARAMETERS * 2 // 2 + 4096  # the final norm is the last stage's
    assert counts[0] == counts[1]
    assert counts[0].num_pages == (16 * GIB - PROCESS - largest) // page


def test_a_hybrid_pays_for_its_slots_first(tmp_path: Path) -> None:
    """Qwen3.5's 9B: 32 KiB a token, and 24 states of 2 MiB + 48 KiB for each of 16 requests and the
    null slot."""
    folder = write_published(tmp_path / "Qwen3.5-9B", "Qwen3_5TextConfig", QWEN3_5_9B)
    found = size(folder, machine(256 * GIB), memory_mb=2048)
    slots = 17 * 24 * (2 * MIB + 48 * 1024)
    assert found.num_slots == 17
    assert found.num_pages == (2048 * MIB - slots) // (64 * 32 * 1024)
    assert "; or a smaller --max-running" not in found.notice
    with pytest.raises(ConfigError, match=r"needs 17 slots.* or a smaller --max-running"):
        size(folder, machine(256 * GIB), memory_mb=800)


def test_a_partition_needs_stages(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--partition 1,3 names the layers of several stages.*--decode-pp"
    ):
        plan_stage(
            WorkerConfig(model=make_checkpoint(tmp_path, "llama"), partition="1,3", num_pages=8)
        )


def test_pools_compare_the_context_they_were_given(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama")
    texts = [
        plan_stage(WorkerConfig(model=model, num_pages=8, max_context=limit)).compatibility(
            PoolWeights("0" * 32)
        )
        for limit in (0, 128, 256)
    ]
    assert len({known.digest for known in texts}) == 3
    assert "max context 128" in texts[1].text
