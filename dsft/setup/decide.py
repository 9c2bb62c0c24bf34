"""From options and machine to a decided and planned run. One pipeline for all callers, which loads no weights:

    run = resolve_run(options, machine=smallest_machine())    # a training, on all of its ranks
    run = resolve_offline(options, machine)                   # what it would decide on a machine: plan, doctor, api

`check_run` -> `decide_run` -> `plan_run`. So a plan is that of the training, and is refused if the training is.
"""

import contextlib
import copy
import dataclasses
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils.import_utils import is_torch_tf32_available

from dsft.checkpoints import run_folder
from dsft.checkpoints.manifest import MANIFEST, SEAL, checkpoints, clean_up, read_manifest, read_trainer_state, sealed
from dsft.checkpoints.resume import TRAINED_ELEMENTS, check_identity
from dsft.config import user_code
from dsft.config.deepspeed import (
    DeepSpeedJson,
    adopt,
    follow_options,
    get_value,
    read_sound_file,
    read_zero_file,
    stage,
)
from dsft.config.options import (
    EVALUATES,
    LEARNING_RATES,
    Decision,
    TrainConfig,
    common_options,
    decide,
    shuffle_seed,
)
from dsft.config.reader import NOT_NEEDED
from dsft.data.formats import FormattedSource
from dsft.data.training_data import check_prompts, check_sources
from dsft.errors import UserError, raise_if_any, without_second_errors
from dsft.models.adapters import ALL_LINEAR, MAMBA_TYPES, learning_rates
from dsft.models.build import DTYPES, check_weights, resolve_dtype
from dsft.models.chunked_head import own_loss_problems
from dsft.models.measure import USUAL_MODELS, ModelFacts, check_positions, check_sharding, measure_model, usual_config
from dsft.models.model_folder import is_bare_config, step_folder
from dsft.models.package import format_problems
from dsft.models.probes import (
    KERNELS,
    architecture_problems,
    attention_like_eager,
    length_limits,
    try_packing,
)
from dsft.models.sequence_parallel import failed_trial, refused_model
from dsft.models.tokenizer import NO_ANSWERS, add_tokens, check_tokenizer, ids_beyond, save_problems
from dsft.models.weight_files import safe_unpickling
from dsft.planner.activations import attention_of
from dsft.planner.choose import NAMES, Plan, all_plans, best_of_each, choose, reason, unmodelled, wants_fp32_sums
from dsft.planner.memory import DEFAULT_OPTIMIZER, Job, sums_in_fp32
from dsft.planner.speed import CARDS, card_of
from dsft.runtime import distributed
from dsft.runtime.console import say
from dsft.runtime.disk import in_use, is_held
from dsft.runtime.distributed import SAME_FILES, SAME_OPTIONS, ranks_per_node, require_agreement
from dsft.runtime.hardware import Machine, has_gpu, this_machine
from dsft.runtime.software import optimizer_problems
from dsft.setup import arguments

NOT_SPREAD = {
    "torch_compile": "a compiled model has its attention fixed, and ranks exchange positions there",
    "use_liger_kernel": "its loss and rotations are not tried over shares of rows; tiled_loss spares logits too",
    "neftune_noise_alpha": "its noise is scaled by the length of a row, of which each rank sees a part",
}
"""Options that cannot be combined with sequence_parallel -> why."""


