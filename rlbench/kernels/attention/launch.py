"""The way to the GPU that every source shares: loaded builds, planned launches, torch's streams."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rlbench.kernels import jit
from rlbench.kernels.attention.tensor_map import encoded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cuda.core import Kernel, LaunchConfig, Stream

    from rlbench.kernels.attention.tensor_map import TensorMap

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
    maps: tuple[TensorMap, ...] = ()
    """What the kernel takes after them: made of the pointers."""


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

    for each in launches:
        if each.maps:
            _launch_with_maps(stream, each, pointers)
        else:
            launch(stream, each.config, each.kernel, *pointers, *each.numbers)


def _launch_with_maps(stream: Stream, launch: Launch, pointers: tuple[int, ...]) -> None:
    """As cuda.core's launch(), which takes no structures but those that it has made itself."""
    from cuda.bindings import driver

    config, kernel, numbers, maps = launch
    (status,) = driver.cuLaunchKernel(
        int(kernel.handle),
        *config.grid,
        *config.block,
        config.shmem_size,
        int(stream.handle),
        _parameters(pointers, numbers, maps).address,
        0,
    )
    if int(status) != 0:
        raise RuntimeError(f"cuLaunchKernel returns {status!r} for {config}")


class _Parameters(NamedTuple):
    """Where a kernel's parameters are, as the driver takes it: the address of their addresses."""

    address: int
    kept: tuple[object, ...]
    """The memory that the addresses are of."""


@functools.lru_cache(KEPT)
def _parameters(
    pointers: tuple[int, ...], numbers: tuple[int | float, ...], maps: tuple[TensorMap, ...]
) -> _Parameters:
    words = (*pointers, *numbers)
    ready = [encoded(each, pointers[each.pointer]) for each in maps]
    count = len(words) + len(ready)
    memory = ctypes.create_string_buffer(8 * (len(words) + count))
    begin = ctypes.addressof(memory)
    end = begin + 8 * len(words)
    places = *range(begin, end, 8), *(each.address for each in ready)
    types = "".join("d" if isinstance(word, float) else "q" for word in words)
    struct.pack_into(f"={types}{count}Q", memory, 0, *words, *places)
    return _Parameters(end, (memory, ready))


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
