"""Finds what is wrong with an evaluation before weights load: its options, models, data sets, and their fit."""

import re
from dataclasses import replace
from pathlib import Path

from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dsft.checkpoints.run_folder import FINAL, damage, is_run
from dsft.config.deepspeed import get_value, read_sound_file, stage
from dsft.config.options import UNQUANTISED, EvalConfig, TrainConfig, common_options
from dsft.data.formats import FormattedSource
from dsft.data.sources import HeldOut
from dsft.data.training_data import check_sources, notes_on_unread
from dsft.errors import UserError, raise_if_any
from dsft.models.build import DTYPES, Candidate, check_weights, resolve_dtype
from dsft.models.measure import check_positions, check_sharding, measure_model
from dsft.models.model_folder import (
    adapter_base,
    base_revision,
    described_in,
    has_only_shards,
    is_bare_config,
    with_bases,
)
from dsft.models.package import FORMATS, format_problems
from dsft.models.probes import architecture_problems
from dsft.models.tokenizer import check_tokenizer
from dsft.runtime import distributed
from dsft.runtime.console import say
from dsft.runtime.disk import check_writable
from dsft.runtime.distributed import require_same_start


def check_evaluation(
    config: EvalConfig, problems: list[str]
) -> tuple[list[Candidate], Candidate | None, dict[str, FormattedSource]]:
    """Returns the models in each of their formats, the reference, and the data sets. Collective. Raises UserError on
    every rank with all problems, those of reading the options among them.
    """
    if config.run:
        distributed.raise_together(problems)  # without the run nothing else can be checked
    require_same_start(common_options(config), problems)
    unset_hf_deepspeed_config()  # of a training earlier in this process: models are measured on the meta device
    if config.output_dir:
        check_writable(config.output_dir, problems)
    if config.zero not in ("auto", "0"):
        zero_file = read_sound_file(config.zero, problems)
        if zero_file and stage(zero_file) != 3:
            problems.append(
                f"zero={config.zero}: evaluation needs a full model per rank (0) or shards of stage 3, not of stage"
                f" {stage(zero_file)}"
            )
        if get_value(zero_file, "zero_optimization.offload_param.device") == "nvme":
            problems.append(f"zero={config.zero}: evaluation does not offload to NVMe; use 3-offload")

    models = [candidate_of(config, name, problems) for name in config.model]
    candidates = []
    for model in models:
        candidates += in_formats(model, config.quantization, problems)
    reference = None
    if config.reference:
        reference = candidate_of(config, config.reference, problems, key="reference")
        in_formats(reference, [], problems)

    share = None
    if config.eval_fraction:
        share = HeldOut(fraction=config.eval_fraction, seed=config.data_seed, wanted=True)
    data_sets = {}
    for source in config.data:
        for model in models:  # with the tokenizer of each
            for data in check_sources([source], config, model.tokenizer, key="data", problems=problems):
                data_sets[source] = replace(data, held_out=share)
    distributed.raise_together([*dict.fromkeys(problems)])
    for each in candidates:
        if left := each.facts.size.plain_expert_params:
            say(f"note: {each.name}: {left:,} parameters of experts are not quantised, since only linear layers are")
    for note in notes_on_unread(data_sets.values()):
        say(f"note: {note}")

    for model in models if reference else []:  # whether the KL of the two can be taken
        same_size = model.facts.size.vocab_size == reference.facts.size.vocab_size
        if not same_size or reference.tokenizer.get_vocab() != model.tokenizer.get_vocab():
            problems.append(
                f"reference={reference.config.model}: predicts other tokens than {model.config.model}, and KL needs the"
                " same: if both were trained with one tokenizer, set tokenizer; else evaluate each, and compare their"
                " bits per byte with dsft compare"
            )
    distributed.raise_together(problems)
    for model in models:
        if on_disk := model.facts.size.quantization:
            say(f"note: {model.config.model} is quantised on disk ({on_disk.format}) and evaluated in it")
    return candidates, reference, data_sets


def candidate_of(config: EvalConfig, model: str, problems: list[str], *, key: str = "model") -> Candidate:
    """Finds what `model` means (of a run's folder its final model) and measures it; messages name the option `key`."""
    faults = []
    path = str(Path(model) / FINAL) if is_run(model) else model
    config = replace(config, model=path)
    folder = config.model if is_bare_config(config.model) else described_in(config.model)
    facts = tokenizer = None
    try:
        for each in with_bases(config.model):
            raise_if_any([f"model={each}: {error}; it is damaged, use another" for error in damage(each)])
        if base := adapter_base(folder):
            config = replace(config, revision=config.revision or base_revision(folder))
        options = {name: getattr(config, name) for name in ("revision", "trust_remote_code", "attn_implementation")}
        facts = measure_model(
            TrainConfig(model=base or folder, **options),
            scored=True,
            adapter=folder if base else None,
        )
    except UserError as error:
        faults += error.problems
    if facts:
        if config.has_seq_len or not config.protocol:  # a protocol's own length is at most the model's positions
            faults += check_positions(facts, seq_len=config.seq_len, model=config.model)
        faults += architecture_problems(config.model, facts.config, trust_remote_code=config.trust_remote_code)
    if facts or config.tokenizer:
        tokenizer = check_tokenizer(config, faults, vocab_size=facts and facts.size.vocab_size)
    candidate = Candidate(config=config, tokenizer=tokenizer, facts=facts)
    faults += check_weights(config, facts, local=True) if facts else []
    problems += [re.sub("^model(?==)", key, line) for line in faults]
    return candidate


def in_formats(candidate: Candidate, formats: list[str], problems: list[str]) -> list[Candidate]:
    """Returns the candidate in each format of the option `quantization`; alone if it is quantised on disk."""
    if candidate.facts is None:
        return [candidate]
    config = candidate.config
    model = candidate.config.model
    size = candidate.facts.size
    if size.quantization or not formats:
        formats = [UNQUANTISED]  # as it is on disk
    candidates = []
    for name in formats:
        quantization = size.quantization if name == UNQUANTISED else FORMATS[name]
        if name in FORMATS and (is_bare_config(model) or has_only_shards(model)):
            problems.append(
                f"quantization={name}: weights are quantised while they load from the files of a model, and {model} has"
                " none; name a folder or hub id (dsft export makes one of a checkpoint)"
            )
        facts = replace(candidate.facts, size=replace(size, quantization=quantization))
        stage_asked = 0 if config.zero in ("auto", "0") else 3
        problems += check_sharding(facts.size, stage=stage_asked, model=model)
        candidates.append(replace(candidate, facts=facts))
        if quantization:
            dtype = DTYPES[resolve_dtype(config.dtype)]
            problems += format_problems(model, facts.config, quantization, dtype=dtype)
    return candidates
