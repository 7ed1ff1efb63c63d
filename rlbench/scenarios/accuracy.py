"""How far is the output from the same computation in fp64 on the same low-precision inputs?"""

from __future__ import annotations

from typing import Any

from rlbench.errors import Unsupported
from rlbench.ops._op import whole_outputs
from rlbench.scenarios._scenario import Context, Scenario


def measure(context: Context) -> dict[str, Any]:
    """`errors` of every output tensor of every pass the engine offers, and `skipped` passes."""
    from rlbench.measure import errors

    found: dict[str, dict[str, Any]] = {}
    digests: dict[str, str] = {}
    skipped: list[dict[str, str]] = []
    for exam in context.workload.exams():
        if exam.pass_ not in context.passes:
            continue
        context.tell(f"{exam.pass_} {exam.label}")
        try:
            outputs = whole_outputs(exam.call, context.kernel.bind(exam.call)())
        except Unsupported as why:
            skipped.append({"variation": f"{exam.pass_} {exam.label}", "reason": str(why)})
            continue
        measured = errors.measure(outputs, exam.reference(), exam.plain())
        for name, figures in measured.items():
            key = f"{exam.pass_}.{name} {exam.label}"
            found[key] = figures
            digests[key] = errors.digest(outputs[name])
            context.keep(key, outputs[name])
    if not found:
        raise Unsupported("; ".join(dict.fromkeys(s["reason"] for s in skipped)) or "no pass")
    return {"errors": found, "digests": digests, "skipped": skipped}


SCENARIO = Scenario(
    "How far is the output from fp64 on the same inputs, and from plain torch's own error?",
    "accuracy",
    measure,
)
