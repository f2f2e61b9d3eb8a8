"""The random number of one token, a pure function of the request's seed and the token's position.

It is counter-based: the process and the batch that sample the token do not matter, nor does the
number of attempts. The generator is Philox 4x64 with ten rounds (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011). The key is (seed, 0). The number is the first word of the
block that follows counter (position, 0, 0, 0).
"""

import numpy as np


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) on the grid of 2**-53. `seed` is in 0..2**64-1."""
    word = np.random.Philox(key=seed, counter=position).random_raw()
    return (int(word) >> 11) * 2.0**-53
