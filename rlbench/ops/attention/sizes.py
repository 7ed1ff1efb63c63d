"""How large the questions are: by case and preset."""

from __future__ import annotations

from dataclasses import dataclass

from rlbench.ops._op import Case


@dataclass(frozen=True)
class Sizes:
    """Lengths in tokens. `target` is the sequence whose bits are watched."""

    target: int
    batches: tuple[tuple[str, tuple[int, ...], int], ...]
    """(name, lengths of the neighbours, the target's position among them)."""
    tails: tuple[int, ...]
    """So many of the target's last rows are watched where a short query meets longer ones."""
    longest_queries: tuple[int, ...]
    """Lengths of one neighbour: it moves the batch's longest query across tile sizes."""
    crowd: int
    """Neighbours with one query each, as decode steps have, in the same call as the target."""
    chunks: tuple[int, ...]
    """Chunk sizes, aligned and odd, for contiguous and for paged keys."""
    early_positions: tuple[int, ...]
    """The first decode steps, for which some engines have no kernel."""
    positions: tuple[int, ...]
    """Decode steps: the token that is fed, counted from 0."""
    long_context: int
    """Keys of a decode step of its own, on another sequence than the target."""
    decode_batches: tuple[int, ...]
    """Neighbours in a decode batch."""
    page_sizes: tuple[int, ...]
    """The first is the usual one; the others are variations."""
    repeats: int
    """How often the same backward is run again."""
    accuracy: tuple[int, ...]
    """Lengths of the sequences whose error is measured, packed together."""
    prefill_points: tuple[tuple[int, int], ...]
    """(sequences, tokens each)."""
    decode_points: tuple[tuple[int, int], ...]
    """(sequences, context)."""
    backward_points: tuple[tuple[int, int], ...]


def sizes(case: Case, preset: str) -> Sizes:
    """What `preset` asks of `case`. The tiny case stays small in every preset."""
    if case.name == "tiny":
        return _TINY if preset != "full" else _SMALL
    return {"smoke": _SMALL, "default": _DEFAULT, "full": _FULL}[preset]


_TINY = Sizes(
    target=150,
    batches=(
        ("first of 2", (90,), 0),
        ("second of 4, equal neighbours", (150, 150, 150), 1),
        ("last of 6, mixed neighbours", (1, 33, 200, 64, 150), 5),
    ),
    tails=(8, 1),
    longest_queries=(16, 65),
    crowd=9,
    chunks=(64, 37),
    early_positions=(0, 1, 15, 40),
    positions=(63, 64, 100, 149),
    long_context=600,
    decode_batches=(3, 15),
    page_sizes=(16, 32),
    repeats=3,
    accuracy=(150, 47),
    prefill_points=((1, 256), (4, 128)),
    decode_points=((1, 256), (8, 256)),
    backward_points=((1, 256),),
)

_SMALL = Sizes(
    target=300,
    batches=(
        ("first of 2", (450,), 0),
        ("second of 4, equal neighbours", (300, 300, 300), 1),
        ("last of 9, mixed neighbours", (1, 17, 64, 129, 300, 511, 40, 256), 8),
    ),
    tails=(8, 1),
    longest_queries=(16, 65),
    crowd=47,
    chunks=(64, 113),
    early_positions=(0, 1, 15, 40),
    positions=(63, 64, 127, 128, 200, 299),
    long_context=4096,
    decode_batches=(3, 31),
    page_sizes=(16, 64),
    repeats=3,
    accuracy=(300, 129),
    prefill_points=((1, 1024),),
    decode_points=((1, 1024), (8, 1024)),
    backward_points=((1, 1024),),
)

_DEFAULT = Sizes(
    target=1000,
    batches=(
        ("first of 2, longer neighbour", (4096,), 0),
        ("first of 3", (1000, 777), 0),
        ("second of 4, equal neighbours", (1000, 1000, 1000), 1),
        ("middle of 9, mixed neighbours", (1, 17, 64, 129, 1000, 511, 2048, 40), 4),
        ("last of 33, short neighbours", tuple(range(1, 320, 10)), 32),
        ("first of 65, one-token neighbours", (1,) * 64, 0),
    ),
    tails=(8, 1),
    longest_queries=(16, 17, 64, 65, 129, 300),
    crowd=60,
    chunks=(64, 128, 256, 512, 177, 333),
    early_positions=(0, 1, 2, 15, 16, 40),
    positions=(63, 64, 127, 128, 255, 511, 700, 999),
    long_context=32768,
    decode_batches=(3, 15, 63, 127),
    page_sizes=(16, 64, 128, 256),
    repeats=5,
    accuracy=(1000, 2048, 333),
    prefill_points=((1, 2048), (1, 8192), (8, 2048)),
    decode_points=((1, 1024), (1, 8192), (1, 32768), (16, 8192), (128, 8192)),
    backward_points=((1, 8192), (8, 2048)),
)

_FULL = Sizes(
    target=2048,
    batches=(
        *_DEFAULT.batches,
        ("first of 2, much longer neighbour", (16384,), 0),
        ("last of 17, equal neighbours", (2048,) * 16, 16),
        ("middle of 129, short neighbours", tuple(1 + i % 97 for i in range(128)), 64),
    ),
    tails=(64, 8, 1),
    longest_queries=(16, 17, 32, 33, 64, 65, 128, 129, 300, 1024),
    crowd=120,
    chunks=(16, 64, 128, 256, 512, 1024, 17, 177, 333, 1000),
    early_positions=_DEFAULT.early_positions,
    positions=(*_DEFAULT.positions, 1023, 1024, 1500, 2047),
    long_context=131072,
    decode_batches=(1, 3, 15, 63, 127, 255),
    page_sizes=(16, 32, 64, 128, 256),
    repeats=10,
    accuracy=(2048, 8192, 333),
    prefill_points=((1, 1024), (1, 4096), (1, 8192), (1, 16384), (8, 2048), (16, 1024)),
    decode_points=(
        *((1, n) for n in (1024, 4096, 8192, 16384, 32768)),
        *((b, 8192) for b in (4, 16, 64, 128)),
    ),
    backward_points=((1, 4096), (1, 8192), (1, 16384), (8, 2048)),
)
