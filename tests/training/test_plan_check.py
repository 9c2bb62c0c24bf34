"""How long a step took, on a GPU whose work is done later than the host asks for it."""

from types import SimpleNamespace

import pytest

from dsft.planner.memory import FULL_TRAINING, Term
from dsft.training import callbacks
from dsft.training.callbacks import FIRST_STEPS, PlanCheck


class Clock:
    """A GPU for which the host has asked work up to `asked`, and that has done it up to `done`, in seconds."""

    def __init__(self):
        self.asked = self.done = 0.0

    def mark(self) -> SimpleNamespace:
        at = self.asked
        return SimpleNamespace(
            at=at, query=lambda: at <= self.done, elapsed_time=lambda end: 1000 * (self.end(end) - at)
        )

    def end(self, mark: SimpleNamespace) -> float:
        assert mark.query(), "asked for before it is done"
        return mark.at

    def synchronize(self) -> None:
        self.done = self.asked


def test_a_step_takes_what_the_gpu_takes_and_only_comparisons_wait_for_it(monkeypatch, capsys):
    clock, waits = Clock(), []
    monkeypatch.setattr(callbacks, "has_gpu", lambda: True)
    monkeypatch.setattr(callbacks, "mark", clock.mark)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 7)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: waits.append(clock.asked) or clock.synchronize())
    for name, num_bytes in (("allocated", 200), ("reserved", 103)):
        monkeypatch.setattr(f"torch.cuda.max_memory_{name}", lambda num_bytes=num_bytes: num_bytes)
    terms = [
        Term("states", 14, ""),
        Term("activations", 86, "", "compute"),
        Term("step", 80, "", "step"),
        Term("outside of torch", 1000, "", "outside"),
    ]
    plan = SimpleNamespace(terms=terms, host_bytes=8, step_seconds=3.0, has_time_estimate=True)
    check = PlanCheck(plan)
    for step in range(1, 7):
        check.on_step_begin(None, None, None)
        clock.asked += 2.0
        clock.done = max(clock.done, clock.asked - 2.0)  # the host is a step ahead
        check.on_step_end(None, None, None)
        if step == 5:
            clock.asked += 100.0
            check.on_evaluate(None, None, None)
    assert len(check.unread) == 1
    check.on_train_end(None, None, None)
    assert check.step_seconds == pytest.approx([2.0] * 6)
    assert len(waits) == 2 and check.held_bytes == 7
    assert list(check.comparisons) == [f"after {FIRST_STEPS} steps", FULL_TRAINING]
    for figures in check.comparisons.values():
        assert figures["time of a step"] == {"predicted": 3.0, "measured": 2.0, "error": 0.5}
        assert figures["host memory of a node"]["predicted"] == 8
        errors = {name: figure["error"] for name, figure in figures.items() if name.startswith("GPU")}
        assert list(errors.values()) == [1.0, -0.5, 0.0], errors
    assert "time of a step 2 s (predicted 3, +50%)" in capsys.readouterr().out
