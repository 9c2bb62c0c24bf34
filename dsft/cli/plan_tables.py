"""Plans on the screen: the table of candidates, every term with its formula, and the view over numbers of nodes."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dsft.models.size import ModelSize
from dsft.planner.evaluation_plan import EvaluationPlan
from dsft.planner.plans import Plan, RunCost
from dsft.planner.step_time import TIME_RANGE
from dsft.planner.terms import MEMORY_ERROR
from dsft.run_setup.alternatives import Largest
from dsft.runtime.console import show_table
from dsft.runtime.hardware import Machine
from dsft.units import GiB

PHASES = {
    "always": "always",
    "compute": "forward and backward",
    "step": "optimizer step",
    "save": "saving",
    "load": "loading",
}


def describe_model(size: ModelSize) -> str:
    """One line: parameters by kind."""
    parts = [
        f"{size.num_params / 1e9:,.3f} B parameters",
        f"{size.num_trainable / 1e9:,.3f} B trained",
        f"embedding {size.embedding_params / 1e9:,.3f} B",
    ]
    parts.append(f"head {size.head_params / 1e9:,.3f} B" if size.head_params else "head tied")
    if size.expert_params:
        parts.append(f"experts {size.expert_params / 1e9:,.3f} B, {size.active_params / 1e9:,.3f} B active per token")
    if size.other_params:
        parts.append(f"{size.other_params / 1e9:,.3f} B beside the text model, frozen: no text reaches them")
    return ", ".join(parts)


NUMBERS = ("states", "buffers", "activations", "step", "peak", "host", "s/step", "tokens/s")


def show_plans(chosen: Plan, plans: list[Plan], size: ModelSize, machine: Machine) -> None:
    """The table of these candidates, the chosen one marked."""
    device = "GPU" if machine.has_gpu else "rank"
    error = ""
    if machine.has_gpu:
        least, most = TIME_RANGE
        error = f"; published runs took {least:.2f} to {most:.2f} of their time, memory within {MEMORY_ERROR:.0%}"
    table = Table(
        caption=f"GiB per {device}; host: GiB per node; batch: sequences of a micro batch x accumulation{error}",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )  # 120 columns hold it
    for name in ("", "ZeRO", "ckpt", "batch", *NUMBERS, f"per {device}", "fits"):
        left = name in ("", "ZeRO", "ckpt", "batch", "fits")
        table.add_column(name, no_wrap=True, justify="left" if left else "right")
    for plan in plans:
        table.add_row("->" if plan is chosen else "", *_plan_row(plan, machine))
    print(f"{describe_model(size)}\n{machine}")
    show_table(table)
    print(f"{chosen.time.tokens_per_step:,} tokens per step")


def _plan_row(plan: Plan, machine: Machine) -> list[str]:
    states, compute, step = (plan.part_bytes(phase) for phase in ("always", "compute", "step"))
    sizes = (
        states,
        compute - plan.activation_bytes,
        plan.activation_bytes,
        step,
        plan.device_bytes,
        plan.host_bytes,
    )
    speed = plan.time.tokens_per_second
    times = [f"{plan.time.step_seconds:,.2f}", f"{speed:,.0f}", f"{speed / machine.world_size:,.0f}"]
    return [
        plan.zero,
        "on" if plan.activation_checkpointing else "off",
        f"{plan.micro_batch} x {plan.accumulation}",
        *(f"{number / GiB:,.1f}" for number in sizes),
        *(times if plan.has_time_estimate else ["-"] * 3),
        _fits(plan, plan.limiting_resource.replace(" memory", "").replace(" and ", "+")),
    ]


def _fits(plan: Plan | EvaluationPlan, limiting_resource: str) -> str:
    return ("tight" if plan.low_headroom else "yes") if plan.fits else f"no: {limiting_resource}"


def explain(plan: Plan) -> None:
    """Every term of one plan with its formula, and the parts of its time."""
    table = Table(title=plan.label, title_justify="left")
    for name in ("term", "held", "where", "GiB", "formula"):
        table.add_column(name, justify="right" if name == "GiB" else "left")
    for term in sorted(plan.terms, key=lambda term: (term.place, list(PHASES).index(term.phase))):
        table.add_row(
            term.name,
            PHASES[term.phase],
            "one GPU or rank" if term.place == "device" else "one node",
            f"{term.num_bytes / GiB:,.3f}",
            term.formula,
        )
    times = Table(title="one optimizer step", title_justify="left")
    for name in ("part", "seconds"):
        times.add_column(name, justify="right" if name == "seconds" else "left")
    time = plan.time
    for name, seconds in (
        ("computing", time.compute_seconds),
        ("communication, if nothing hid it", time.communication_seconds),
        ("offload transfers, if nothing hid them", time.offload_seconds),
        ("optimizer", time.optimizer_seconds),
        ("together", time.step_seconds),
    ):
        times.add_row(name, f"{seconds:,.4f}")
    show_table(table)
    show_table(times)
    print("peak = always + the larger of (forward and backward) and (optimizer step)")


def largest_text(row: Largest, machine: Machine) -> str:
    """One sentence for a method: the largest model with its plan, and the next one."""
    if not row.plan:
        return f"{row.method}: none fits, from {row.too_large[0]} on"
    beyond = f"; not {row.too_large[0]}" if row.too_large else ""
    return f"{row.method}: up to {row.fits[-1]} ({row.plan.label}{speed_text(row.plan, machine)}){beyond}"


def speed_text(plan: Plan, machine: Machine) -> str:
    """Tokens per second of one GPU, to be appended; empty where no time is told."""
    speed = plan.time.tokens_per_second / machine.world_size
    return f", {speed:,.0f} tokens/s per {'GPU' if machine.has_gpu else 'rank'}" if plan.has_time_estimate else ""


def cost_text(cost: RunCost) -> str:
    """One sentence: hours, GPU hours and dollars."""
    dollars = "" if cost.dollars is None else f", {cost.dollars:,.0f} dollars"
    hours = f"{cost.hours:,.1f} hours"
    if cost.most_hours > cost.least_hours:
        hours += f" ({cost.least_hours:,.1f} to {cost.most_hours:,.1f})"
    return f"{cost.tokens:,.0f} tokens in {cost.steps:,.0f} steps: {hours}, {cost.gpu_hours:,.0f} GPU hours{dollars}"


def show_scale(rows: list[tuple[Machine, Plan]]) -> None:
    """How speed, memory and cost move with the number of nodes."""
    table = Table(caption="GiB per GPU; host: GiB per node; GPU hours for 1e9 tokens", caption_justify="left")
    for name in ("nodes", "GPUs", "tokens/step", "plan", "peak", "host", "s/step", "tokens/s", "GPU hours", "fits"):
        table.add_column(name, no_wrap=name != "plan", justify="left" if name in ("plan", "fits") else "right")
    for machine, plan in rows:
        times = [f"{plan.time.step_seconds:,.2f}", f"{plan.time.tokens_per_second:,.0f}"]
        times.append(f"{gpu_hours(plan, machine):,.1f}")
        table.add_row(
            str(machine.nodes),
            str(machine.world_size),
            f"{plan.time.tokens_per_step:,}",
            plan.label,
            f"{plan.device_bytes / GiB:,.1f}",
            f"{plan.host_bytes / GiB:,.0f}",
            *(times if plan.has_time_estimate else ["-"] * 3),
            _fits(plan, plan.limiting_resource),
        )
    show_table(table)


def gpu_hours(plan: Plan, machine: Machine) -> float:
    """GPU hours for 1e9 tokens."""
    return 1e9 / plan.time.tokens_per_second * machine.world_size / 3600


def show_evaluation_plans(
    chosen: EvaluationPlan, plans: list[EvaluationPlan], size: ModelSize, machine: Machine, *, has_time_estimate: bool
) -> None:
    """The table of the ways to hold a model while scoring; speeds where they are more than rules of thumb."""
    table = Table(caption=f"GiB per {'GPU' if machine.has_gpu else 'rank'}; host: GiB per node", caption_justify="left")
    for name in ("", "zero", "batch_tokens", "weights", "activations and logits", "peak", "host", "tokens/s", "fits"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("", "zero", "fits") else "right")
    for plan in plans:
        numbers = (plan.weight_bytes, plan.activation_bytes, plan.device_bytes, plan.host_bytes)
        table.add_row(
            "->" if plan is chosen else "",
            plan.zero,
            f"{plan.batch_tokens:,}",
            *(f"{number / GiB:,.1f}" for number in numbers),
            f"{plan.tokens_per_second:,.0f}" if has_time_estimate else "-",
            _fits(plan, plan.limiting_resource),
        )
    print(f"{describe_model(size)}\n{machine}")
    show_table(table)
