# ruff: noqa: T201  # what an engine prints is what is tested
"""A third party's engine that gives right answers, and an option for every way not to.

A folder on PYTHONPATH with this file and the `.dist-info` beside it is an installed plug-in. It
misbehaves where several sequences are prefilled, which the scenario `batch` does and `decode` does
not, so that a run of both shows what one failure costs.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlbench.engines._engine import PROCESS_NUMBER, Claim, Engine
from rlbench.results.vocabulary import Property

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel, Outputs, Run
    from rlbench.ops.attention.calls import PackedBackward, PackedPrefill, PagedPrefill

CALM = "RLBENCH_FAKE_CALM"
"""Environment variable: set, the engine behaves whatever its options are."""

FOLDER = "/srv/someone/secret"
"""A folder of this machine, for messages; no report may hold it."""

SAYS = "fake: these are the last words"


def load_attention(options: Mapping[str, str], device: str) -> Kernel:
    from rlbench.ops._op import Kernel
    from rlbench.ops.attention import eager

    calm = CALM in os.environ
    if options.get("missing") == "library":
        raise ImportError("libfake.so.1: cannot open shared object file")
    if options.get("hang") == "load" and not calm:
        hang()
    if "lingers" in options:
        threading.Thread(target=hang).start()
        atexit.register(hang)
    twin = options.get("twin") if os.environ.get(PROCESS_NUMBER) == "1" else None

    def prefill(call: PackedPrefill) -> Run:
        if len(call.q_lens) > 1 and not calm:
            misbehave(options)
        run = each_alone(call, eager.bind_prefill)
        return lambda: bend(options, call, run())

    def backward(call: PackedBackward) -> Run:
        if twin == "die":
            os._exit(5)
        if twin == "hang":
            hang()
        return each_alone(call, eager.bind_backward)

    def paged(call: PagedPrefill) -> Run:
        return each_alone(call, eager.bind_paged)

    entries: dict[str, Callable[[Any], Run]]
    entries = {"paged-prefill": paged, "decode": paged, "prefill": prefill, "backward": backward}
    lacks = ("prefill", "paged-prefill") if "unsupported" in options else ()
    offered = {name: entry for name, entry in entries.items() if name not in lacks}
    unsupported = dict.fromkeys(lacks, "has no ragged prefill")
    # `resolved` is meant to hold strings, but an engine may not know.
    resolved: dict[str, str] = {"splits": 1} if "number" in options else {"splits": "1"}  # type: ignore[dict-item]
    return Kernel(offered, unsupported=unsupported, resolved=resolved)


def each_alone(call: Any, bind: Callable[[Any], Run]) -> Run:
    """The call, one sequence at a time in tensors of its own.

    A CPU's matrix product may have other bits in a larger batch or at another address, and this
    engine is meant to be right on every CPU.
    """
    import torch

    runs = []
    q_start = k_start = 0
    for i, (q_len, k_len) in enumerate(zip(call.q_lens, call.k_lens, strict=True)):
        queries, keys = slice(q_start, q_start + q_len), slice(k_start, k_start + k_len)
        q_start, k_start = queries.stop, keys.stop
        own: dict[str, Any] = {"q_lens": (q_len,), "k_lens": (k_len,)}
        own["cu_seqlens_q"] = torch.tensor([0, q_len], dtype=torch.int32)
        if hasattr(call, "block_table"):
            own.update({n: getattr(call, n)[i : i + 1] for n in ("block_table", "seqused_k")})
        else:
            own["cu_seqlens_k"] = torch.tensor([0, k_len], dtype=torch.int32)
            own.update({n: getattr(call, n)[keys].clone() for n in ("k", "v")})
        rows = ("q", "dout") if hasattr(call, "dout") else ("q",)
        own.update({n: getattr(call, n)[queries].clone() for n in rows})
        runs.append(bind(replace(call, **own)))
    padding = call.q.shape[0] - q_start

    def run() -> Outputs:
        pieces = [run() for run in runs]
        outputs = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        if padding and "out" in outputs:
            rest = outputs["out"].new_zeros(padding, *outputs["out"].shape[1:])
            outputs["out"] = torch.cat([outputs["out"], rest])
        return outputs

    return run


def bend(options: Mapping[str, str], call: PackedPrefill, outputs: Outputs) -> Outputs:
    """Wrong answers."""
    out = outputs["out"]
    if "nan" in options:
        return {"out": out.masked_fill(out > 0.5, float("nan"))}
    if "wrong" in options or "claims" in options:
        return {"out": out + len(call.q_lens)}
    return {} if "nothing" in options else {"out": out}


def misbehave(options: Mapping[str, str]) -> None:
    """Do what the option says."""
    for name, value in options.items():
        MISDEEDS.get((name, value), lambda: None)()


def hang() -> None:
    told = os.environ.get("RLBENCH_FAKE_HANGING")  # a FIFO whose reader waits for this moment
    if told:
        with Path(told).open("w") as fifo:
            fifo.write("hanging")
    while True:
        signal.pause() if threading.current_thread() is threading.main_thread() else forever()


def forever() -> None:
    threading.Event().wait()


def end() -> NoReturn:
    chat()
    print(f"{FOLDER}/kernel.cu: warning", flush=True)
    print(SAYS, file=sys.stderr, flush=True)
    os._exit(3)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def complain() -> NoReturn:
    raise RuntimeError(f"launch failed in {FOLDER}/kernel.cu")


def leave() -> NoReturn:
    sys.exit(0)


def exhaust_host() -> NoReturn:
    raise MemoryError


def exhaust_device() -> NoReturn:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def chat() -> None:
    for number in range(2000):
        print(f'{{"is": "answer", "status": "pass", "line": {number}}}')
        print("x" * 500, file=sys.stderr)
    os.write(1, b"\xff\xfe raw bytes without an end of line")
    os.write(2, b"\x1b[31mred\n")


def close_pipes() -> None:
    os.closerange(3, 256)


def say(data: bytes) -> Callable[[], None]:
    """Writes to the worker's own pipe, which is none of an engine's business."""
    return lambda: print(os.write(int(sys.argv[-1]), data + b"\n"))


def leave_grandchild() -> None:
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


def fork_and_end() -> None:
    """The child holds the worker's end of the pipe open."""
    if os.fork() == 0:
        hang()
    end()


