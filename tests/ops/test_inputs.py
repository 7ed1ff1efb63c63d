"""Inputs are the same bits everywhere: pinned digests, and the arithmetic done again in Python."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import pytest
import torch

from rlbench.measure.bits import digest
from rlbench.ops import _inputs as inputs
from rlbench.ops._inputs import hash_word, values
from rlbench.ops._op import SEED
from rlbench.ops.attention.inputs import Sequence

SHAPE: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 64}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# What stands here changes only together with the meaning of every earlier report.
GOLDEN = {
    (0, "q", "bf16"): ("47792c83d569c16491a17da4cbe9c6d2b1372d07de1400c350575fdef261ec0a"),
    (0, "k", "bf16"): ("77312aa0ddc3c4197c49935cea0eaec55e3d480d40384d6dcbad25ad9c74570d"),
    (0, "v", "fp16"): ("462b4d6e387aafb14faf687c467a8dbb89509dd58651b24abf3576bd592bbd48"),
    (0, "dout", "bf16"): ("6ed1f189e613cf7a0bd1535070ae6e5a9c1775ac8961e13f3883cc7b4c32ea7c"),
    (0, "q", "fp16"): ("d171a90e6e19c956c7a8d4061c2fb643312e87e64786a63eae6398def5b87fc7"),
    (1, "k", "bf16"): ("1ce6b6b5c70905c48dbef2869af1d50a686e6ae24cd35b4277f0571fbd08a6fe"),
    (500, "v", "bf16"): ("ac849981b2a476cc1bda3ef7b220ae1311ec51a880ad0ae97cd0dc5619805856"),
    (900, "dout", "fp16"): ("f57e599ca9e710db33db8870a4d621dc608464a64f6560c4fe306cb541f5c026"),
    (953, "q", "bf16"): ("fdcb6416eb71c7e936ab2a6c7a3f8dbb3a5596e042dfd5e0d83c10dfca779e8e"),
}


def sequence(stream: int = 0, tokens: int = 33, dtype: str = "bf16", **shape: int) -> Sequence:
    return Sequence(stream, tokens, dtype=dtype, device="cpu", **{**SHAPE, **shape})


@pytest.mark.parametrize(("stream", "name", "dtype"), GOLDEN)
def test_bits_are_the_pinned_ones(stream: int, name: str, dtype: str) -> None:
    assert digest(sequence(stream, 33, dtype).whole(name)) == GOLDEN[stream, name, dtype]


def mixed(x: int) -> int:
    """The 32-bit mixing function, from its published definition."""
    x &= 0xFFFFFFFF
    x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    x = ((x >> 16) ^ x) * 0x45D9F3B & 0xFFFFFFFF
    return (x >> 16) ^ x


def exact_value(key: int, i: int) -> Fraction:
    """Element i of the stream `key`, as an exact number."""
    low = mixed(i ^ key)
    high = mixed(low ^ 0x9E3779B9)
    total = (low & 0xFFFF) + (low >> 16) + (high & 0xFFFF) + (high >> 16)
    centred = 2 * total - 4 * 65535
    if mixed(high ^ 0x85EBCA6B) % 512 == 0:
        centred *= 8
    return Fraction(centred, 65536)


def bf16_pattern(exact: Fraction) -> int:
    """Round to nearest, ties to even, on the bits of the float32 that holds it exactly."""
    (pattern,) = struct.unpack("<I", struct.pack("<f", float(exact)))
    assert Fraction(struct.unpack("<f", struct.pack("<I", pattern))[0]) == exact
    return int((pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16)


def fp16_pattern(exact: Fraction) -> int:
    return int(struct.unpack("<H", struct.pack("<e", float(exact)))[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("stream", "name", "number"), [(0, "q", 0), (7, "v", 2), (954, "dout", 3)])
def test_bits_are_those_of_plain_python_arithmetic(
    stream: int, name: str, number: int, dtype: str
) -> None:
    key = mixed(SEED ^ ((4 * stream + number) * 0x1000193) & 0xFFFFFFFF)
    rounded = bf16_pattern if dtype == "bf16" else fp16_pattern
    expected = [rounded(exact_value(key, i)) for i in range(3000)]
    tensor = sequence(stream, 33, dtype).whole(name).reshape(-1)[:3000]
    assert [p & 0xFFFF for p in tensor.view(torch.int16).tolist()] == expected
    outliers = [i for i in range(3000) if abs(exact_value(key, i)) > 4]
    assert outliers, "the sample holds an outlier"


def test_tensor_hash_and_word_hash_and_definition_agree() -> None:
    words = [0, 1, 2, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, *range(5, 10**9, 10**7)]
    assert inputs._hash(torch.tensor(words)).tolist() == [mixed(w) for w in words]
    assert [hash_word(w) for w in words] == [mixed(w) for w in words]
    assert hash_word((1 << 40) + 5) == hash_word(5), "only 32 bits count"
    assert 0 <= hash_word(-1) <= 0xFFFFFFFF


def test_every_value_is_exact_in_fp32_before_it_is_rounded() -> None:
    exact = values(12345, 1 << 16, torch.float32, "cpu")
    scaled = exact.double() * 65536
    assert torch.equal(scaled, scaled.round())
    assert float(scaled.abs().max()) < 2**24


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_longer_sequence_extends_a_shorter_one(name: str) -> None:
    short, long = sequence(3, 10).whole(name), sequence(3, 40).whole(name)
    assert torch.equal(short.view(torch.int16), long[:10].view(torch.int16))


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 40), (7, 23), (39, 40), (5, 5)])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_rows_are_a_slice_of_the_whole(name: str, start: int, stop: int) -> None:
    one = sequence(3, 40)
    assert torch.equal(one.rows(name, start, stop), one.whole(name)[start:stop])


def test_values_do_not_depend_on_the_pieces_they_are_made_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = values(99, 1000, torch.bfloat16, "cpu", first=17)
    monkeypatch.setattr(inputs, "_CHUNK", 64)
    assert digest(values(99, 1000, torch.bfloat16, "cpu", first=17)) == digest(whole)
    assert digest(values(99, 500, torch.bfloat16, "cpu", first=217)) == digest(whole[200:700])


def test_shapes_follow_the_heads() -> None:
    one = sequence(0, 5, q_heads=6, kv_heads=3, head_dim=8)
    assert {name: tuple(one.whole(name).shape) for name in ("q", "k", "v", "dout")} == {
        "q": (5, 6, 8),
        "k": (5, 3, 8),
        "v": (5, 3, 8),
        "dout": (5, 6, 8),
    }


def test_streams_and_tensors_all_differ() -> None:
    streams = [*range(12), 500, 501, 900, 901, 950, 951]
    names = ["q", "k", "v", "dout"]
    digests = {
        digest(sequence(s, 9, q_heads=2, kv_heads=2).whole(n)) for s in streams for n in names
    }
    assert len(digests) == len(streams) * len(names)


def test_keys_of_all_streams_in_use_are_distinct() -> None:
    """32-bit keys could collide; those of the first 2048 sequences do not."""
    keys = {hash_word(SEED ^ (n * 0x1000193) & 0xFFFFFFFF) for n in range(4 * 2048)}
    assert len(keys) == 4 * 2048


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_values_are_bell_shaped_with_a_few_outliers(dtype: str) -> None:
    x = sequence(1, 2048, dtype).whole("q").double().reshape(-1)
    assert bool(torch.isfinite(x).all())
    usual = x[x.abs() < 4]
    # Four uniforms on an interval of width 2: variance 4 * 4 / 12.
    assert float(usual.std()) == pytest.approx(1.1547, abs=0.01)
    assert float(x.mean()) == pytest.approx(0, abs=0.01)
    # P(|sum of four| > 1/2, times 8 exceeds 4) of one in 512.
    share = float((x.abs() > 4).double().mean())
    assert 0.5 / 512 < share < 1 / 512
    assert float(x.abs().max()) > 16
    central = float((usual.abs() < 1.1547).double().mean())
    assert 0.63 < central < 0.70, "about as much within one deviation as a bell has"


def test_tokens_of_one_sequence_are_not_repeated() -> None:
    tokens = sequence(0, 512).whole("k").reshape(512, -1)
    assert len({digest(row) for row in tokens}) == 512
