"""Which cuDNN a process computes with: torch's own, or one that LD_LIBRARY_PATH puts in its place."""

from __future__ import annotations


def version() -> str:
    """`9.19.0`; where torch refuses what it found, what it says about it."""
    import torch

    try:
        number = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    except RuntimeError as why:  # another one than torch was built against
        return str(why).splitlines()[0].partition(". ")[0]
    if number is None:
        return "none"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
