"""A finetuning on every rank: options -> decided run -> data -> trainer -> fit -> final model and card."""

import atexit
import contextlib
import dataclasses
import functools
import os
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dsft.checkpoints.manifest import MANIFEST, checkpoints
from dsft.checkpoints.resume import check_identity, earlier_values, topology_change
from dsft.checkpoints.run_folder import (
    CARD,
    FINAL,
    RUN,
    clear_run,
    known_run,
    last_checkpoint,
    model_card,
    read_run,
    write_run,
)
from dsft.checkpoints.save import changed_files, verify_weights
from dsft.config.options import TrainConfig, as_dict, common_options
from dsft.data.epoch import describe_counts
from dsft.data.formats import Chat
from dsft.data.tokens import stop_tokens
from dsft.data.training_data import TrainingData, load_training_data
from dsft.errors import Requeue, TrainingStopped, Unsaved, UserError, one_line
from dsft.job import beat as watchdog
from dsft.job.beat import is_consequence, record_failure
from dsft.models.adapters import unwrapped
from dsft.models.build import build_model
from dsft.models.chunked_head import tile_loss
from dsft.models.package import unreached
from dsft.models.sequence_parallel import team_of
from dsft.models.tokenizer import check_ids, stop_at
from dsft.models.weight_files import WEIGHT_ENDINGS, model_identity, safe_unpickling
from dsft.planner.choose import as_dict as plan_as_dict
from dsft.planner.choose import plan_flags
from dsft.runtime import distributed
from dsft.runtime.console import log_to_files, say
from dsft.runtime.distributed import only_run_in, require_same_start
from dsft.runtime.hardware import (
    memory_errors_explained,
    peak_memory_bytes,
    reset_peaks,
    wait_for_freed_gpu,
)
from dsft.runtime.launcher_env import OPTIONS_FILE, launchers_of
from dsft.runtime.software import git_commit, versions
from dsft.setup.arguments import training_arguments, with_defaults
from dsft.setup.decide import TrainingRun, resolve_run, smaller_plan
from dsft.training.trainer import PerplexityTrainer
from dsft.units import Batch, GiB, plural


def finetune(options: TrainConfig, problems: Sequence[str] = ()) -> PerplexityTrainer | None:
    """Trains; returns None if the run is complete already. Collective, after `distributed.start_ranks()`.

    Raises:
        UserError: on every rank, with `problems` and all others that can be found before weights load.
        TrainingStopped: the loss is NaN or infinite, or a stop was asked for.
        Unsaved: the final model or a checkpoint could not be saved.
    """
    output_dir = options.training.get("output_dir")
    with safe_unpickling(trust=options.trust_checkpoint), only_run_in(output_dir):
        reset_peaks()
        require_same_start(common_options(options), list(problems))
        if output_dir and known_run(output_dir).get("status") == "running":  # it was killed
            wait_for_freed_gpu()
        watchdog.set_phase("loading")
        say(f"{plural(distributed.world_size(), 'rank')} connected; checking options, data and model")
        run = resolve_run(options, machine=distributed.smallest_machine(), problems=problems)
        if run is None:
            return None
        try:
            return _trained(run)
        finally:
            # The returned trainer keeps it alive, and `from_pretrained` would continue to shard.
            unset_hf_deepspeed_config()


def _trained(run: TrainingRun) -> PerplexityTrainer:
    log_to_files(run.output_dir, append=run.checkpoint is not None)
    size = run.model.size
    say(f"plan: {run.machine}; {size.num_params:,} parameters, {size.num_trainable:,} trained, {run.options.dtype}")
    say(f"plan for rows of {run.options.seq_len:,} tokens: {run.reason}")
    for note in run.notes:
        say(f"note: {note}")
    watchdog.progress.timeouts = run.options  # a run that is planned may need longer steps
    verifies = run.options.verify_resume
    with recorded(run):
        if verifies:
            run = with_verified_checkpoint(run)
        team = team_of(run.options.sequence_parallel)
        with out_of_memory_explained(run, "while reading the data"):
            data = load_training_data(
                run.options,
                run.data,
                run.held_out,
                run.tokenizer,
                flash=run.options.packing and "flash" in run.model.attn_implementation,
                masked=run.masked,
                place=team.position()[1],
                shared_by=team.size,
            )
        for sequences in filter(None, (data.items, data.held_out)):
            for store in sequences.stores:
                check_ids(store.tokens, run.tokenizer, size.vocab_size)
        for name in (run.options.model, run.options.adapter):
            if name and verifies:
                verify_weights(name)
        with out_of_memory_explained(run, "while loading"):
            trainer = build_trainer(run, data)
        if run.checkpoint:
            distributed.on_rank_0(lambda: check_identity(run.checkpoint, trainer.run_identity))
    start = time.perf_counter()
    with recorded(run, trainer), out_of_memory_explained(run, "in training"):
        fit(trainer)
        finish(trainer, start=start)
    return trainer


