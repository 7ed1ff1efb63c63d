"""rlbench: which kernel gives the trainer and the rollout engine the same bits, and at what price.

This module stays empty of imports: it is loaded inside every engine's interpreter, where neither
rlbench nor its dependencies are installed.
"""

__version__ = "0.1.0"
