"""What engines that run Triton kernels need of the machine."""

from __future__ import annotations

import os
import shutil

from rlbench.errors import Unavailable


def need_c_compiler() -> None:
    """Raise Unavailable where Triton, which compiles its launchers, would find no C compiler."""
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        raise Unavailable("Triton needs a C compiler: install gcc, or set CC")