@dataclass(kw_only=True)
class TrainingRun:
    """A training on its way from options to a plan; what is resolved is the same on all ranks."""

    options: TrainConfig
    """With every decision so far; the given options are not changed."""
    machine: Machine
    decisions: list[Decision] = field(default_factory=list)
    """Each option that was decided for the user, with its reason, in order."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """For the user: options without effect, packing that is not possible, what a plan assumes."""

    # Set by `check_run`, from the options and the files that they name.
    model: ModelFacts | None = None
    """None if the model cannot be measured, which is one of the problems."""
    tokenizer: PreTrainedTokenizerBase | None = None
    data: list[FormattedSource] = field(default_factory=list)
    """Empty if none is named, or if a plan cannot read it."""
    held_out: list[FormattedSource] = field(default_factory=list)
    zero_file: DeepSpeedJson | None = None
    """The content of an explicit `zero`; None with auto."""
    new_tokens: Sequence[int] = ()
    """Ids of the tokens that `add_tokens` added to the tokenizer, and that the model has no rows for."""

    # Set by `decide_run` after trials with a small model, like packing, attention and loss of `options` and `model`.
    job: Job | None = None
    """The training as the planner sees it."""
    masked: bool | None = None
    """Whether padded batches have an attention mask."""

    # Set by `resolve_run`.
    plan: Plan | None = None
    reason: str = ""
    """Why this plan was chosen."""
    disk: arguments.CheckpointSize | None = None
    """Bytes that it writes to `output_dir`."""
    checkpoint: str | None = None
    """From which the run resumes."""

    def apply(self, decisions: Sequence[Decision]) -> None:
        """Applies decisions one after the other: a later one may undo an earlier one."""
        for decision in decisions:
            if self.options.value(decision.name) != decision.value:
                self.options = decide(self.options, [decision])
                self.decisions.append(decision)

    @property
    def output_dir(self) -> str:
        return self.options.training["output_dir"]


@dataclass(frozen=True)
class Choice:
    """The chosen plan, the candidates, and the reason."""

    plan: Plan
    candidates: tuple[Plan, ...]
    """The best plan of each configuration, with and without activation checkpointing."""
    reason: str
    """Sentences: why this plan, what it does not model, in what type gradients are accumulated."""

    def __repr__(self) -> str:  # of a notebook
        return self.reason


def resolve_run(options: TrainConfig, *, machine: Machine, problems: Sequence[str] = ()) -> TrainingRun | None:
    """Checks and decides a training; None if it is already complete. Collective. Raises UserError on every rank, with
    `problems`, of reading the options, and all others that can be found before weights load.
    """
    run = check_run(options, machine, problems)
    before = run.options
    distributed.raise_together(run.problems)
    distributed.on_rank_0(lambda: raise_if_any(arguments.check_hub(before)))
    distributed.raise_together(check_weights(before, run.model, local=False))

    # Rank 0 decides what depends on the disk or the clock.
    def resume():
        for path in clean_up(run.output_dir):
            say(f"removed {path}: an incomplete save")
        return resume_decisions(run.options, machine.world_size, run.model)

    run.checkpoint, decisions, finished = distributed.on_rank_0(resume)
    if finished:
        say(f"training is already complete at {run.checkpoint}; raise max_steps or num_train_epochs to continue")
        return None
    # Each rank has read the options, and the files that they name, by itself.
    files = {f"content of {before.zero}": run.zero_file, **user_code.digests(before)}
    if run.checkpoint:
        manifest = read_manifest(run.checkpoint)
        here = f"no {MANIFEST}" if Path(run.checkpoint).is_dir() else "no such folder"  # hosts may not share it
        files[f"{run.checkpoint} to resume from"] = sealed(manifest)[SEAL] if manifest else here
    require_agreement({SAME_OPTIONS: common_options(before), SAME_FILES: files})
    run.apply(decisions)
    options = run.options
    if options.sequence_parallel > 1:
        failed = failed_trial(
            run.model,
            size=options.sequence_parallel,
            model=options.model,
            trust_remote_code=options.trust_remote_code,
        )
        distributed.raise_together([failed] if failed else [])
    decide_run(run)
    choice = distributed.on_rank_0(lambda: plan_run(run))
    run.plan = choice.plan
    run.reason = choice.reason
    config = run.plan.deepspeed_config
    distributed.raise_together(optimizer_problems(config, has_gpu=machine.has_gpu))  # on every node
    if options.training.get("torch_compile"):
        # The others wait for a rank that compiles for new shapes of its batch.
        seconds = options.step_timeout + options.compile_timeout
        run.apply([Decision("step_timeout", seconds, "a step that compiles again takes compile_timeout longer")])
    run.disk = arguments.checkpoint_size(run.options, run.model.size, config)
    distributed.on_rank_0(lambda: raise_if_any(arguments.check_room(run.output_dir, run.disk)))
    # A float32 training uses tensor cores if the GPUs of all ranks have TF32 (since Ampere).
    asks = run.options.dtype == "float32" and machine.has_gpu and "tf32" not in run.options.training
    if asks and all(distributed.from_all([is_torch_tf32_available()])):
        why = "faster: products of training keep 10 of 23 bits, evaluations keep all"
        run.apply([Decision("tf32", True, why)])
        run.notes.append(f"tf32: {why}; tf32=false leaves it off")
    run.notes += arguments.ignored_options(run.options, config, run.model.size)
    return run


def resolve_offline(
    options: TrainConfig,
    machine: Machine,
    *,
    scored: bool = False,
    problems: Sequence[str] = (),
) -> TrainingRun:
    """Decides what a training with these options would decide on a machine that need not exist, without its folder, the
    weights, and a checkpoint to resume from. Raises UserError with all problems, as a training would.
    """
    problems = [problem for problem in problems if not problem.startswith(NOT_NEEDED)]
    run = check_run(options, machine, problems, starts=False, scored=scored)
    raise_if_any(run.problems)
    decide_run(run)
    on_paper = machine.has_gpu and not machine.measured and run.job.dtype != "float32"
    has_flex = getattr(run.model.architecture, "_supports_flex_attn", False)
    if run.job.attention == "eager" and not options.attn_implementation and has_flex and on_paper:
        run.job = dataclasses.replace(run.job, attention="flash")
        run.notes.append(
            f"attention: planned as flex_attention on the GPU, since {run.model.size.model_type} has no sdpa"
        )
    return run


def decide_run(run: TrainingRun) -> None:
    """Decides packing, masks and the tiled loss, and makes the planner's job. Collective."""
    options = run.options
    model = run.model
    kernel = None
    trial = {"dtype": options.dtype, "trust_remote_code": options.trust_remote_code}
    if options.sequence_parallel > 1:  # Ulysses replaces the mask of flex attention by a causal one
        trial["kernels"] = KERNELS[:1]
    if options.packing:
        kernel, problem = try_packing(model.config, asked=options.attn_implementation, **trial)
        limits = [limit for limit in length_limits(model.config) if limit < options.seq_len]
        if limits:
            problem = f"whose longrope treats all samples of a row as long if one has more than {limits[0]:,} tokens"
        packing = Decision("packing", problem is None, problem or "samples in one row are kept apart")
        run.apply([packing, Decision("attn_implementation", kernel, "it keeps packed samples apart")])
        if problem:
            run.notes.append(
                "packing is left out, sequences are padded instead: samples in one row cannot be kept apart in this"
                f" model, {problem}"
            )
    is_eager = model.attn_implementation == "eager" and not options.attn_implementation
    if is_eager and not run.options.packing and has_gpu():
        # Architectures without sdpa, such as gpt-oss with a sink in each head.
        kernel = attention_like_eager(model.config, **trial)
        if kernel:
            why = "eager attention would allocate a matrix of all tokens"
            run.apply([Decision("attn_implementation", kernel, why)])
        else:
            run.notes.append(
                f"{model.size.model_type} has no sdpa, and neither flash nor flex attention runs here: attention"
                " allocates a matrix of all tokens; pip install kernels, and triton"
            )
    run.model = model = dataclasses.replace(model, attn_implementation=kernel or model.attn_implementation)
    # Padding on the right changes nothing in a causal model except the auxiliary loss of a router.
    has_router_loss = getattr(model.config.get_text_config(), "output_router_logits", False)
    run.masked = run.options.packing or bool(has_router_loss)
    tiling = distributed.on_rank_0(lambda: arguments.tiled_loss_decision(run.options, model))
    if options.tiled_loss is True and not tiling.value:
        run.notes.append(f"tiled_loss: ignored, {tiling.reason}")
    run.apply([tiling])
    run.job = job_of(run.options, model, masked=run.masked)


