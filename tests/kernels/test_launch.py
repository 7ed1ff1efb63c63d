"""What the driver is told to launch: a stand-in reads it where the driver would."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import pytest
import torch

pytest.importorskip("cuda.core", reason="needs cuda-core to plan: pip install 'rlbench[kernels]'")

from cuda.bindings import driver
from cuda.core import LaunchConfig

from rlbench.kernels.attention import launch, tensor_map
from rlbench.kernels.attention.launch import Launch, Plan, Runner
from rlbench.kernels.attention.tensor_map import K, TensorMap, V

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Q_AT, K_AT, V_AT, OUT_AT, WORK_AT, STREAM = 0x10, 0x7F0000000020, 0x30, 0x40, 0x50, 0x60
ADDRESSES = (Q_AT, K_AT, V_AT, OUT_AT, 0, 0, 7, 8, 0)  # no lse, no block table
POINTERS = (Q_AT, K_AT, V_AT, OUT_AT, 0, WORK_AT, 7, 8, 0)
NUMBERS = (-3, 2**40, 0.125)
CONFIG = LaunchConfig(grid=5, block=64, shmem_size=4096)
MAPS = tuple(TensorMap(pointer, 0, (64,) * 5, (16,) * 4, (64,) * 5) for pointer in (V, K))


class Kernel(NamedTuple):
    handle: int


class Machine:
    """The driver, and torch's stream and memory."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[bytes, ...], int]] = []
        self.status = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self.stream = STREAM
        self.words = 9 + len(NUMBERS)
        self.maps = 0

    def launch(self, config: Any, kernel: Any, parameters: Any, extra: Any) -> int:
        assert extra is None
        self.meanwhile()
        count = self.words + self.maps
        places = (ctypes.c_void_p * count).from_address(parameters.value)
        sizes = [8] * self.words + [tensor_map.BYTES] * self.maps
        found = [ctypes.string_at(p, size) for p, size in zip(places, sizes, strict=True) if p]
        fields = struct.unpack("=7Ixxxx2QI", ctypes.string_at(config.value, 52))
        self.calls.append((fields, tuple(found), kernel.value))
        return self.status

    @property
    def pointers(self) -> list[tuple[int, ...]]:
        """Of each call."""
        return [struct.unpack("=9Q", b"".join(words[:9])) for _, words, _ in self.calls]


@pytest.fixture
def machine() -> Iterator[Machine]:
    it = Machine()

    def encoded(tensor_map: TensorMap, pointer: int) -> Any:
        memory = ctypes.create_string_buffer(struct.pack("=QQ", tensor_map.pointer, pointer) * 8)
        return mock.Mock(address=ctypes.addressof(memory), memory=memory)

    work = mock.Mock(data_ptr=lambda: WORK_AT)
    with (
        mock.patch.object(launch, "_launch_function", return_value=it.launch),
        mock.patch.object(launch, "scratch", return_value=work),
        mock.patch.object(launch, "encoded", encoded),
        mock.patch.object(
            torch._C, "_cuda_getCurrentRawStream", lambda device: it.stream + device, create=True
        ),
    ):
        yield it


def runner_of(*launches: Launch, device: int = 0) -> Runner:
    return Runner(Plan(device, launches, 100))


def test_parameters_are_where_the_driver_looks(machine: Machine) -> None:
    runner_of(Launch(CONFIG, Kernel(99), NUMBERS))(*ADDRESSES)
    ((fields, words, kernel),) = machine.calls
    assert fields == (5, 1, 1, 64, 1, 1, 4096, STREAM, 0, 0)
    assert b"".join(words) == struct.pack("=9Qqqd", *POINTERS, *NUMBERS)
    assert kernel == 99


def test_no_scratch_memory_is_a_null_pointer(machine: Machine) -> None:
    Runner(Plan(0, (Launch(CONFIG, Kernel(99), NUMBERS),), 0))(*ADDRESSES)
    assert machine.pointers[0][5] == 0
    launch.scratch.assert_not_called()  # type: ignore[attr-defined]


def test_structures_are_the_drivers() -> None:
    """Byte for byte what cuda.bindings makes."""
    dependent = LaunchConfig(
        grid=(2, 3, 4), block=(5, 6, 7), shmem_size=8, programmatic_stream_serialization=True
    )
    ours = launch._Config.of(dependent)
    ours.stream = STREAM
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    theirs = driver.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 2, 3, 4
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 5, 6, 7
    theirs.sharedMemBytes, theirs.hStream = 8, driver.CUstream(STREAM)
    theirs.attrs, theirs.numAttrs = [attribute], 1

    def content(address: int) -> tuple[bytes, bytes]:
        whole = ctypes.string_at(address, ctypes.sizeof(launch._Config))
        (attributes,) = struct.unpack_from("=Q", whole, 40)
        size = ctypes.sizeof(launch._Attribute)
        return whole[:40] + whole[48:52], ctypes.string_at(attributes, size)

    assert (ctypes.sizeof(launch._Config), ctypes.sizeof(launch._Attribute)) == (56, 72)
    assert content(ctypes.addressof(ours)) == content(theirs.getPtr())


def test_a_later_call_has_its_own_addresses_and_stream(machine: Machine) -> None:
    machine.maps = 2
    run = runner_of(*(Launch(CONFIG, Kernel(n), NUMBERS, MAPS) for n in (1, 2)), device=3)
    elsewhere = [(Q_AT, K_AT, V_AT), (1, K_AT, V_AT), (1, 2, V_AT), (1, 2, 3), (Q_AT, K_AT, V_AT)]
    for i, first in enumerate(elsewhere):
        machine.stream = i // 2
        run(*first, *ADDRESSES[3:])
    assert [kernel for _, _, kernel in machine.calls] == [1, 2] * 5
    for (q, k, v), call in zip(elsewhere, range(0, 10, 2), strict=True):
        for fields, words, _ in machine.calls[call : call + 2]:
            assert struct.unpack("=3Q", b"".join(words[:3])) == (q, k, v)
            said = [struct.unpack("=QQ", each[:16]) for each in words[-2:]]
            assert said == [(V, v), (K, k)]  # in the order of the kernel's parameters
            assert fields[7] == call // 4 + 3


def test_a_call_from_within_another_does_not_change_it(machine: Machine) -> None:
    """As one of another thread between two launches."""
    run = runner_of(Launch(CONFIG, Kernel(1), NUMBERS), Launch(CONFIG, Kernel(2), NUMBERS))

    def meanwhile() -> None:
        machine.meanwhile = lambda: None
        run(1, 2, 3, *ADDRESSES[3:])

    machine.meanwhile = meanwhile
    run(*ADDRESSES)
    assert machine.pointers == [(1, 2, 3, *POINTERS[3:])] * 2 + [POINTERS] * 2
    run(*ADDRESSES)
    assert len(run._idle) == 2


def test_a_failing_launch_says_what_and_why(machine: Machine) -> None:
    run = runner_of(Launch(CONFIG, Kernel(1), NUMBERS))
    machine.status = int(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_VALUE.*grid=\(5, 1, 1\)"):
        run(*ADDRESSES)
    machine.status = 0
    run(*ADDRESSES)
    assert machine.pointers == [POINTERS] * 2


def test_the_driver_is_opened_by_a_launch_alone() -> None:
    launch._launch_function.cache_clear()
    with (
        mock.patch.object(ctypes, "CDLL", side_effect=OSError("no libcuda.so.1")),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True),
    ):
        run = Runner(Plan(0, (Launch(CONFIG, Kernel(1), NUMBERS),), 0))
        with pytest.raises(OSError, match="libcuda"):
            run(*ADDRESSES)