def build_trainer(run: TrainingRun, data: TrainingData) -> PerplexityTrainer:
    """Loads the model and makes the trainer; prints what was changed in model and data."""
    options = run.options
    args = training_arguments(options, run.plan)  # before the model: ZeRO-3 shards while loading
    batch = Batch(
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.world_size,
        options.sequence_parallel,
    )
    if args.dataloader_drop_last:
        data.require_a_full_step(batch)
    held_out = f"; held out: {describe_counts(data.held_out_counts)}" if data.held_out else ""
    say(f"data: {', '.join(map(str, run.data))}: {describe_counts(data.counts)}{held_out}")
    for note in data.notes:
        say(f"note: {note}")
    model = build_model(options, dtype=options.dtype, seed=args.seed, new_tokens=run.new_tokens)
    if run.new_tokens:
        names = ", ".join(run.tokenizer.convert_ids_to_tokens(run.new_tokens))
        say(f"model: {plural(len(run.new_tokens), 'new token')} ({names}); {run.model.size.vocab_size:,} rows")
    has_chats = any(each.rules.form is Chat for each in run.data)
    added = stop_at(model, stop_tokens(run.tokenizer) if has_chats else [])
    if added:
        tokens = ", ".join(run.tokenizer.convert_ids_to_tokens(added))
        say(
            f"note: trained answers end with {tokens}, which the model's generation_config did not stop at; final/ does"
        )
    if options.tiled_loss and not tile_loss(model):
        raise AssertionError(f"the trial of tiled_loss found what {type(model).__name__} has not")
    frozen = run.model.size.other_params
    if frozen:
        names = ", ".join(name.removesuffix(".") for name in unreached(unwrapped(model)))
        say(f"model: {frozen:,} parameters are frozen, since no text reaches them: {names}")

    def frozen_weights():
        if all(parameter.requires_grad for parameter in model.parameters()):
            return None
        identity = model_identity(options.model, revision=options.revision, seed=args.seed, endings=WEIGHT_ENDINGS)
        content = identity["content"][:16]
        if options.method != "full" and (options.trainable or options.frozen):
            return f"{content} seed {args.seed}"  # frozen adapters keep their random values
        return content

    return PerplexityTrainer(
        model,
        args,
        run=run,
        data=data,
        sequences_per_step=batch.sequences,
        frozen_weights=distributed.on_rank_0(frozen_weights),
    )


def with_verified_checkpoint(run: TrainingRun) -> TrainingRun:
    """Returns the run with a checkpoint whose files are unchanged, with `auto` perhaps an older one. Collective. Raises
    UserError if there is none.
    """
    is_auto = run.options.training.get("resume_from_checkpoint") == "auto"
    while True:
        errors = changed_files(run.checkpoint) if run.checkpoint else []
        if not errors:
            return run
        changed = "; ".join(errors[:3])
        if not is_auto:
            way_out = "use another or auto, or take it as it is with --verify_resume false"
            raise UserError([f"resume_from_checkpoint={run.checkpoint}: {changed}; {way_out}"])
        say(f"{run.checkpoint} is damaged and is skipped: {changed}")
        older = distributed.on_rank_0(functools.partial(last_checkpoint, run.options, before=run.checkpoint))
        run = dataclasses.replace(run, checkpoint=older)