def check_start(options: TrainConfig, problems: Sequence[str]) -> None:
    """Checks a training before its ranks start, in rank 0's environment, except for the plan and the hub. Raises
    UserError.
    """
    folder = Path(options.training.get("output_dir") or "")
    if is_held(folder):
        raise UserError(in_use(folder))
    machine = this_machine(ranks_per_node=ranks_per_node())
    with safe_unpickling(trust=options.trust_checkpoint):  # as the training reads them
        run = check_run(options, machine, problems)
        raise_if_any(run.problems)
        resume_decisions(run.options, machine.world_size, run.model)


def check_run(
    options: TrainConfig, machine: Machine, problems: Sequence[str] = (), *, starts: bool = True, scored: bool = False
) -> TrainingRun:
    """Finds every problem that shows before weights load, and decides what needs no other rank.

    Args:
        machine: to run on. Packages and disks are checked if it is this one.
        problems: of reading the options; the others are added to them.
        starts: whether a training starts now: its folder, weights and all of its data must be there.
        scored: whether the model is evaluated, not trained.
    """
    run = TrainingRun(options=options, machine=machine, problems=[*problems], notes=[*options.notes])
    _check_options(run, starts=starts)
    _check_model(run, starts=starts, scored=scored)
    _check_data(run, starts=starts)
    run.problems[len(problems) :] = without_second_errors(run.problems[len(problems) :], problems)
    return run


