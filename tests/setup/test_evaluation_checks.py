"""What is found wrong with a model to score before its weights load."""

import pytest

from dsft.config.options import EvalConfig
from dsft.setup.evaluation import candidate_of, in_formats


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"protocol": "gptq", "has_seq_len": False}, None),
        ({"protocol": "gptq", "seq_len": 10**6}, "seq_len=1000000 is beyond the"),
        ({"seq_len": 10**6}, "seq_len=1000000 is beyond the"),
    ],
    ids=str,
)
def test_a_named_length_must_fit_the_models_positions_and_a_protocols_own_does(tiny, options, problem):
    problems: list[str] = []
    candidate = candidate_of(EvalConfig(**options), str(tiny / "model"), problems)
    assert candidate.facts.size.max_positions < 64 * 1024
    assert problems == [] if problem is None else len(problems) == 1 and problems[0].startswith(problem)


@pytest.mark.parametrize(("zero", "is_refused"), [("auto", False), ("0", False), ("3", True), ("3-offload", True)])
def test_a_format_that_cannot_be_sharded_is_refused_with_shards(tiny, zero, is_refused):
    candidate = candidate_of(EvalConfig(zero=zero), str(tiny / "model"), [])
    problems: list[str] = []
    in_formats(candidate, ["nf4"], problems)
    assert (
        any("weights are quantised (nf4)" in problem and "use zero 0" in problem for problem in problems) == is_refused
    )