@contextlib.contextmanager
def recorded(run: TrainingRun, trainer: PerplexityTrainer | None = None) -> Iterator[None]:
    """Keeps run.json's status inside a `with`: running, then stopped, preempted or failed. Collective. A run that is
    replaced or done is not changed until there is a trainer.
    """

    def begin():
        replaces_run = run.options.overwrite and run.checkpoint is None
        about_data = {}
        if trainer is not None:
            if replaces_run:
                clear_run(run.output_dir)
            data = trainer.data
            about_data = {"data": data.counts, "held_out": data.held_out_counts, "data_notes": data.notes}
            about_data["uses_chat_template"] = data.uses_chat_template
        else:
            earlier = known_run(run.output_dir)
            if earlier and (replaces_run or earlier.get("status") == "done"):
                return False
        write_run(
            run.output_dir,
            config=as_dict(run.options),
            decisions=[vars(decision) for decision in run.decisions],
            plan=plan_as_dict(run.plan) | {"reason": run.reason},
            machine=str(run.machine),
            launchers=launchers_of(os.environ),
            deepspeed=run.plan.deepspeed_config,
            versions=versions(),
            git_commit=git_commit(),
            world_size=distributed.world_size(),
            status="running",
            error=None,
            **about_data,
        )
        return True

    is_recorded = distributed.on_rank_0(begin)
    if is_recorded:
        watchdog.progress.run_file = Path(run.output_dir, RUN).resolve()
    try:
        yield
    except BaseException as error:
        if isinstance(error, Unsaved) or not isinstance(error, TrainingStopped):
            # On the rank that failed: rank 0 is about to be ended. If another rank is the cause, the thread of
            # job/beat.py records it.
            if is_recorded and not is_consequence(str(error)):
                text = f"rank {distributed.rank()} on {socket.gethostname()}: {one_line(error)}"
                record_failure(Path(run.output_dir) / RUN, text)
            raise
        outcome = {"status": "preempted"}
        if not isinstance(error, Requeue):
            outcome = {"status": "stopped", "error": str(error)}
        if distributed.rank() == 0:
            _write_results(run, trainer.results(), **outcome)
            if distributed.world_size() > 1:
                atexit._run_exitfuncs()  # os._exit skips them, and W&B's last rows would be lost
        distributed.wait_for_all()  # the exit of the first rank has the others killed
        raise


def _write_results(run: TrainingRun, results: dict[str, Any], **sections: Any) -> None:
    try:
        write_run(run.output_dir, results=results, **sections)
    except OSError as error:
        say(f"warning: {run.output_dir}/{RUN} could not be written ({error})")


def out_of_memory_explained(run: TrainingRun, when: str) -> contextlib.AbstractContextManager[None]:
    """Turns a failed allocation inside a `with` into one error: the plan, the measured peak, the next smaller plan."""

    def explanation(error, memory):
        plan = run.plan
        phase = watchdog.progress.phase
        peaks = peak_memory_bytes()
        if memory == "GPU":
            place = "GPU"
            peak_bytes = peaks["gpu"]
            predicted_bytes = plan.device_bytes
            available_bytes = run.machine.device_bytes
        else:
            place = f"rank's {memory} memory"
            peak_bytes = peaks["host"]
            predicted_bytes = plan.host_bytes / run.machine.ranks_per_node
            available_bytes = run.machine.host_bytes / run.machine.ranks_per_node
        try:
            smaller = smaller_plan(run)
        except Exception:  # there may be no memory for the search
            smaller = None
        way_out = "no smaller plan is known: use more GPUs or nodes, method lora, or a smaller seq_len"
        if smaller:
            way_out = (
                f"the next smaller plan is {smaller.label}, by prediction {smaller.device_bytes / GiB:.3g} GiB:"
                f" {plan_flags(smaller, run.job)}"
            )
        eval_batch = with_defaults(run.options)["per_device_eval_batch_size"]
        if phase == "evaluating" and eval_batch > 1:
            way_out = f"an evaluation takes less with --per_device_eval_batch_size 1, here {eval_batch}; {way_out}"
        moment = f"while {phase}" if phase in ("evaluating", "saving") else when
        return (
            f"{moment} ({one_line(error)}): the plan is {plan.label}; of this {place}"
            f" {predicted_bytes / GiB:.3g} GiB were predicted, the peak was {peak_bytes / GiB:.3g} GiB and"
            f" {available_bytes / GiB:.3g} GiB are available; {way_out}"
        )

    return memory_errors_explained(explanation)


