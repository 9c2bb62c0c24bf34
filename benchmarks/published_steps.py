"""Published steps beside the plan's, by kind of step: measured over planned seconds of those that chose the planner's
numbers, and of those that were held out (tests/planner/published_steps.json has each with its source).

    python benchmarks/published_steps.py > benchmarks/results/published_steps.json
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "planner")]
KINDS = {
    "dense": "full, from 2,048 tokens per micro batch",
    "LoRA": "LoRA, the same",
    "QLoRA": "QLoRA",
    "short": "short: fewer tokens",
    "long": "long: attention takes over a third",
    "experts": "with experts",
    "compiled": "compiled or with fused kernels",
}


def main() -> None:
    from published import STEPS, measured_over_predicted, predicted

    from dsft.planner.step_time import TIME_RANGES

    ratios = {kind: {"chose": [], "held out": []} for kind in KINDS}
    for step in STEPS:
        kind = predicted(step).kind
        if kind not in TIME_RANGES:
            kind = "compiled" if step.get("compiled") else "experts"
        ratios[kind][step["split"]].append(measured_over_predicted(step))
    rows = [
        {
            "kind": name,
            **{split.replace(" ", "_"): [round(ratio, 2) for ratio in sorted(some)] for split, some in of_kind.items()},
            "range": shares,
            "held_out_inside": sum(shares[0] <= ratio <= shares[1] for ratio in of_kind["held out"])
            if shares
            else None,
        }
        for kind, name in KINDS.items()
        for shares, of_kind in [(TIME_RANGES.get(kind), ratios[kind])]
    ]
    print(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
