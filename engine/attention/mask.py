"""Which keys a token may see when plain causal order is not the answer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TreeMask:
    """Visibility of draft tokens, as `spec_info` of VERIFY and DRAFT batches.

    visible     one [query_len, width] bool tensor per row; True where the new token may see the key. The columns are
                the row's last `width` keys in storage order, the new tokens last, so query_len <= width. Every
                earlier key is committed and visible to all. Each token must see itself.
    """

    visible: tuple[Tensor, ...]
