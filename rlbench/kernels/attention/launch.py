"""The way to the GPU that every source shares: loaded builds, planned launches, torch's streams."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rlbench.kernels import jit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cuda.core import Kernel, LaunchConfig, Stream

SWITCH = "RLBENCH_ATTENTION_HOPPER"
"""Environment variable: 0 turns the kernels for Hopper off; the generic one then serves every call,
with the same bits."""
KEPT = 4096  # of plans and streams; more are forgotten all at once


class Build(Protocol):
    """One build of one source: a value, so that its kernel is loaded once."""

    def __hash__(self) -> int: ...

    @property
    def source(self) -> str:
        """The source's path, as `jit.load` takes it."""

    @property
    def kernel(self) -> str:
        """The kernel's name, as a profiler shows it."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""

    @property
    def defines(self) -> Mapping[str, str | int]:
        """The macros that the source takes."""


class Launch(NamedTuple):
    """One kernel of a plan. All of them take the same pointers, then `numbers`."""

    config: LaunchConfig
    kernel: Kernel
    numbers: tuple[int | float, ...]


class Plan(NamedTuple):
    """A checked call without its pointers."""

    device: int
    launches: tuple[Launch, ...]
    """In order; none where there is nothing to compute."""
    work: int
    """fp32 elements of scratch memory that the launches share."""


def hopper_is_on() -> bool:
    """Whether the kernels for Hopper may serve calls."""
    return os.environ.get(SWITCH, "1") != "0"


def fits(build: Build, device: int, capabilities: range) -> bool:
    """Whether a kernel written for these major compute capabilities is on and can run there."""
    from cuda.core import Device

    machine = Device(device)
    return bool(
        hopper_is_on()
        and machine.compute_capability.major in capabilities
        and build.shared_bytes <= machine.properties.max_shared_memory_per_block_optin
    )


@functools.cache
def kernel_of(build: Build, device: int) -> Kernel:
    """The build's kernel, ready to launch on CUDA device number `device`; compiled on first use.

    Raises:
        KernelBuildError: it cannot be compiled or loaded, or takes more shared memory than there is.
    """
    from cuda.bindings import driver
    from cuda.core import Device

    machine = Device(device)
    machine.set_current()  # the primary context, which is torch's
    major, minor = machine.compute_capability
    arch = f"sm_{major}{minor}{'a' if major >= 9 else ''}"
    kernel = jit.load(build.source, arch=arch, defines=build.defines, kernel=build.kernel)
    (status,) = driver.cuKernelSetAttribute(
        driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        build.shared_bytes,
        kernel.handle,
        machine.device_id,
    )
    if int(status) != 0:
        raise jit.KernelBuildError(
            f"kernel {build.kernel} for {arch}: cannot reserve {build.shared_bytes} bytes of "
            f"shared memory: {status}"
        )
    return kernel


@functools.cache
def sms(device: int) -> int:
    """Multiprocessors of CUDA device number `device`."""
    from cuda.core import Device

    return int(Device(device).properties.multiprocessor_count)


def run(stream: Stream, launches: tuple[Launch, ...], pointers: tuple[int, ...]) -> None:
    """Enqueue the launches on a stream of the current device."""
    from cuda.core import launch

    for config, kernel, numbers in launches:
        launch(stream, config, kernel, *pointers, *numbers)


_streams: dict[int, Stream] = {}


def stream_of(handle: int) -> Stream:
    """Torch's stream of that handle, as `cuda.core.launch` takes it."""
    found = _streams.get(handle)
    if found is None:
        from cuda.core import LEGACY_DEFAULT_STREAM, Stream

        if len(_streams) >= KEPT:
            _streams.clear()
        # Torch's default stream has the handle 0, which is the legacy one.
        found = LEGACY_DEFAULT_STREAM if handle == 0 else Stream.from_handle(handle)
        _streams[handle] = found
    return found
