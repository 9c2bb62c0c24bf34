"""Measures perplexity on any number of ranks; the result does not depend on their number.

    deepspeed dsft/eval_ppl.py --model runs/first --data held_out.jsonl
    deepspeed --hostfile hostfiles/2x8 dsft/eval_ppl.py --model big runs/first --data a.jsonl b.jsonl --output_dir out
    python dsft/eval_ppl.py --model runs/first/final --data held_out.jsonl --mode rolling
    dsft eval --run runs/first

The modes and their definitions are in `dsft/perplexity/windows.py`. With --output_dir, results are kept as they come
(perplexity.json, documents.parquet), and the same command resumes an interrupted evaluation.
"""

import sys
from pathlib import Path

# Started as a script, this file's own folder stands first on sys.path, and its modules could shadow libraries there.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from dsft.data.training_data import notes_on_escapes
from dsft.errors import ends_with_clear_errors
from dsft.perplexity.evaluation import evaluate
from dsft.perplexity.of_training import read_evaluation
from dsft.perplexity.report import summary
from dsft.runtime import distributed
from dsft.runtime.console import print_table, say, set_up_screen
from dsft.runtime.launcher_env import map_launcher_variables


@ends_with_clear_errors
def main(argv: list[str] | None = None) -> None:
    map_launcher_variables()  # first: from here on RANK says who prints
    problems: list[str] = []
    config = read_evaluation(sys.argv[1:] if argv is None else argv, problems)
    set_up_screen()
    distributed.start_ranks(
        timeouts=config, timeout_seconds=max(1800, config.load_timeout), output_dir=config.output_dir
    )
    for note in notes_on_escapes(config):
        say(f"note: {note}")
    for evaluation in evaluate(config, problems, progress=True):
        if distributed.rank() == 0:
            known = " (known from an earlier evaluation)" if evaluation.is_known else ""
            print_table(f"Perplexity of {evaluation.model} on {evaluation.data}{known}", summary(evaluation))
    distributed.stop_ranks()


if __name__ == "__main__":
    main()
