"""Measures perplexity on any number of ranks; the result does not depend on how many.

    deepspeed dsft/eval_ppl.py --model runs/first --data held_out.jsonl
    python dsft/eval_ppl.py --model runs/first/final --data held_out.jsonl --output_dir runs/first

`--model` is a hub id, a folder, an adapter's folder or a run's folder. Text is scored in windows of seq_len; prompts
with completions and chats are scored on the answers.
"""

import sys
from pathlib import Path

# Started as a script, this file's own folder stands first on sys.path, and its modules could shadow libraries there.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from dsft import ranks
from dsft.config import EvalConfig, read_config
from dsft.evaluation import evaluate
from dsft.machine import GiB
from dsft.problems import ends_with_clear_errors
from dsft.run_folder import write_json
from dsft.screen import print_table, say, set_up_screen


@ends_with_clear_errors
def main(argv: list[str] | None = None) -> None:
    problems: list[str] = []
    config = read_config(EvalConfig, sys.argv[1:] if argv is None else argv, problems)
    set_up_screen()
    ranks.start_ranks()
    report = evaluate(config, problems, progress=True).report()
    if ranks.rank() == 0:
        if config.output_dir:
            path = Path(config.output_dir) / "perplexity.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, report)
            say(f"written to {path}")
        print_table(f"Perplexity of {report['model']}", {
            "perplexity": f"{report['perplexity']:.4f}",
            "scored": f"{report['tokens']:,} tokens of {report['sequences']:,} sequences ({report['mode']})",
            "nats per token": f"{report['nats_per_token']:.6f}",
            "computed as": f"{report['dtype']}, ZeRO {report['zero']}, {report['ranks']} ranks",
            "speed": f"{report['tokens_per_second']:,.0f} tokens/s, {report['seconds']:.1f} s",
            "peak memory per rank": ", ".join(f"{name} {value / GiB:.2f} GiB" for name, value in report["peak_memory_bytes"].items()),
        })
    ranks.stop_ranks()


if __name__ == "__main__":
    main()