def _check_options(run: TrainingRun, *, starts: bool) -> None:
    """Decides zero, batches and dtype, and checks the options against each other and the machine."""
    machine = run.machine
    if starts and run.options.training.get("output_dir"):
        run_folder.check_output_dir(run.options, run.problems)
    run.apply(arguments.accelerate_decisions(run.options, os.environ, run.problems))
    if run.options.zero != "auto":  # its numbers become options
        run.zero_file = read_sound_file(run.options.zero, run.problems)
        run.apply(adopt(run.zero_file, run.options, run.problems))
    if "learning_rate" not in run.options.training and not is_bare_config(str(run.options.model)):
        rate = LEARNING_RATES[run.options.method]
        run.apply([Decision("learning_rate", rate, f"the default of method={run.options.method}")])
        run.notes.append(f"learning_rate {rate:g} is the default of method={run.options.method}")
    if run.zero_file is not None:
        run.zero_file = follow_options(run.zero_file, run.options)
        run.problems += arguments.check_zero_file(run.zero_file, run.options, machine)
        if get_value(run.zero_file, "zero_optimization.round_robin_gradients"):
            run.notes.append("zero_optimization.round_robin_gradients is turned off: checkpoints would be read wrong")
    if not any("global_batch_size" in problem for problem in run.problems):
        run.apply(arguments.batch_decisions(run.options, machine.world_size, run.problems))
    run.apply(arguments.dtype_decisions(run.options, auto_dtype(machine)))
    run.problems += user_code.problems(run.options)
    run.problems += arguments.check_machine(run.options, machine)
    for name, values in EVALUATES.items():
        if starts and run.options.training.get(name) in values and not run.options.has_held_out:
            run.problems.append(f"{name} needs held-out data; set eval_data or eval_fraction")
            break
    if not run.problems:  # transformers' own rules come last
        run.problems += arguments.check_training_arguments(run.options, here=machine.measured)


