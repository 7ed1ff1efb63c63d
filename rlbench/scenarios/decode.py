"""Does a decode step give the bits of the prefill's row, alone and in a batch?"""

from rlbench.scenarios._invariance import invariance

SCENARIO = invariance(
    "decode", "Does a decode step give the bits of the prefill's row, alone and in a batch?"
)