def fit(trainer: PerplexityTrainer) -> None:
    """Trains. Collective. Raises Requeue on every rank if one was asked to stop, after a save."""
    run = trainer.run
    if run.checkpoint:
        change = topology_change(run.checkpoint, trainer.topology)
        resharded = f"; resharded ({change}): dropout draws other numbers than it would have"
        say(f"resuming from {run.checkpoint}{resharded if change else ''}")
        earlier = earlier_values(run.checkpoint, "options", trainer.taken_options)
        if earlier:
            changed = [f"{name} {trainer.taken_options[name]} ({value} before)" for name, value in earlier.items()]
            say(f"note: the resume takes {', '.join(changed)}; weights, moments, step and place in the data are kept")
    elif run.options.training.get("resume_from_checkpoint"):
        say(f"no complete checkpoint in {run.output_dir}; starting from scratch")
    if trainer.args.torch_compile:
        watchdog.set_phase("compiling")  # the first step; later ones have a longer step_timeout
    with distributed.signals_save():
        trainer.train(resume_from_checkpoint=run.checkpoint)
    if not trainer.is_stopping:
        return
    saved = checkpoints(run.output_dir)
    stopped = f"asked to stop (Ctrl-C or a signal) after step {trainer.state.global_step}"
    if not saved:
        raise Requeue(f"{stopped}: nothing was saved")
    options_file = Path(run.output_dir) / OPTIONS_FILE
    resume = "the same command with --resume_from_checkpoint auto"
    if options_file.is_file():
        resume = shlex.join(["dsft", "train", "--config", str(options_file), "--resume_from_checkpoint", "auto"])
    raise Requeue(f"{stopped}: {saved[-1]} is saved; to resume:\n{resume}")


def push_final(training: Mapping[str, Any], final: Path) -> None:
    """Uploads `final/` with its card, and nothing else, to the hub."""
    hub = HfApi(token=training.get("hub_token"))
    name = training.get("hub_model_id") or final.parent.resolve().name
    repository = hub.create_repo(name, private=training.get("hub_private_repo"), exist_ok=True)
    hub.upload_folder(
        repo_id=repository.repo_id,
        folder_path=final,
        revision=training.get("hub_revision"),
        ignore_patterns=[MANIFEST, "training_args.bin"],  # of this machine
    )
    say(f"uploaded {final} to {repository.repo_id}")


def finish(trainer: PerplexityTrainer, *, start: float) -> None:
    """Saves the final model with its card, and completes run.json. Collective. Raises Unsaved."""
    run = trainer.run
    data = trainer.data
    try:
        final = trainer.save_final()
    except Unsaved as error:
        saved = checkpoints(run.output_dir)
        if not saved:
            raise
        command = shlex.join(["dsft", "export", str(saved[-1]), f"{run.output_dir}/{FINAL}"])
        raise Unsaved(f"{error}. Once there is room, make it of the last checkpoint: {command}") from None
    seconds = time.perf_counter() - start
    if distributed.rank() == 0:
        results = {"train_loss": trainer.train_loss, "seconds": seconds, "final_model": str(final)}
        _write_results(run, results | trainer.results(), status="done")
        card = model_card(
            read_run(run.output_dir),
            data=describe_counts(data.counts),
            held_out=describe_counts(data.held_out_counts or {}),
        )
        (final / CARD).write_text(card, encoding="utf-8")
        if run.options.training.get("push_to_hub"):
            push_final(run.options.training, final)
        say(f"done: {final}; results in {run.output_dir}/run.json. Next:")
        commands = [["report", run.output_dir]]
        if run.tokenizer.chat_template:
            commands.append(["chat", run.output_dir])
        if run.options.method != "full":
            commands.append(["merge", run.output_dir, f"{run.output_dir}-merged"])
        elif data.held_out:
            commands.append(["eval", "--run", run.output_dir])
        for words in commands:
            say(f"  {shlex.join(['dsft', *words])}")
