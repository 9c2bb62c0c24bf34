"""Measures perplexity on any number of ranks; the result does not depend on their number.

    deepspeed dsft/eval_ppl.py --model runs/first --data held_out.jsonl
    deepspeed --hostfile hostfiles/2x8 dsft/eval_ppl.py --model big runs/first --data a.jsonl b.jsonl --output_dir out
    python dsft/eval_ppl.py --model runs/first/final --data held_out.jsonl --mode rolling
    dsft eval --run runs/first

The modes and their definitions are in `dsft/perplexity/modes.py`. With --output_dir, results are kept as they come
(perplexity.json, documents.parquet), and the same command resumes an interrupted evaluation.
"""

import os
import sys
from pathlib import Path

# Started as a script, this file's own folder is first on sys.path, and its modules could shadow libraries there.
OWN_FOLDER = Path(__file__).resolve().parent
if Path(sys.path[0]).resolve() == OWN_FOLDER:
    sys.path[0] = str(OWN_FOLDER.parent)

from dsft.errors import ends_with_clear_errors
from dsft.perplexity.of_training import read_evaluation
from dsft.runtime import distributed, quick_imports
from dsft.runtime.console import say, set_up_screen, show_table
from dsft.runtime.launcher_env import CHECKS_ALONE, map_launcher_variables
from dsft.setup import check_before_rendezvous
from dsft.units import plural


@ends_with_clear_errors
def main(argv: list[str] | None = None) -> None:
    map_launcher_variables()  # first: from here on RANK decides who prints
    if argv is None:
        argv = sys.argv[1:]
    problems = []
    config = read_evaluation(argv, problems)
    check_before_rendezvous(config, problems)
    if CHECKS_ALONE in os.environ:
        with quick_imports():
            from dsft.setup.evaluation import check_evaluation
        check_evaluation(config, problems)
        return
    say("loading PyTorch, transformers and DeepSpeed; a first start also compiles, about a minute")
    set_up_screen()
    with quick_imports():
        longest = max(1800, config.load_timeout, config.step_timeout)
        distributed.start_ranks(timeouts=config, timeout_seconds=longest, output_dir=config.output_dir)
        from rich.table import Table

        from dsft.api import evaluate_all  # loads torch, transformers and DeepSpeed
        from dsft.perplexity.compare import print_together

    say(f"{plural(distributed.world_size(), 'rank')} connected; checking options, data and models")
    for note in config.notes:
        say(f"note: {note}")
    evaluations = []
    for evaluation in evaluate_all(config, problems, progress=True):
        evaluations.append(evaluation)
        if distributed.rank():
            continue
        if len(config.model) == 1 or evaluation.groups or evaluation.divergence:
            table = Table("", "", title=evaluation.title, show_header=False, title_justify="left", title_style="bold")
            for row in evaluation.summary().items():
                table.add_row(*row)
            show_table(table)
        else:  # the table of all models follows
            say(f"{evaluation.title}: {evaluation.summary()['perplexity']}")
    if distributed.rank() == 0:
        print_together(evaluations)
    distributed.stop_ranks()


if __name__ == "__main__":
    main()
