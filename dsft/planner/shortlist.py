"""What to show of many plans, and what a run with one of them takes: hours and dollars."""

from dataclasses import dataclass

from dsft.planner.plan import Plan, nearest_miss, shortage
from dsft.planner.step_time import TIME_RANGE
from dsft.runtime.hardware import Machine

BEST = 3
"""Plans that fit and are shown."""


def shortlist(chosen: Plan, plans: list[Plan], machine: Machine) -> list[Plan]:
    """The choice, the next fastest that fit, and the nearest that does not fit and is worth it; where nothing fits, the
    two that lack least. In the order of `plans`.
    """

    def speed(plan: Plan) -> float:
        return plan.time.tokens_per_second

    others = sorted((plan for plan in plans if plan.fits and plan is not chosen), key=speed, reverse=True)
    shown = [chosen, *others[: BEST - 1]]
    if chosen.fits:
        shown.append(nearest_miss(chosen, plans, machine))
    else:
        shown += sorted((plan for plan in plans if plan is not chosen), key=lambda plan: shortage(plan, machine))[:1]
    return [plan for plan in plans if any(plan is kept for kept in shown)]


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What it takes to train on so many tokens."""

    tokens: float
    """Of all epochs together, without padding."""
    steps: float
    hours: float
    least_hours: float
    """By the spread of the published steps."""
    most_hours: float
    gpu_hours: float
    dollars: float | None


def run_cost(
    plan: Plan,
    machine: Machine,
    *,
    tokens: float,
    steps: float,
    dollars: float | None = None,
    step_seconds: float | None = None,
) -> RunCost:
    """Count the hours of so many steps, without loading, evaluation and saving.

    Args:
        dollars: of one GPU for an hour.
        step_seconds: where they are not the plan's, whose sequences are full.
    """
    hours = steps * (step_seconds or plan.time.step_seconds) / 3600
    least, most = TIME_RANGE if machine.has_gpu else (1.0, 1.0)
    gpu_hours = hours * machine.world_size
    return RunCost(
        tokens=tokens,
        steps=steps,
        hours=hours,
        least_hours=least * hours,
        most_hours=most * hours,
        gpu_hours=gpu_hours,
        dollars=None if dollars is None else gpu_hours * dollars,
    )
