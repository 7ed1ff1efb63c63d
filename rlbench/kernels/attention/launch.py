"""The way to the GPU that every source shares: loaded builds, and planned launches."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol

import torch

try:
    from torch._C._dynamo.guards import (  # type: ignore[attr-defined,unused-ignore]
        _empty_strided_cuda,
    )
except ImportError:  # it is not public
    _empty_strided_cuda = None

from rlbench.kernels import jit
from rlbench.kernels.attention.tensor_map import encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cuda.core import Kernel, LaunchConfig
    from torch import Tensor

    from rlbench.kernels.attention.tensor_map import Encoded, TensorMap

SWITCH = "RLBENCH_ATTENTION_HOPPER"
"""Environment variable: 0 turns the kernels for Hopper off; the generic one then serves every call,
with the same bits."""
KEPT = 4096  # of plans, and of their maps' addresses


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


class ClusterBuild(Build, Protocol):
    """A build whose thread blocks come in clusters."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def ranks(self) -> int:
        """Blocks of a cluster."""


class Launch(NamedTuple):
    """One kernel of a plan. All of them take the same pointers, then `numbers`."""

    config: LaunchConfig
    kernel: Kernel
    numbers: tuple[int | float, ...]
    maps: tuple[TensorMap, ...] = ()
    """What the kernel takes after them: made of the pointers, of which they say which."""


class Plan(NamedTuple):
    """A checked call without its pointers."""

    device: int
    launches: tuple[Launch, ...]
    """In order; none where there is nothing to compute."""
    work: int
    """fp32 elements of scratch memory that the launches share."""
    work_at: int = 5
    """Which of their pointers it is."""


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


@functools.cache
def clusters_at_once(build: ClusterBuild, device: int) -> int:
    """Clusters that the GPU has at a time: its SMs are not divided evenly."""
    from cuda.core import Device, LaunchConfig

    config = LaunchConfig(
        grid=1, cluster=build.ranks, block=build.threads, shmem_size=build.shared_bytes
    )
    occupancy = kernel_of(build, device).occupancy
    return int(occupancy.max_active_clusters(config, stream=Device(device).default_stream))


class Runner:
    """A plan, ready to be launched again and again."""

    def __init__(self, plan: Plan) -> None:
        self.device, self._launches, self._work, self._work_at = plan
        self.is_empty = not plan.launches
        self.are_like: Callable[..., bool] = lambda *_: False
        """Whether tensors are like those of the call that it was planned for; may say no if so."""
        # What no thread is using just now: taking one and giving it back need no lock.
        self._idle: list[_Parameters] = []

    def __call__(self, *addresses: int) -> None:
        """Enqueue the launches on the present stream of the plan's device, which is the current one.

        addresses: the kernels' pointers, those of q, k and v first; 0 for scratch memory.
        """
        try:
            parameters = self._idle.pop()
        except IndexError:
            parameters = _Parameters(self._launches, len(addresses))
        parameters.point_to(*addresses)
        work = scratch(self._work) if self._work else None
        if work is not None:
            _POINTER.pack_into(parameters.pointers, 8 * self._work_at, work.data_ptr())
        # As torch.compile's code asks for it.
        stream = torch._C._cuda_getCurrentRawStream(self.device)  # noqa: SLF001
        if (stream, parameters.mapped(addresses)) != parameters.where:
            parameters.move(stream, addresses)
        launch = _launch_function()
        for each in parameters.launches:
            status = launch(*each.arguments)
            if status != 0:
                _fail(status, each.config)
        self._idle.append(parameters)


def scratch(elements: int) -> Tensor:
    """So many uninitialized fp32 elements on the current device."""
    if _empty_strided_cuda is None:
        return torch.empty(elements, dtype=torch.float32, device="cuda")
    # What torch.compile's code calls; torch.empty() takes more than twice as long.
    empty: Tensor = _empty_strided_cuda((elements,), (1,), torch.float32)
    return empty


def _fail(status: int, config: LaunchConfig) -> NoReturn:
    from cuda.bindings import driver

    raise RuntimeError(f"cuLaunchKernelEx returns {driver.CUresult(status)!r} for {config}")


_Tensors = tuple[int, ...]  # addresses, in the order of the kernels' pointers
_POINTER = struct.Struct("=Q")


class _Parameters:
    """Of all launches, where the driver is told to look; for one thread at a time. It copies them
    when it is called."""

    def __init__(self, launches: tuple[Launch, ...], count: int) -> None:
        layout = struct.Struct(f"={count}Q")
        self.pointers = ctypes.create_string_buffer(layout.size)
        self.point_to = functools.partial(layout.pack_into, self.pointers, 0)
        begin = ctypes.addressof(self.pointers)
        places = range(begin, begin + layout.size, 8)
        self.launches = tuple(_LaunchParameters(each, places) for each in launches)
        pointers = sorted({each.pointer for launch in launches for each in launch.maps})
        self.mapped: Callable[[_Tensors], object] = itemgetter(*pointers) if pointers else len
        """Of tensors those that there are maps of."""
        self.where: tuple[int, object] | None = None

    def move(self, stream: int, tensors: _Tensors) -> None:
        """To that stream, and to tensors there."""
        for each in self.launches:
            each.move(stream, tensors)
        self.where = stream, self.mapped(tensors)


class _LaunchParameters:
    def __init__(self, launch: Launch, pointers: range) -> None:
        self.config, kernel, numbers, self.maps = launch
        # Every parameter is 8 bytes wide: ints become int64, floats double.
        types = "".join("d" if isinstance(number, float) else "q" for number in numbers)
        words = struct.pack(f"={types}", *numbers)
        self._numbers = ctypes.create_string_buffer(words, len(words))
        begin = ctypes.addressof(self._numbers)
        places = (*pointers, *range(begin, begin + len(words), 8), *(0 for _ in self.maps))
        self._places = (ctypes.c_void_p * len(places))(*places)
        self._driver_config = _Config.of(self.config)
        self._encoded: tuple[Encoded, ...] = ()
        addresses = (self._driver_config, self._places)
        config, parameters = (ctypes.c_void_p(ctypes.addressof(each)) for each in addresses)
        # Of cuLaunchKernelEx.
        self.arguments = config, ctypes.c_void_p(int(kernel.handle)), parameters, None

    def move(self, stream: int, tensors: _Tensors) -> None:
        self._driver_config.stream = stream
        if self.maps:
            addresses = tuple(tensors[each.pointer] for each in self.maps)
            self._encoded = _encoded(self, addresses)  # kept as long as it may be launched
            self._places[-len(self.maps) :] = [each.address for each in self._encoded]


@functools.lru_cache(KEPT)
def _encoded(launch: _LaunchParameters, addresses: tuple[int, ...]) -> tuple[Encoded, ...]:
    """The launch's maps of what is there: an address for each. Found sooner than each map itself, whose hash takes long:
    the layers of a model share their plans and have keys of their own."""
    return tuple(map(encoded, launch.maps, addresses))


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )

    @classmethod
    def of(cls, config: LaunchConfig) -> _Config:
        """Of what our plans have: clusters are in the sources."""
        from cuda.bindings import driver

        assert config.cluster is None
        assert not config.is_cooperative
        it = cls(config.grid, config.block, config.shmem_size)
        if config.programmatic_stream_serialization:
            serialization = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            it.attributes = ctypes.pointer(_Attribute(int(serialization), 0, 1))
            it.attribute_count = 1
        return it


@functools.cache
def _launch_function() -> Callable[..., int]:
    """Not the one of cuda.bindings, which makes objects of everything at every call. Other threads
    may run during the driver's call: it waits where too much has been enqueued."""
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
