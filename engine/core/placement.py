"""Where tensors lie.

Batches are made and planned on the host: their tables, slots and lengths stay there, whatever the device. Weights,
caches and what layers compute lie on the stage's device. Ids and positions cross where a layer first reads them, hidden
states at the stage's edge.
"""

import torch

HOST = torch.device("cpu")


def use_in_this_thread(device: torch.device) -> None:
    """Launch this thread's kernels on `device`. The current device belongs to the thread, and libraries that launch
    kernels themselves ask for it."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # it refuses a device without an index
