"""Does a backward repeat its bits, run after run and whatever is packed beside it?"""

from rlbench.scenarios._invariance import invariance

SCENARIO = invariance(
    "backward", "Does a backward repeat its bits, run after run and whatever is packed beside it?"
)
