"""A case's tensors and questions: what scenarios ask the op for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from rlbench.measure.bits import joint_digest
from rlbench.ops._op import Call, Case, Exam, Outputs, Point, Variation
from rlbench.ops.attention import eager, reference
from rlbench.ops.attention.inputs import Sequence
from rlbench.ops.attention.layouts import pack, pack_backward, page
from rlbench.ops.attention.sizes import sizes
from rlbench.ops.attention.variations import SCENARIOS, Around

_EXAM = 900
_TIMED = 950
"""Streams of the sequences that are examined and timed; the variations' are below."""


class AttentionWorkload:
    """Attention's variations, exams and latency points for one case on one device."""

    def __init__(self, case: Case, preset: str, device: str) -> None:
        self.case = case
        self.device = device
        self.sizes = sizes(case, preset)
        self.softmax_scale = case.params["head_dim"] ** -0.5
        self.target = self.sequence(0, self.sizes.target).keep("q", "k", "v", "dout")

    def sequence(self, stream: int, tokens: int) -> Sequence:
        """Sequence number `stream`, on this workload's device."""
        return Sequence(
            stream, tokens, dtype=self.case.dtype, device=self.device, **self.case.params
        )

    def fingerprint(self) -> str:
        """SHA-256 over the target's q, k, v and dout."""
        return joint_digest(self.target.whole(name) for name in ("q", "k", "v", "dout"))

    def variations(self, scenario: str) -> Iterator[Variation]:
        """The circumstances `scenario` changes; every one leaves the target's rows alone."""
        around = Around(self.sequence, self.target, self.sizes, self.softmax_scale)
        yield from SCENARIOS[scenario](around)

    # --- accuracy ---------------------------------------------------------------------------

    def exams(self) -> Iterator[Exam]:
        """Prefill, decode and backward of a few packed sequences."""
        lengths = self.sizes.accuracy
        label = "+".join(str(n) for n in lengths)
        sequences = [self.sequence(_EXAM + i, n) for i, n in enumerate(lengths)]
        prefill = pack(sequences, self.softmax_scale)
        yield self._exam("prefill", label, prefill, lambda: reference.forward(prefill))
        decode = page(
            sequences,
            [(n - 1, n) for n in lengths],
            self.softmax_scale,
            page_size=self.sizes.page_sizes[0],
            shuffled=True,
            decode=True,
        )
        yield self._exam("decode", label, decode, lambda: reference.forward(decode))
        backward = pack_backward(sequences, self.softmax_scale)
        yield self._exam("backward", label, backward, lambda: reference.backward(backward))

    def _exam(self, pass_: str, label: str, call: Call, fp64: Callable[[], Outputs]) -> Exam:
        return Exam(pass_, label, call, fp64, lambda: eager.compute(call))

    # --- latency ----------------------------------------------------------------------------

    def points(self) -> Iterator[Point]:
        """Prefill and backward over whole sequences, decode over contexts."""
        for count, tokens in self.sizes.prefill_points:
            yield Point(
                pass_="prefill",
                shape=f"{count}x{tokens}",
                call=partial(self._prefill_call, count, tokens),
                flops=self._flops(count, tokens),
                bytes=self._bytes(count, tokens, tokens),
                bound="compute",
            )
        for count, context in self.sizes.decode_points:
            yield Point(
                pass_="decode",
                shape=f"{count}x{context}",
                call=partial(self._decode_call, count, context),
                flops=4.0 * count * context * self._heads_times_dim(),
                bytes=self._bytes(count, 1, context),
                bound="memory",
                launch_bound=True,
            )
        for count, tokens in self.sizes.backward_points:
            yield Point(
                pass_="backward",
                shape=f"{count}x{tokens}",
                call=partial(self._backward_call, count, tokens),
                flops=2.5 * self._flops(count, tokens),
                bytes=2.0 * self._bytes(count, tokens, tokens),
                bound="compute",
            )

    def _timed(self, count: int, tokens: int) -> list[Sequence]:
        return [self.sequence(_TIMED + i, tokens) for i in range(count)]

    def _prefill_call(self, count: int, tokens: int) -> Call:
        return pack(self._timed(count, tokens), self.softmax_scale)

    def _backward_call(self, count: int, tokens: int) -> Call:
        return pack_backward(self._timed(count, tokens), self.softmax_scale)

    def _decode_call(self, count: int, context: int) -> Call:
        return page(
            self._timed(count, context),
            [(context - 1, context)] * count,
            self.softmax_scale,
            page_size=self.sizes.page_sizes[0],
            shuffled=True,
            decode=True,
        )

    def _heads_times_dim(self) -> int:
        return int(self.case.params["q_heads"] * self.case.params["head_dim"])

    def _flops(self, count: int, tokens: int) -> float:
        """Two products over the visible (causal) half of the pairs."""
        return 2.0 * count * tokens * (tokens + 1) * self._heads_times_dim()

    def _bytes(self, count: int, queries: int, keys: int) -> float:
        """Q and O, K and V, at two bytes an element."""
        kv = int(self.case.params["kv_heads"] * self.case.params["head_dim"])
        return 2.0 * count * (2 * queries * self._heads_times_dim() + 2 * keys * kv)