MISDEEDS: Mapping[tuple[str, str], Callable[[], None]] = {
    ("die", "exit"): end,
    ("die", "signal"): be_killed,
    ("die", "segv"): segfault,
    ("die", "forked"): fork_and_end,
    ("raise", "error"): complain,
    ("raise", "exit"): leave,
    ("oom", "host"): exhaust_host,
    ("oom", "device"): exhaust_device,
    ("chatty", ""): chat,
    ("pipe", "closed"): close_pipes,
    ("pipe", "nonsense"): say(b"this is not JSON"),
    ("pipe", "no-status"): say(json.dumps({"is": "answer"}).encode()),
    ("pipe", "other-status"): say(json.dumps({"is": "answer", "status": "splendid"}).encode()),
    ("pipe", "no-checks"): say(json.dumps({"is": "answer", "status": "compared"}).encode()),
    ("grandchild", ""): leave_grandchild,
    ("hang", "call"): hang,
}

ENGINE = Engine(
    summary="right answers, or the misdeed of the option",
    distribution="rlbench-fake",
    modules=("torch",),
    install="nothing brings it",
    load={"attention": load_attention},
    variants=(
        (),
        (("claims", ""),),
        (("hang", "load"),),
        (("lingers", ""),),
        (("missing", "library"),),
        (("nan", ""),),
        (("nothing", ""),),
        (("number", ""),),
        (("twin", "die"),),
        (("twin", "hang"),),
        (("unsupported", ""),),
        (("wrong", ""),),
        *((misdeed,) for misdeed in MISDEEDS),
    ),
    claims=(Claim(Property.BATCH_INVARIANT, "https://fake.example/claims", when={"claims": ""}),),
    devices=("cpu", "cuda"),
)
