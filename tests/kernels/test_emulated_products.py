"""What stands in for the tensor core and for conversions, against torch."""

from __future__ import annotations

import pytest
import torch
from emulation.builds import HERE, Schedule, Shape, compiled, launch, skip_where_it_cannot_run

from rlbench.kernels.attention.request import ELEMENTS

skip_where_it_cannot_run()

ROWS, COLUMNS, DEPTH = 64, 128, 64
SHARED_BYTES = (ROWS * DEPTH + 2 * COLUMNS * DEPTH) * 2


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("lazy", [False, True])
def test_products_and_conversions(dtype: torch.dtype, lazy: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:  # so that every sum is exact
        return torch.randint(-16, 17, shape, generator=generator).to(dtype)

    a, b, v = integers(ROWS, DEPTH), integers(COLUMNS, DEPTH), integers(DEPTH, COLUMNS)
    every = torch.arange(65536).to(torch.int16).view(dtype)
    # Elements, what is halfway between two of them and close to that, and anything.
    steps = every.float().view(torch.int32)[:, None] + torch.tensor([0, 0xFFF, 0x1000, 0x8000])
    anything = torch.randint(-(2**31), 2**31, (100_000,), generator=generator)
    wide = torch.cat([steps.flatten(), anything]).to(torch.int32).view(torch.float32)
    wide = wide[~wide.isnan()]
    results = torch.full((4, ROWS, COLUMNS), float("nan"))
    rounded = torch.zeros(wide.shape, dtype=torch.int16)
    values = torch.zeros(65536)

    name = f"products_{ELEMENTS[dtype].lower()}"
    source = (HERE / "products.cu").read_text()
    program = compiled(source, {"ELEMENT": ELEMENTS[dtype], "KERNEL_NAME": name}, name)
    launch(
        program,
        Shape(1, 128, 1, SHARED_BYTES),
        (a, b, v, results, wide, rounded, values),
        (results, rounded, values),
        (wide.numel(),),
        Schedule(lazy=lazy),
    )
    scores, sums = a.float() @ b.float().T, a.float() @ v.float()
    assert torch.equal(results, torch.stack([scores, scores, sums, sums]))
    assert torch.equal(rounded, wide.to(dtype).view(torch.int16))
    torch.testing.assert_close(values, every.float(), rtol=0, atol=0, equal_nan=True)
