"""How large the questions are: by case and preset."""

from __future__ import annotations

from dataclasses import dataclass

from rlbench.ops._op import Case


@dataclass(frozen=True)
class Sizes:
    """In tokens, which are `heads` rows each. `target` are those whose rows' bits are watched."""

    target: int
    crowds: tuple[int, ...]
    """Tokens of a batch that the target stands in."""
    slices: tuple[int, ...]
    """The target is cut into slices of so many tokens."""
    repeated: int
    """Tokens of the larger backward that is run again."""
    repeats: int
    """How often the same backward is run again."""
    accuracy: int
    few: tuple[int, ...]
    """Timed where launching dominates."""
    many: tuple[int, ...]
    """Timed where the memory does."""


def sizes(case: Case, preset: str) -> Sizes:
    """What `preset` asks of `case`. The tiny cases stay small in every preset."""
    if case.name.startswith("tiny"):
        return _TINY
    gated = case.params["heads"] > 1
    return {"smoke": _SMALL, "default": _GATED if gated else _DEFAULT, "full": _FULL}[preset]


_TINY = Sizes(
    target=5,
    crowds=(6, 17, 64, 130),
    slices=(1, 2, 3),
    repeated=130,
    repeats=3,
    accuracy=33,
    few=(1,),
    many=(64,),
)
_SMALL = Sizes(
    target=7,
    crowds=(8, 64, 300),
    slices=(1, 2, 3),
    repeated=300,
    repeats=3,
    accuracy=64,
    few=(1,),
    many=(1024,),
)
_DEFAULT = Sizes(
    target=33,
    crowds=(34, 64, 65, 100, 128, 129, 300, 1024, 4097, 16384, 65536),
    slices=(1, 2, 3, 8, 16, 17),
    repeated=4097,
    repeats=5,
    accuracy=1000,
    few=(1, 8, 64),
    many=(1024, 8192, 32768),
)
_GATED = Sizes(
    target=33,
    crowds=(34, 64, 65, 100, 300, 1024, 4097),
    slices=(1, 2, 3, 8, 16, 17),
    repeated=4097,
    repeats=5,
    accuracy=1000,
    few=(1, 8, 64),
    many=(1024, 8192),
)
_FULL = Sizes(
    target=65,
    crowds=(66, 127, 128, 129, 255, 256, 257, 1000, 4096, 16385, 65536),
    slices=(1, 2, 3, 4, 7, 8, 16, 31, 32, 33),
    repeated=4097,
    repeats=10,
    accuracy=4096,
    few=(1, 2, 4, 8, 16, 32, 64),
    many=(256, 1024, 4096, 8192, 16384, 32768),
)
