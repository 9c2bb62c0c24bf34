"""Finetunes a causal language model under DeepSpeed, on any number of ranks.

    deepspeed dsft/train.py --config run.yaml --learning_rate 1e-4
    deepspeed --hostfile hostfiles/2x8 dsft/train.py --config run.yaml
    accelerate launch --config_file ds_configs/accelerate/zero3_2x8.yaml dsft/train.py --config run.yaml
    torchrun --nproc_per_node 8 dsft/train.py --config run.yaml
    python dsft/train.py --config run.yaml

Reads top to bottom: options -> checks -> plan -> TrainingArguments -> model and data -> train -> save and report.
"""

import sys
from pathlib import Path

# Started as a script, this file's own folder stands first on sys.path, and its modules could shadow libraries there.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import math
import time

from dsft import ranks
from dsft.config import TrainConfig, as_dict, ignored_options, read_config
from dsft.machine import GiB, this_machine
from dsft.model import build_model
from dsft.preparation import check_run, plan_run, training_arguments
from dsft.problems import ends_with_clear_errors
from dsft.run_folder import clear_run, git_commit, last_checkpoint, versions, write_run
from dsft.samples import build_samples
from dsft.screen import say, set_up_screen
from dsft.trainer import PerplexityTrainer


@ends_with_clear_errors
def main(argv: list[str] | None = None) -> None:
    problems: list[str] = []
    config = read_config(TrainConfig, sys.argv[1:] if argv is None else argv, problems)
    set_up_screen()
    # Before any TrainingArguments: transformers would make a process group that DeepSpeed does not know of.
    ranks.start_ranks(timeout_seconds=config.training.get("ddp_timeout", 1800))
    prepared = check_run(config, ranks.world_size(), problems)
    ranks.raise_together(problems)

    machine = this_machine(nodes=ranks.world_size() // ranks.ranks_per_node(), ranks_per_node=ranks.ranks_per_node())
    plan, deepspeed_config = plan_run(config, prepared, machine)
    for note in ignored_options(config):
        say(f"note: {note}")
    say(f"plan: {machine}; {prepared.size.num_params / 1e6:,.1f} M parameters, {prepared.size.num_trainable / 1e6:,.1f} M trained, {config.dtype}")
    say(f"plan: {plan.reason} About {plan.device_bytes / GiB:.1f} GiB per rank.")

    samples = build_samples(prepared.rows, config, prepared.tokenizer, key="data")
    held_out = build_samples(prepared.held_out_rows, config, prepared.tokenizer, key="eval_data") if prepared.held_out_rows is not None else None
    say(f"data: {samples.data_format}, {samples.counts}" + (f"; held out: {held_out.counts}" if held_out else ""))

    args = training_arguments(config, plan, deepspeed_config, has_held_out=held_out is not None)
    checkpoint = last_checkpoint(config)
    if ranks.rank() == 0:
        if config.overwrite and checkpoint is None:
            clear_run(args.output_dir)
        write_run(args.output_dir, config=as_dict(config), plan=plan.__dict__, machine=str(machine), deepspeed=deepspeed_config,
                  versions=versions(), git_commit=git_commit(), world_size=ranks.world_size(), data=samples.counts,
                  held_out=held_out and held_out.counts, status="running")
    model = build_model(config, dtype=config.dtype, seed=args.seed)
    trainer = PerplexityTrainer(model, args, tokenizer=prepared.tokenizer, train=samples.sequences, held_out=held_out and held_out.sequences)

    start = time.time()
    if checkpoint:
        say(f"resuming from {checkpoint}")
    output = trainer.train(resume_from_checkpoint=checkpoint)
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    if held_out and (not evaluations or evaluations[-1]["step"] != trainer.state.global_step or args.load_best_model_at_end):
        trainer.evaluate()
        evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    final = trainer.save_final()
    if trainer.is_world_process_zero():
        results = {
            "steps": trainer.state.global_step,
            "train_loss": output.training_loss,
            "tokens_seen": trainer.state.num_input_tokens_seen,
            "seconds": time.time() - start,
            "best_checkpoint": trainer.state.best_model_checkpoint,
            "final_model": str(final),
            "log": trainer.state.log_history,
        }
        if evaluations:
            results["eval_loss"] = evaluations[-1]["eval_loss"]
            results["eval_perplexity"] = evaluations[-1]["eval_perplexity"]
        speeds = [entry["train_tokens_per_second"] for entry in trainer.state.log_history if "train_tokens_per_second" in entry]
        results["tokens_per_second"] = speeds[-1] if speeds else math.nan
        results |= {key: value for key, value in trainer.state.log_history[-1].items() if key.startswith("peak_")}
        write_run(args.output_dir, results=results, status="done")
        say(f"done: {final}; results in {args.output_dir}/run.json")
    ranks.stop_ranks()


if __name__ == "__main__":
    main()