def _check_model(run: TrainingRun, *, starts: bool, scored: bool) -> None:
    options = run.options
    machine = run.machine
    if not options.model:
        return
    if starts and options.verify_resume:
        way_out = "use another, or take it as it is with --verify_resume false"
        damaged = []
        for name, source in (("model", options.model), ("adapter", options.adapter)):
            for error in run_folder.damage(source) if source else ():
                damaged.append(f"{name}={source}: {error}; {way_out}")
        if damaged:
            run.problems += damaged
            return
    if starts and options.method != "full" and is_bare_config(options.model):
        run.problems.append(
            f"method={options.method} over {options.model}: an adapter is nothing without its base, and these"
            " random weights are saved nowhere; train method full first, or save the base as a folder"
        )
    # On paper, an attention that needs a GPU package or a kernel from the hub is assumed to be available.
    attention = options.attn_implementation
    is_elsewhere = not starts and attention and ("flash" in attention or "/" in attention)
    measured = dataclasses.replace(options, attn_implementation=None) if is_elsewhere else options
    config = None
    is_usual = options.model in USUAL_MODELS and not options.revision
    if is_usual and not starts and not Path(options.model).exists():
        config = usual_config(options.model)
    try:
        if options.add_tokens:  # the model grows
            faults = []
            run.tokenizer = check_tokenizer(options, faults)
            if run.tokenizer:
                run.new_tokens = add_tokens(run.tokenizer, options.add_tokens, faults)
            raise_if_any(faults)
        run.model = measure_model(measured, scored=scored, config=config, new_tokens=run.new_tokens)
    except UserError as error:
        run.problems += error.problems
        return
    if is_elsewhere:
        run.model = dataclasses.replace(run.model, attn_implementation=attention)

    model = run.model
    size = model.size
    if size.quantization and size.quantization.lies_on_disk and machine.measured and not scored:
        dtype = DTYPES[resolve_dtype(options.dtype)]
        run.problems += format_problems(options.model, model.config, size.quantization, dtype=dtype, trained=True)
    if starts:
        run.problems += check_weights(options, model, local=True)
    run.problems += architecture_problems(options.model, model.config, trust_remote_code=options.trust_remote_code)
    if options.compute_loss and not user_code.problems(options):
        compute_loss = user_code.load("compute_loss", options.compute_loss)
        run.problems += own_loss_problems(compute_loss, size.vocab_size)
    if options.generate_samples and not model.architecture.can_generate():
        run.problems.append(f"generate_samples: {NO_ANSWERS.format(model.architecture.__name__)}; leave it out")
    adapts_all = options.method != "full" and not options.adapter and options.lora_target_modules == [ALL_LINEAR]
    if adapts_all and model.config.model_type in MAMBA_TYPES:
        run.notes.append("lora_target_modules: out_proj is not adapted, since peft refuses it in Mamba layers")
    run.problems += check_positions(model, seq_len=options.seq_len, model=options.model)
    if options.sequence_parallel > 1 and not scored:
        parallel = options.sequence_parallel
        for name, why in NOT_SPREAD.items():
            if options.training.get(name):
                run.problems.append(f"sequence_parallel={parallel} and {name} cannot be combined: {why}; keep one")
        refusal = refused_model(
            model,
            size=parallel,
            world=machine.world_size,
            model=options.model,
            seq_len=options.seq_len,
            attention=attention_of(model, seq_len=options.seq_len, masked=False),
        )
        run.problems += [refusal] if refusal else []
    if run.zero_file:  # before the plan
        run.problems += check_sharding(size, stage=stage(run.zero_file), model=options.model)


def _check_data(run: TrainingRun, *, starts: bool) -> None:
    """Reads the tokenizer and the first rows of the data, which for a plan may not exist yet."""
    model = run.model
    options = run.options
    unreadable = []
    vocab_size = model.size.vocab_size if model else None
    has_name = model or options.tokenizer  # if the model is missing, its tokenizer is not reported as well
    is_needed = starts or options.data
    if run.tokenizer and model:  # with add_tokens
        run.problems += ids_beyond(run.tokenizer, vocab_size)
    elif not run.tokenizer and has_name and is_needed:
        run.tokenizer = check_tokenizer(options, unreadable, vocab_size=vocab_size)
    has_date = run.tokenizer is not None and "strftime_now" in str(run.tokenizer.chat_template)
    if starts and has_date and not options.chat_date:
        run.apply([_first_day(options)])
        options = run.options
    run.data = check_sources(options.data, options, run.tokenizer, key="data", problems=unreadable)
    if starts:
        entries = options.held_out_entries
        run.held_out = check_sources(entries, options, run.tokenizer, key="eval_data", problems=unreadable)
        run.problems += unreadable
        if run.tokenizer:
            run.problems += save_problems(run.tokenizer)
        if model and run.tokenizer:
            run.problems += check_prompts(options, run.data, run.tokenizer, model.size)
    elif unreadable:
        run.data = []
        run.tokenizer = None
        run.notes.append(f"planned for full rows without padding, since the data cannot be read here: {unreadable[0]}")


