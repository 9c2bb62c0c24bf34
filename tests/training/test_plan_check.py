"""What a plan is compared with at the end."""

from types import SimpleNamespace

import pytest

from dsft.planner.memory import Term
from dsft.training import callbacks
from dsft.training.callbacks import PlanCheck


def test_the_median_step_without_the_first_and_those_after_evaluations_is_compared(monkeypatch, capsys):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(callbacks, "has_gpu", lambda: True)
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: now.seconds)
    for name, num_bytes in (("allocated", 200), ("reserved", 103)):
        monkeypatch.setattr(f"torch.cuda.max_memory_{name}", lambda num_bytes=num_bytes: num_bytes)
    terms = [
        Term("states", 14, ""),
        Term("activations", 86, "", "compute"),
        Term("step", 80, "", "step"),
        Term("outside of torch", 1000, "", "outside"),
    ]
    check = PlanCheck(SimpleNamespace(terms=terms, host_bytes=8, step_seconds=3.0, has_time_estimate=True))
    for step in range(1, 8):
        now.seconds += 50.0 if step == 1 else 2.0
        check.on_step_end(None, None, None)
        if step == 5:
            now.seconds += 100.0
            check.on_evaluate(None, None, None)
    check.on_train_end(None, None, None)
    assert check.step_seconds == pytest.approx([2.0] * 5)
    assert check.figures["time of a step"] == {"predicted": 3.0, "measured": 2.0, "error": 0.5}
    assert check.figures["host memory of a node"]["predicted"] == 8
    errors = [figure["error"] for name, figure in check.figures.items() if name.startswith("GPU")]
    assert errors == pytest.approx([-0.5, 0.0], abs=0.01)
    assert "time of a step 2 s (predicted 3, +50%)" in capsys.readouterr().out
