"""A cluster of which one pool is refused while the others start, or serve."""

import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from runtime.errors import ConfigError
from tests.support.cluster.one_process import cluster_in_process
from tests.support.drafts.eagle import save_draft


async def test_a_pool_that_is_refused_leaves_no_thread_in_ucx(
    checkpoint: Path, tmp_path: Path
) -> None:
    """This includes the pools started with it: a leaked thread would crash the process at its
    end."""
    draft = save_draft(tmp_path / "eagle3", layers=(0, 1, 3))
    tensors = load_file(draft / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, draft / "model.safetensors")
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"fc\.weight is missing"):
        async with cluster_in_process(checkpoint, prefill_pp=2, decode={"draft": draft}):
            pytest.fail("it serves")
    assert not [
        thread for thread in set(threading.enumerate()) - before if thread.name == "transfer-agent"
    ]