def _first_day(options: TrainConfig) -> Decision:
    """Returns the day for the chat template: that of the resumed run, whose tokens contain it, else today."""
    day = None
    folders = [options.training.get("resume_from_checkpoint")]
    if folders == ["auto"]:
        folders = checkpoints(options.training.get("output_dir", ""))
    for folder in filter(None, folders):
        with contextlib.suppress(UserError):  # a damaged one is skipped, or refused
            day = read_manifest(folder).get("options", {}).get("chat_date")
    return Decision("chat_date", day or date.today().isoformat(), "the chat template prints the day of the first start")


def auto_dtype(machine: Machine) -> str:
    if not machine.has_gpu:
        return "float32"
    if machine.measured:
        return resolve_dtype("auto")
    return "bfloat16" if CARDS[card_of(machine)].has_bf16 else "float32"


def resume_decisions(
    options: TrainConfig, world: int, facts: ModelFacts | None = None
) -> tuple[str | None, list[Decision], bool]:
    """(checkpoint to resume from or None, decisions that follow from it, whether the run is complete). On rank 0."""
    training = options.training
    checkpoint = run_folder.last_checkpoint(options)
    if not checkpoint:
        return None, [], False
    read_trainer_state(checkpoint)
    if facts:
        now = {TRAINED_ELEMENTS: facts.size.num_trainable, "seed of the order": shuffle_seed(training)}
        check_identity(checkpoint, now)
    decisions = arguments.keep_global_batch(options, checkpoint, world)
    output_dir = training["output_dir"]
    is_done = run_folder.known_run(output_dir).get("status") == "done"  # else a final model is of an earlier end
    has_final = is_done and (Path(output_dir) / run_folder.FINAL).is_dir()
    if has_final and run_folder.is_finished(checkpoint, training, patience=options.early_stopping_patience):
        return checkpoint, decisions, True
    if step_folder(checkpoint) is None:
        raise UserError(
            f"resume_from_checkpoint={checkpoint}: contains no DeepSpeed states (it is of a plain Trainer, or of"
            f" save_only_model); {run_folder.FROM_WEIGHTS}"
        )
    return checkpoint, decisions, False


def job_of(options: TrainConfig, facts: ModelFacts, *, masked: bool) -> Job:
    """Makes the planner's job of a training whose `tiled_loss` is decided. `masked`: rows have attention masks."""
    training = options.training
    kwargs = arguments.checkpointing_kwargs(options)
    config = copy.deepcopy(facts.config)
    config.get_text_config().vocab_size = facts.size.vocab_size  # as grown by new tokens
    checkpointing = training.get("activation_checkpointing", training.get("gradient_checkpointing"))
    return Job(
        size=facts.size,
        model_config=config,
        dtype=options.dtype,
        seq_len=options.seq_len,
        attention=attention_of(facts, seq_len=options.seq_len, masked=masked),
        liger=bool(training.get("use_liger_kernel")),
        tiled_loss=options.tiled_loss,
        adapters=facts.adapters,
        trainable=tuple(options.trainable),
        frozen=tuple(options.frozen),
        micro_batch=training.get("per_device_train_batch_size"),
        # Derived from global_batch_size for each machine.
        accumulation=None if options.global_batch_size else training.get("gradient_accumulation_steps"),
        sequences_per_step=options.global_batch_size,
        sequence_parallel=options.sequence_parallel,
        checkpointing=False if checkpointing is None and options.zero != "auto" else checkpointing,
        checkpoint_every=kwargs.get("every_n_layers"),
        checkpoint_offload=kwargs.get("offload", False),
        optimizer=training.get("optim", DEFAULT_OPTIMIZER),
        fp32_accumulation=None if options.fp32_accumulation == "auto" else options.fp32_accumulation,
        bf16_states=options.states == "bfloat16",
        samples=bool(options.generate_samples),
    )


