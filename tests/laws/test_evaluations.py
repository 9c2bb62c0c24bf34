"""An evaluation that is killed on some ranks and continued on others has the bits of one that was left alone.

Modes and protocols, numbers of ranks before and after, both ways to hold the model: each pair of values has a case.
"""

import itertools
import time
from pathlib import Path

import pytest
from conftest import grid
from ranks import on_ranks

from dsft.api import evaluate_all
from dsft.config.options import EvalConfig
from dsft.perplexity import scoring

MODES = {
    "windows": {"mode": "windows"},
    "sliding": {"mode": "sliding", "stride": 16},
    "documents": {"mode": "sliding", "scope": "document"},
    "rolling": {"mode": "rolling", "group_by": ["text"]},
    "answers": {"mode": "answers"},
    "gptq": {"protocol": "gptq"},
    "llama.cpp": {"protocol": "llama.cpp"},
    "lm-eval": {"protocol": "lm-eval"},
    "hf": {"protocol": "hf", "stride": 16},
}
VALUES = (tuple(MODES), (1, 2, 3, 4), ("0", "3"), (1, 2, 3, 4), ("0", "3"))


def pairwise_cases() -> list[tuple]:
    """Cases in which every two values of two factors come together, the next one with the most new pairs each time."""

    def pairs(case: tuple) -> set:
        return set(itertools.combinations(enumerate(case), 2))

    cases, every = [], list(itertools.product(*VALUES))
    left = set().union(*map(pairs, every))
    while left:
        cases.append(max(every, key=lambda case: len(pairs(case) & left)))
        left -= pairs(cases[-1])
    return cases


def slowly(options: dict) -> None:
    score = scoring.score

    def slow(*arguments):
        time.sleep(0.1)
        return score(*arguments)

    scoring.score = slow
    measured(options)


def measured(options: dict) -> tuple:
    """Everything that must be bit-identical, and the tokens that were fed to the model now."""
    evaluation = next(evaluate_all(EvalConfig(**options)))
    result = evaluation.perplexity
    sums = (result.nats, result.tokens, result.reported_loss, result.document_nats.tolist(), repr(evaluation.groups))
    return sums, result.fed_tokens


@pytest.fixture(scope="module")
def expected():
    return {}


@pytest.mark.parametrize(
    ("name", "ranks", "zero", "later_ranks", "later_zero"), grid(pairwise_cases(), pairwise_cases()[1:2])
)
def test_killed_and_continued_on_other_ranks(tiny, tmp_path, expected, name, ranks, zero, later_ranks, later_zero):
    data = "pairs.jsonl" if name == "answers" else "held_out.jsonl"
    options = {"model": [str(tiny / "model")], "data": [str(tiny / data)], "seq_len": 32, "batch_tokens": 64}
    options |= MODES[name] | {"zero": "0"}
    if name not in expected:
        ((expected[name], fed),) = on_ranks(1, measured, options)
        assert fed > 5 * 64, "batches enough to be killed among"
        expected[f"tokens of {name}"] = fed
    options |= {"output_dir": str(tmp_path), "zero": zero}

    def has_scored() -> bool:
        lines = [
            line for path in Path(tmp_path).glob("partial/*/rank-*.jsonl") for line in path.read_text().split("\n")
        ]
        return len(lines) > 4

    assert on_ranks(ranks, slowly, options, kill_when=has_scored, seed=ranks) is None, "was not killed"
    results = on_ranks(later_ranks, measured, options | {"zero": later_zero})
    assert [sums for sums, _ in results] == [expected[name]] * later_ranks
    assert all(0 < fed < expected[f"tokens of {name}"] for _, fed in results), "a part was known"
