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

import functools
import time

from dsft.checkpoints.identity import check_identity
from dsft.checkpoints.manifest import checkpoints
from dsft.checkpoints.model_card import CARD, model_card
from dsft.checkpoints.reshard import topology_change
from dsft.checkpoints.run_folder import clear_run, is_finished, last_checkpoint, read_run, start_from_weights, write_run
from dsft.config.options import TrainConfig, as_dict
from dsft.config.reader import read_config
from dsft.data.sequences import shown
from dsft.data.training_data import load_training_data, try_packing
from dsft.errors import Requeue, TrainingStopped, Unsaved, ends_with_clear_errors
from dsft.models.build import build_model
from dsft.planner.plan import as_dict as plan_as_dict
from dsft.run_setup.preparation import (
    check_run,
    ignored_options,
    keep_global_batch,
    plan_run,
    smaller_plan,
    training_arguments,
)
from dsft.runtime import distributed, preemption
from dsft.runtime.console import say, set_up_screen
from dsft.runtime.launcher_env import map_launcher_variables
from dsft.runtime.rank_logs import log_to_files
from dsft.runtime.versions import git_commit, versions
from dsft.training.out_of_memory import out_of_memory_explained
from dsft.training.trainer import PerplexityTrainer
from dsft.units import GiB, plural


@ends_with_clear_errors
def main(argv: list[str] | None = None) -> None:
    map_launcher_variables()  # first: from here on RANK says who prints
    problems: list[str] = []
    config = read_config(TrainConfig, sys.argv[1:] if argv is None else argv, problems)
    set_up_screen()
    # Before any TrainingArguments: transformers would make a process group that DeepSpeed does not know of.
    preemption.listen()
    distributed.start_ranks(
        timeouts=config,
        timeout_seconds=config.training.get("ddp_timeout", max(1800, config.load_timeout, config.save_timeout)),
    )
    finetune(config, problems)
    distributed.stop_ranks()


