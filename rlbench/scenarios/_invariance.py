"""What the four invariance scenarios share: run both sides of every variation, compare bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlbench.errors import Unsupported
from rlbench.ops._op import whole_outputs
from rlbench.scenarios._exercised import Exercised
from rlbench.scenarios._scenario import Context, Scenario

if TYPE_CHECKING:
    from rlbench.ops._op import Kernel, Outputs, Trial, Variation


def invariance(name: str, question: str) -> Scenario:
    """The scenario that asks the op for the variations called `name`."""
    return Scenario(question, "invariance", lambda context: measure(name, context))


def measure(name: str, context: Context) -> dict[str, Any]:
    """`checks`, `skipped` and `digests` of one invariance scenario.

    The expected side is computed once for the variations that share it and kept only as long as
    they follow one another.
    """
    from rlbench.measure import bits

    checks: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    digests: dict[str, str] = {}
    baseline: tuple[Trial, Outputs] | None = None
    for variation in context.workload.variations(name):
        if variation.pass_ not in context.passes:
            continue
        context.tell(variation.name)
        try:
            if baseline is None or baseline[0] is not variation.expected:
                baseline = None
                baseline = (variation.expected, run_trial(context.kernel, variation.expected))
            exercised = Exercised()
            actual = _actual(context, variation, exercised)
        except Unsupported as why:
            skipped.append({"variation": variation.name, "reason": str(why)})
            continue
        expected = baseline[1]
        if not digests:
            digests = {f"{variation.pass_}.{k}": bits.digest(v) for k, v in expected.items()}
        checks.append(
            {
                "variation": variation.name,
                "pass": variation.pass_,
                "property": variation.property.value,
                "exercised": str(exercised),
                **bits.compare(expected, actual),
            }
        )
    if not checks:
        raise Unsupported("; ".join(dict.fromkeys(s["reason"] for s in skipped)) or "no variation")
    return {"checks": checks, "skipped": skipped, "digests": digests}


def _actual(context: Context, variation: Variation, exercised: Exercised) -> Outputs:
    if not variation.actual.fresh_process:
        return run_trial(context.kernel, variation.actual, exercised)
    for part in variation.actual.parts():
        exercised.add(part.call)
    return context.elsewhere(variation.name)


def run_trial(kernel: Kernel, trial: Trial, exercised: Exercised | None = None) -> Outputs:
    """The joined outputs of a trial's calls, which are added to `exercised`."""
    import torch

    taken: dict[str, list[torch.Tensor]] = {}
    for part in trial.parts():
        if exercised is not None:
            exercised.add(part.call)
        outputs = part.take(whole_outputs(part.call, kernel.bind(part.call)()))
        for name, tensor in outputs.items():
            # A copy: engines may hand out a buffer that the next call overwrites.
            taken.setdefault(name, []).append(tensor.detach().clone())
    return {name: torch.cat(tensors) for name, tensors in taken.items()}