def choose_plan(
    job: Job,
    machine: Machine,
    *,
    zero: str = "auto",
    zero_file: DeepSpeedJson | None = None,
    left_out: Collection[str] = (),
) -> Choice:
    """Chooses the fastest plan that fits, with zero=auto among all candidates except `left_out`."""
    own_file = zero_file if zero.endswith(".json") else None
    plans = all_plans(job, machine, zero=zero, zero_file=own_file)
    if zero == "auto":
        plans = [plan for plan in plans if plan.zero not in left_out]
    plan = choose(plans, machine)
    notes = unmodelled(job, plan.deepspeed_config)
    is_unsaid = own_file is None and job.fp32_accumulation is None
    if is_unsaid and wants_fp32_sums(job, plan.accumulation) and not sums_in_fp32(plan.deepspeed_config):
        notes.append(f"Gradients of {plan.accumulation} micro batches are added up in bfloat16: float32 does not fit.")
    return Choice(
        plan=plan,
        candidates=tuple(best_of_each(plans, machine)),
        reason=" ".join([reason(plan, machine, zero=zero), *notes]),
    )


def plan_run(run: TrainingRun, *, must_fit: bool = True) -> Choice:
    """Chooses the plan of a decided training; if it resumes, one that can load the checkpoint. Raises UserError if this
    training cannot have it, or if it must fit and does not, with the nearest plan that fits.
    """
    options = run.options
    job = run.job
    machine = run.machine
    zero = options.zero
    if run.checkpoint and zero == "auto":
        manifest = read_manifest(run.checkpoint)
        earlier = manifest.get("zero", "")
        if earlier.endswith(".json"):  # it may have a scheduler, which nothing else compares
            raise UserError([f"resume_from_checkpoint={run.checkpoint}: its run had zero={earlier}; give that again"])
        if manifest.get("zero_stage") == 0:
            zero = "0"  # its states are not sharded
    refused = refused_candidates(run)
    choice = choose_plan(job, machine, zero=zero, zero_file=run.zero_file, left_out=refused)
    config = choice.plan.deepspeed_config
    problems = arguments.check_zero_file(config, dataclasses.replace(options, zero=choice.plan.zero), machine)
    hpz_ranks = int(get_value(config, "zero_optimization.zero_hpz_partition_size") or 1)  # DeepSpeed reads "8" too
    # groups.py, _create_zero_param_parallel_group, asserts it.
    if stage(config) == 3 and machine.world_size % min(hpz_ranks, machine.world_size):
        problems.append(
            f"zero={choice.plan.zero}: zero_hpz_partition_size={hpz_ranks} does not divide the {machine.world_size}"
            " ranks; use zero 3"
        )
    raise_if_any(problems)
    if must_fit and not choice.plan.fits and options.memory_check:
        other = choose_plan(dataclasses.replace(job, checkpointing=None), machine, left_out=refused).plan
        way_out = "use more GPUs or nodes, method lora, or a smaller per_device_train_batch_size or seq_len"
        if other.fits:
            way_out = f"{other.label} would fit"
        raise UserError([f"{choice.reason} {way_out}; memory_check=false starts it all the same"])
    return choice


def refused_candidates(run: TrainingRun) -> set[str]:
    """Returns the candidates that this training cannot have, whatever their memory."""
    refused = {"0"} if run.checkpoint else set()  # its optimizer states are not those of ZeRO's shards
    if learning_rates(run.options):  # DeepSpeed's own optimizers have one rate
        refused |= {name for name in NAMES if "optimizer" in read_zero_file(name, [])}
    return refused


def smaller_plan(run: TrainingRun) -> Plan | None:
    """Finds the fastest plan for the same steps that fits in nine tenths of the memory of the run's plan."""
    plan = run.plan
    machine = run.machine
    per_step = run.job.batch(plan.micro_batch, plan.accumulation, machine).sequences
    job = dataclasses.replace(
        run.job,
        checkpointing=None,
        checkpoint_every=run.job.checkpoint_every or 1,  # other values need long options
        micro_batch=None,
        accumulation=None,
        sequences_per_step=per_step,
    )
    limit = min(machine.device_bytes, int(0.9 * plan.device_bytes))
    smaller = dataclasses.replace(machine, device_bytes=limit)
    best = choose_plan(job, smaller, left_out=refused_candidates(run)).plan
    return best if best.device_bytes <= limit else None
