"""The random number of one token: a pure function of the request's seed and the token's absolute
position.

Counter-based, so that it does not matter which process draws the token, in which batch, or how
often it is drawn again. Philox 4x64 with ten rounds (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), key (seed, 0), first word of the block that follows counter (position,
0, 0, 0).
"""

import numpy as np


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) on the grid of 2**-53. `seed` is 0..2**64-1."""
    word = np.random.Philox(key=seed, counter=position).random_raw()
    return (int(word) >> 11) * 2.0**-53