def finetune(config: TrainConfig, problems: list[str] | None = None) -> PerplexityTrainer | None:  # noqa: C901
    """The whole run, from checks to the saved model and run.json; None where nothing was left to train. Collective:
    every rank calls it, after `distributed.start_ranks()`.

    Raises:
        UserError: with `problems` and all others that can be found before weights load, on every rank.
        TrainingStopped: where the loss is NaN or infinite.
    """
    problems = [] if problems is None else problems
    prepared = check_run(config, distributed.world_size(), problems)
    distributed.raise_together(problems)
    checkpoint = distributed.on_rank_0(lambda: last_checkpoint(config))
    if checkpoint and config.resume_weights_only:
        start_from_weights(config, checkpoint)
        checkpoint = None
    if checkpoint:
        keep_global_batch(config, checkpoint, distributed.world_size())
    output_dir = config.training["output_dir"]
    if checkpoint and is_finished(checkpoint, config.training):
        say(f"nothing left to train: {checkpoint} is the end of this run; raise max_steps or num_train_epochs to go on")
        return None

    log_to_files(output_dir, append=checkpoint is not None)
    packing = distributed.on_rank_0(lambda: try_packing(config)) if config.packing else None
    if packing:
        config.packing, config.attn_implementation = packing.problem is None, packing.attn_implementation
    machine = distributed.smallest_machine()
    plan, why = distributed.on_rank_0(lambda: plan_run(config, prepared, machine, checkpoint=checkpoint))
    say(
        f"plan: {machine}; {prepared.size.num_params:,} parameters, {prepared.size.num_trainable:,} trained,"
        f" {config.dtype}"
    )
    say(f"plan: {why}")
    say(
        f"plan: peaks predicted: {plan.device_bytes / GiB:.1f} GiB per {'GPU' if machine.has_gpu else 'rank'},"
        f" {plan.host_bytes / GiB:.1f} GiB host memory per node; {plan.time.step_seconds:.3g} s per step"
    )
    if packing and packing.problem:
        say(
            "note: packing is left out, sequences are padded instead: samples in one row cannot be kept apart in this"
            f" model, {packing.problem}"
        )
    for note in ignored_options(config, plan.deepspeed_config, prepared.size):
        say(f"note: {note}")

    data = load_training_data(
        config,
        prepared.data,
        prepared.held_out,
        prepared.tokenizer,
        pack=config.packing,
        flash=config.packing and packing.flash,
    )
    args = training_arguments(config, plan, has_held_out=data.held_out is not None)
    data.count_padding(args, distributed.world_size())
    say(
        f"data: {', '.join(map(str, prepared.data))}: {shown(data.counts)}"
        + (f"; held out: {shown(data.held_out_counts)}" if data.held_out else "")
    )
    for note in data.notes:
        say(f"note: {note}")

    memory_explained = functools.partial(
        out_of_memory_explained, plan, machine, lambda: smaller_plan(config, prepared, machine, plan)
    )
    with memory_explained("while loading"):
        model = build_model(config, dtype=config.dtype, seed=args.seed)
    trainer = PerplexityTrainer(
        model, args, tokenizer=prepared.tokenizer, data=data, plan=plan, save_minutes=config.save_minutes
    )

    if checkpoint:
        distributed.on_rank_0(lambda: check_identity(checkpoint, trainer.run_identity))
    # Only now, when nothing of the set-up can fail any more, is an earlier run replaced.
    if distributed.rank() == 0:
        if config.overwrite and checkpoint is None:
            clear_run(output_dir)
        write_run(
            output_dir,
            config=as_dict(config),
            plan=plan_as_dict(plan) | {"reason": why},
            machine=str(machine),
            deepspeed=plan.deepspeed_config,
            versions=versions(),
            git_commit=git_commit(),
            world_size=distributed.world_size(),
            data=data.counts,
            held_out=data.held_out_counts,
            status="running",
        )
    distributed.wait_for_all()
    if checkpoint:
        change = topology_change(checkpoint, trainer.topology)
        say(
            f"resuming from {checkpoint}"
            + (
                f"; its shards are laid out anew ({change}): dropout draws other numbers than it would have"
                if change
                else ""
            )
        )
    elif config.training.get("resume_from_checkpoint"):
        say(f"no complete checkpoint in {output_dir}; starting anew")
    start = time.perf_counter()
    try:
        with preemption.sigterm_saves(), memory_explained("in training"):
            output = trainer.train(resume_from_checkpoint=checkpoint)
    except TrainingStopped as error:
        if distributed.rank() == 0:
            write_run(output_dir, status="stopped", error=str(error), results=trainer.results())
        raise
    if trainer.is_stopping:
        if distributed.rank() == 0:
            write_run(output_dir, status="preempted", results=trainer.results())
        distributed.wait_for_all()  # the first rank that ends has the others killed
        saved = checkpoints(output_dir)
        kept = (
            f"{saved[-1]} is saved; the same command goes on from there with --resume_from_checkpoint auto"
            if saved
            else f"nothing could be saved ({trainer.saves.failed[-1:]})"
        )
        raise Requeue(f"asked to stop (SIGUSR1, SIGTERM) after step {trainer.state.global_step}: {kept}")
    if data.held_out and (
        args.load_best_model_at_end or trainer.last_evaluation()["step"] != trainer.state.global_step
    ):
        trainer.evaluate()
    final = trainer.save_final()
    seconds = time.perf_counter() - start
    if trainer.saves.number:
        say(
            f"{plural(trainer.saves.number, 'checkpoint')} saved in {trainer.saves.seconds:.3g}"
            f" s, {trainer.saves.seconds / seconds:.1%} of the run; the largest is"
            f" {trainer.saves.largest_bytes / 1e9:.3g} GB"
        )
    if distributed.rank() == 0:
        results = {"train_loss": output.training_loss, "seconds": seconds, "final_model": str(final)}
        results |= trainer.results()
        write_run(output_dir, results=results, status="done", data=data.counts)  # of a stream they are known only now
        (final / CARD).write_text(
            model_card(read_run(output_dir), data=shown(data.counts), held_out=shown(data.held_out_counts or {})),
            encoding="utf-8",
        )
        say(f"done: {final}; results in {output_dir}/run.json")
    if trainer.saves.failed:
        raise Unsaved(
            f"{final} is written, but {len(trainer.saves.failed)} times a checkpoint was not: {trainer.saves.failed[0]}"
        )
    return trainer


if __name__ == "__main__":
    main()
