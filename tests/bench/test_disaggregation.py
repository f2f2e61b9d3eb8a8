"""Three layouts of two cores under the same requests."""

import argparse

import pytest

from baton.cluster_config import demo_model
from bench.disaggregation import FIGURES, LAYOUTS, measure


@pytest.mark.long
async def test_every_layout_serves_the_same_requests() -> None:
    flags = argparse.Namespace(
        model=demo_model(),
        rates="20",
        layouts=",".join(LAYOUTS),
        turns=1,
        requests=4,
        prompt_tokens=64,
        output_tokens=8,
        memory_mb=64,
        seed=0,
        slo_ttft_s=60.0,
        slo_tpot_s=60.0,
    )
    values = await measure(flags)
    assert values["failed"] == 0
    for layout in LAYOUTS:
        for figure in FIGURES:
            value = values[f"{layout}_20_{figure}"]
            assert isinstance(value, float)
            assert value > 0, figure
        memory = values[f"{layout}_memory"]
        assert isinstance(memory, int)
        assert memory > 10
