"""The project's own CUDA kernels: `attention`, compiled at first use; importing this is cheap."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlbench.kernels.attention import attention as attention

__all__ = ["attention"]


class _Kernels(ModuleType):
    """Keeps each exported name bound to the function and not to the subpackage of the same name.

    Importing `rlbench.kernels.attention` ends in `setattr(rlbench.kernels, "attention", module)`.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in __all__ and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Kernels


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.{name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
