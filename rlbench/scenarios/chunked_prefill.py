"""Does a prefill cut into chunks give the bits of the whole?"""

from rlbench.scenarios._invariance import invariance

SCENARIO = invariance(
    "chunked-prefill", "Does a prefill cut into chunks give the bits of the whole?"
)
