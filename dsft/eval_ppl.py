"""Measures perplexity on any number of ranks; the result does not depend on their number.

    deepspeed dsft/eval_ppl.py --model runs/first --data held_out.jsonl
    deepspeed --hostfile hostfiles/2x8 dsft/eval_ppl.py --model big runs/first --data a.jsonl b.jsonl --output_dir out
    python dsft/eval_ppl.py --model runs/first/final --data held_out.jsonl --mode rolling
    dsft eval --run runs/first

The modes and their definitions are in `dsft/perplexity/modes.py`. With --output_dir, results are kept as they come
(perplexity.json, documents.parquet), and the same command resumes an interrupted evaluation.
"""

import sys
from pathlib import Path

# Started as a script, this file's own folder stands first on sys.path, and its modules could shadow libraries there.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from dsft.errors import UserError, ends_with_clear_errors
from dsft.perplexity.compare import (
    PICTURE,
    compare_results,
    comparison_rows,
    comparison_title,
    context_curves,
    curve_rows,
    draw_curves,
)
from dsft.perplexity.of_training import read_evaluation
from dsft.perplexity.results import Evaluation
from dsft.run_setup.named_files import check_before_meeting
from dsft.runtime import distributed
from dsft.runtime.console import print_table, say, set_up_screen
from dsft.runtime.launcher_env import check_words, map_launcher_variables
from dsft.runtime.quick_imports import quick_imports


@ends_with_clear_errors
def main(argv: list[str] | None = None) -> None:
    map_launcher_variables()  # first: from here on RANK says who prints
    if argv is None:
        check_words(argv := sys.argv[1:])
    problems: list[str] = []
    config = read_evaluation(argv, problems)
    check_before_meeting(config, problems)
    set_up_screen()
    with quick_imports():
        distributed.start_ranks(
            timeouts=config, timeout_seconds=max(1800, config.load_timeout), output_dir=config.output_dir
        )
        from dsft.data.training_data import notes_on_escapes  # loads torch, transformers and DeepSpeed
        from dsft.perplexity.evaluation import evaluate

    for note in notes_on_escapes(config):
        say(f"note: {note}")
    evaluations = []
    for evaluation in evaluate(config, problems, progress=True):
        evaluations.append(evaluation)
        if distributed.rank() == 0:
            by = f" by {evaluation.protocol}" if evaluation.protocol else ""
            known = " (known from an earlier evaluation)" if evaluation.is_known else ""
            print_table(f"Perplexity of {evaluation.model} on {evaluation.data}{by}{known}", evaluation.summary())
    if config.protocol == "all" and distributed.rank() == 0:
        show_protocols(evaluations)
    if config.context_curve and distributed.rank() == 0:
        show_context_curves(evaluations, config.output_dir)
    if len({evaluation.model for evaluation in evaluations}) > 1 and distributed.rank() == 0:
        show_comparisons(evaluations)
        show_divergences(evaluations)
    distributed.stop_ranks()


def show_protocols(evaluations: list[Evaluation]) -> None:
    """Print what each protocol gives, a table for each model and data set."""
    tables: dict[tuple[str, str], dict[str, str]] = {}
    for evaluation in evaluations:
        rows = tables.setdefault((evaluation.model, evaluation.data), {})
        rows[evaluation.protocol] = evaluation.protocol_row()
    for (model, data), rows in tables.items():
        print_table(f"{model} on {data}, as others report it", rows)


def show_context_curves(evaluations: list[Evaluation], output_dir: str | None) -> None:
    """Print a table for each model and data set; with an output_dir draw all in one picture."""
    curves = context_curves(evaluations)
    for (model, data), results in curves.items():
        print_table(f"Context curve of {model} on {data}", curve_rows(results))
    if output_dir:
        path = Path(output_dir) / PICTURE
        drawn = draw_curves(curves, path)
        say(
            f"drawn: {path}"
            if drawn
            else "note: no picture of the curve, which needs matplotlib (pip install matplotlib)"
        )


def show_divergences(evaluations: list[Evaluation]) -> None:
    """Print all models against their reference, a table for each data set and protocol."""
    tables: dict[tuple[str, str], dict[str, str]] = {}
    for evaluation in evaluations:
        if divergence := evaluation.divergence:
            rows = tables.setdefault((evaluation.data, evaluation.protocol or ""), {})
            rows.setdefault(f"{divergence.reference} (reference)", f"{divergence.reference_perplexity:.4f}")
            rows[evaluation.model] = (
                f"{evaluation.perplexity.perplexity:.4f}  (KL {divergence.kl:.6f} nats per token, same likeliest token"
                f" {divergence.same_top:.2%})"
            )
    for (data, protocol), rows in tables.items():
        print_table(f"Perplexity on {data}{f' by {protocol}' if protocol else ''}, against the reference", rows)


def show_comparisons(evaluations: list[Evaluation]) -> None:
    """Compare every model with the first one."""
    try:
        comparisons = compare_results(evaluations)
    except UserError as error:  # the results stand; only what joins them does not
        for problem in error.problems:
            say(f"note: not compared: {problem}")
        return
    for comparison in comparisons:
        print_table(comparison_title(comparison), comparison_rows(comparison))


if __name__ == "__main__":
    main()
