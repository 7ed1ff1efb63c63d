"""Does a sequence's output depend on the sequences beside it?"""

from rlbench.scenarios._invariance import invariance

SCENARIO = invariance("batch", "Does a sequence's output depend on the sequences beside it?")
