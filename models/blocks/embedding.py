"""Where tokens become vectors, and ids that were made on the host reach the device."""

import torch.nn.functional as F
from torch import Tensor


def embed(token_ids: Tensor, table: Tensor) -> Tensor:
    """token_ids: [T] int64, on the host or already where `table` [vocab, hidden] lies. Returns [T, hidden]."""
    return F.embedding(token_ids.to(table.device), table)
