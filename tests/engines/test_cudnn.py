"""The cuDNN that is told, also where torch refuses it."""

from __future__ import annotations

import pytest

from rlbench.engines import _cudnn, _torch_sdpa

REFUSAL = (
    "cuDNN version incompatibility: PyTorch was compiled  against (9, 19, 0) but found runtime "
    "version (9, 14, 0). PyTorch already comes bundled with cuDNN. One option to resolving this"
)


@pytest.mark.parametrize(("number", "told"), [(91900, "9.19.0"), (90304, "9.3.4"), (None, "none")])
def test_version(number: int | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: number)
    assert _cudnn.version() == told
    assert _torch_sdpa.kernel("cudnn").resolved["cudnn"] == told
    assert "cudnn" not in _torch_sdpa.kernel("flash").resolved


def test_another_one_than_torch_was_built_against(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise RuntimeError(REFUSAL)

    monkeypatch.setattr("torch.backends.cudnn.version", refuse)
    told = _cudnn.version()
    assert "against (9, 19, 0) but found runtime version (9, 14, 0)" in told
    assert "One option" not in told
