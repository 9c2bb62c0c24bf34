"""What other trainers call what dsft has: the data of `dsft convert`, of hints at unknown options, and of the table in
docs/migrating.md.

Names of TRL 1.16, axolotl 0.19, LLaMA-Factory 0.9.5, torchtune 0.6, transformers' examples and its TrainingArguments
before version 5, and the usual ones of accelerate, torchrun, Lightning, DeepSpeed, Megatron-LM and
lm-evaluation-harness. What dsft has under the same name, with another form of value, is in SAME_NAME.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Values = Mapping[str, Any]
"""Options by name: dsft's, or all that the other trainer is given."""
Becomes = Callable[[Any, Values, list[str]], Values] | Mapping[Any, Values]
"""(their value, all that is given, notes to append to) -> options of dsft; or by their value, of those that can be
translated.
"""


class CannotTrain(ValueError):
    """What a training does that dsft cannot do."""


class Elsewhere(NamedTuple):
    """Options of others for one thing."""

    names: str
    """Separated by blanks."""
    ours: str = ""
    """Options of dsft, of which a command has the first or another; none where dsft has no option for it."""
    how: str = ""
    """Where the meaning or the form of the value differs, or what takes the place of an option."""
    becomes: Becomes | None = None
    """By default the first of `ours` takes the value as it is."""
    is_refused: bool = False
    """Whether a training with it is none that dsft can do: a value that `becomes` does not translate ends the
    conversion.
    """


def _items(value: Any) -> list[Any]:
    """A list, or what is written as one text with commas; axolotl and flags also leave commas at the ends of words."""
    words = [value] if isinstance(value, str) else value
    return [item.strip() if isinstance(item, str) else item for word in words for item in _split(word) if item]


def _split(word: Any) -> list[Any]:
    return word.split(",") if isinstance(word, str) else [word]


def _per_epoch(kind: str) -> Becomes:
    """Times per epoch as a share of all steps (axolotl/utils/config/__init__.py: 1 / (times x epochs))."""

    def becomes(value: Any, given: Values, notes: list[str]) -> Values:
        times = float(value) * float(given.get("num_epochs") or 1)
        if not times:
            return {}
        if times <= 1 and float(value) < 1:  # a share of 1 or more is a number of steps
            notes.append("at most once in the whole run; here at the end of each epoch")
        if float(value) == 1 or times <= 1:
            return {f"{kind}_strategy": "epoch"}
        return {f"{kind}_strategy": "steps", f"{kind}_steps": round(1 / times, 6)}

    return becomes


def _share_of_rows(value: Any, _: Values, notes: list[str]) -> Values:
    if float(value) < 1:
        return {"eval_fraction": float(value)} if float(value) else {}
    notes.append(f"{value} rows are held out there; eval_fraction is a share of them, such as 0.02")
    return {}


def _deepspeed(value: Any, _: Values, notes: list[str]) -> Values:
    """A JSON of DeepSpeed's, or a configuration of accelerate's, by its name where it is not here."""
    if not isinstance(value, str):
        notes.append("write this object to a JSON file, and name it with zero")
        return {}
    if value.endswith(".json") and Path(value).is_file():
        return {"zero": value}
    stem = Path(value).stem
    if stem == "multi_gpu":
        return {"zero": "0"}
    stage = re.search(r"z(?:ero)?_?([0-3])", stem)
    if not stage:
        notes.append(f"{value} names no stage of ZeRO; zero: auto, the default, chooses one")
        return {}
    offload = "" if "offload" not in stem else "-offload-param" if "param" in stem else "-offload"
    notes.append(f"{value} is no file here; zero: {stage[1]}{offload} is dsft's own of that kind")
    return {"zero": stage[1] + offload}


def _data(option: str) -> Becomes:
    """A list of data sets as axolotl and TRL have them, for `data` or `eval_data`."""

    def becomes(value: Any, given: Values, notes: list[str]) -> Values:
        names, forms = [], []
        for entry in _items(value) if isinstance(value, str) else value if isinstance(value, list) else [value]:
            entry = {"path": entry} if isinstance(entry, str) else entry
            name, files, split = entry.get("path"), entry.get("data_files"), entry.get("split") or "train"
            if files and (not name or name in ("json", "csv", "parquet", "arrow", "text")):
                names += _items(files)
                name = _items(files)[0]
            elif Path(str(name)).exists() or re.search(r"\.(jsonl?|csv|parquet|arrow|txt)$", str(name)):
                names.append(name)
            else:
                config = entry.get("name") or ""
                parts = [name, config, split] if split != "train" else [name, config] if config else [name]
                names.append(":".join(parts))
                split = "train"  # it is part of the name
                if files:
                    notes.append(f"{name}: download its {', '.join(_items(files))} and name the file")
            if split != "train":
                notes.append(f"{name}: a file has no split; cut {split} out of it before")
            forms.append(_form(entry, name, notes))
        if any(form != forms[0] for form in forms):
            notes.append("its entries have several forms, and here all rows have one; bring them into one before")
        form = {key: each for form in forms for key, each in form.items()}
        return {option: names} | (form if option == "data" else {})

    return becomes


def _form(entry: Values, name: str, notes: list[str]) -> Values:
    """How the rows of an entry are read, where their columns do not show it."""
    kind = entry.get("type")
    if isinstance(kind, dict):  # axolotl's own prompt: user_defined.py
        fields = {each: kind.get(f"field_{each}") or each for each in ("system", "instruction", "input", "output")}
        prompt = kind.get("format") or "{instruction} {input} "
        prompt = re.sub(r"{(\w+)}", lambda match: "{" + fields.get(match[1], match[1]) + "}", prompt)
        if system := kind.get("system_prompt"):
            prompt = f"{system}\n{prompt}"
        if kind.get("no_input_format"):
            notes.append(f"{name}: rows without {fields['input']} get the same prompt")
        return {"prompt_template": prompt, "completion_template": "{" + fields["output"] + "}"}
    messages = entry.get("field_messages")
    if messages not in (None, "messages", "conversations"):
        notes.append(f"{name}: rename the column {messages} to messages")
    keys = {each: entry.get(f"message_field_{each}") or each for each in ("role", "content")}
    keys |= entry.get("message_property_mappings") or {}
    if {keys["role"], keys["content"]} - {"role", "content", "from", "value"}:
        notes.append(f"{name}: rename the keys of its messages to role and content")
    if others := set(_items(entry.get("roles_to_train") or ())) - {"assistant", "gpt", "model"}:
        notes.append(f"{name}: roles_to_train {', '.join(sorted(others))}: dsft trains answers, or all (train_on)")
    notes += [f"{name}: {key}: no counterpart" for key in entry if key not in READ_OF_DATA.split()]
    family = re.split(r"[.:]", str(kind or ""))[0]
    if family in ("completion", "pretrain"):
        column = entry.get("field") or entry.get("text_column") or "text"
        return {"data_format": "text"} | ({"text_column": column} if column != "text" else {})
    if family not in ("", "alpaca", "chat_template", "sharegpt"):
        notes.append(f"{name}: type {kind}: dsft finds the form by the columns; else write prompt_template and"
                     " completion_template")  # fmt: skip
    return {}


READ_OF_DATA = """path type name split data_files ds_type field field_messages message_property_mappings
    message_field_role message_field_content roles field_thinking template_thinking_key text_column chat_template
    roles_to_train train_on_eos train_on_eot trust_remote_code columns"""
"""Keys of an entry that are read, or that are as dsft does it."""


def _listed_data(option: str) -> Becomes:
    """Names of LLaMA-Factory's dataset_info.json (data/README.md there) for `data` or `eval_data`."""

    def becomes(value: Any, given: Values, notes: list[str]) -> Values:
        folder = Path(str(given.get("dataset_dir") or "data"))
        listing = folder / "dataset_info.json"
        try:
            known = json.loads(listing.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = {}
            notes.append(
                f"{', '.join(_items(value))}: named in {listing}, which is not here; name the files themselves"
            )
        names, form = [], {}
        for name in _items(value):
            entry = known.get(name, {})
            if entry.get("ranking") or {"images", "videos", "audios"} & entry.get("columns", {}).keys():
                raise CannotTrain(f"{name} of {listing} holds preferences or pictures, which dsft does not train")
            place = entry.get("hf_hub_url")
            if place:
                parts = [place, entry.get("subset") or "", entry.get("split") or "train"]
                names.append(":".join(parts[: 3 if parts[2] != "train" else 2 if parts[1] else 1]))
            else:
                names.append(str(folder / entry["file_name"]) if "file_name" in entry else name)
            columns = entry.get("columns", {})
            renamed = {
                each: theirs for each, theirs in columns.items() if theirs not in LISTED_COLUMNS.get(each, (each,))
            }
            if renamed.keys() == {"prompt"} and given.get("stage") == "pt":
                form = {"data_format": "text", "text_column": renamed["prompt"]}
            elif set(renamed.values()) - {"prompt", "completion"}:  # which are a form of dsft's own
                notes.append(f"{name}: rename its columns {', '.join(map(str, renamed.values()))}, see docs/data.md")
        return {option: names} | (form if option == "data" else {})

    return becomes


LISTED_COLUMNS = {
    "prompt": ("instruction",),
    "query": ("input",),
    "response": ("output",),
    "messages": ("conversations", "messages"),
    "system": ("system", "system_prompt"),
}
"""Key of `columns` in dataset_info.json -> the columns that dsft reads as it; others must have the key's name."""


def _on(options: Values, *, off: Values | None = None) -> Becomes:
    """Of a switch: these options where it is on, others (none) where it is off."""
    return {True: options, False: off or {}}


def _scheduler(value: Any, given: Values, _: list[str]) -> Values:
    """axolotl ends a cosine at a share of the learning rate by an option of its own."""
    least = given.get("cosine_min_lr_ratio")
    if value != "cosine" or least is None:
        return {"lr_scheduler_type": value}
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": float(least)}}


def _stream(value: Any, given: Values, notes: list[str]) -> Values:
    return _data("data")(value, given, notes) | {"streaming": True}


def _held_out(value: Any, given: Values, _: list[str]) -> Values:
    """TRL evaluates on a split of the same data set, where it is asked to evaluate."""
    is_asked = str(given.get("eval_strategy", "no")) != "no" and "dataset_name" in given
    return {"eval_data": [given["dataset_name"]], "eval_split": value} if is_asked else {}


def _wandb(value: Any, _: Values, notes: list[str]) -> Values:
    notes.append(f"set WANDB_PROJECT, WANDB_ENTITY or WANDB_NAME in the environment to {value}")
    return {"report_to": "wandb"}


def _peft(value: Any, given: Values, notes: list[str]) -> Values:
    if value and "lora_target_modules" not in given:
        notes.append("without lora_target_modules TRL adapts what peft names for the model, often q_proj and v_proj"
                     " alone; dsft adapts every linear layer")  # fmt: skip
    return LORA if value else {}


def _target_modules(value: Any, _: Values, notes: list[str]) -> Values:
    if isinstance(value, str) and set("()[]*|\\") & set(value):
        notes.append("a regular expression; write the names or their endings as a list")
        return {}
    return {"lora_target_modules": _items(value)}


def _steps(kind: str) -> Becomes:
    """axolotl goes by these steps without a strategy; transformers by its strategy."""

    def becomes(value: Any, given: Values, _: list[str]) -> Values:
        is_implied = "base_model" in given and f"{kind}_strategy" not in given
        return {f"{kind}_steps": value} | ({f"{kind}_strategy": "steps"} if is_implied else {})

    return becomes


def _total_batch(value: Any, given: Values, notes: list[str]) -> Values:
    """axolotl divides this by micro_batch_size, whatever the number of GPUs."""
    micro = int(given.get("micro_batch_size") or 1)
    return {"gradient_accumulation_steps": max(int(value) // micro, 1)}


def _answers(value: Any, given: Values, notes: list[str]) -> Values:
    if value is None and not {"assistant_only_loss", "completion_only_loss"} & given.keys():
        notes.append("TRL learns all tokens of a chat by default, dsft the answers; train_on: all learns all")
    return {} if value is None else {"train_on": "answers" if value else "all"}


def _unfrozen(value: Any, given: Values, notes: list[str]) -> Values:
    if not given.get("adapter"):
        return {"trainable": _items(value)}
    notes.append("left out; with an adapter all other weights stay as they are")
    return {}


LORA, QLORA = {"method": "lora"}, {"method": "qlora"}
ALL_LINEAR = {"lora_target_modules": ["all-linear"]}
OFF: Becomes = {False: {}}
"""Of what is refused where it is on."""
SUPERVISED = "dsft trains supervised (sft); preferences, rewards and reinforcement learning are for TRL"
TEXT_ALONE = "dsft trains text alone, no images, videos or sound"
WHOLE_OR_LORA = "dsft trains all weights, those that trainable names, or LoRA; no other adapter or projected gradient"
NEXT_TOKEN = "dsft trains by the cross entropy of the next token, on weights as they are"
ELSEWHERE = (
    # Model
    Elsewhere("model_name_or_path base_model model_name pretrained_model_name_or_path pretrained hf_model", "model"),
    Elsewhere("tokenizer_name tokenizer_name_or_path tokenizer_config tokenizer_path", "tokenizer"),
    Elsewhere("model_revision revision_of_model", "revision"),
    Elsewhere(
        "torch_dtype compute_dtype infer_dtype mixed_precision precision",
        "dtype",
        "auto, bfloat16, float16 or float32",
        {name: {"dtype": name} for name in ("auto", "bfloat16", "float16", "float32")}
        | {"bf16": {"dtype": "bfloat16"}, "fp16": {"dtype": "float16"}, "no": {}, False: {}},
    ),
    Elsewhere("bfloat16", "dtype", "dtype: bfloat16", _on({"dtype": "bfloat16"})),
    Elsewhere("float16", "dtype", "dtype: float16", _on({"dtype": "float16"})),
    Elsewhere(
        "flash_attention flash_attn use_flash_attention_2 use_flash_attn",
        "attn_implementation",
        "eager, sdpa, flash_attention_2 or flex_attention; what transformers picks by default",
        {
            **{key: {"attn_implementation": "flash_attention_2"} for key in (True, "fa2")},
            **{key: {} for key in (False, "auto")},
            "fa3": {"attn_implementation": "flash_attention_3"},
            "sdpa": {"attn_implementation": "sdpa"},
            "disabled": {"attn_implementation": "eager"},
        },
    ),
    Elsewhere(
        "sdp_attention", "attn_implementation", "attn_implementation: sdpa", _on({"attn_implementation": "sdpa"})
    ),
    Elsewhere(
        "eager_attention", "attn_implementation", "attn_implementation: eager", _on({"attn_implementation": "eager"})
    ),
    Elsewhere(
        "flex_attention",
        "attn_implementation",
        "attn_implementation: flex_attention",
        _on({"attn_implementation": "flex_attention"}),
    ),
    Elsewhere("xformers_attention", "attn_implementation", "attn_implementation: sdpa takes its place", _on({})),
    Elsewhere("model_type tokenizer_type", how="the model's config.json has it; leave it out"),
    Elsewhere("hf_hub_token hf_use_auth_token use_auth_token token", how="set HF_TOKEN in the environment"),
    Elsewhere("cache_dir", how="set HF_HOME in the environment; data_cache is the folder of prepared tokens"),
    Elsewhere(
        "low_cpu_mem_usage device_map experimental_skip_move_to_device tokenizer_use_fast use_fast_tokenizer",
        how="dsft loads the weights as its plan needs them; leave it out",
    ),
    Elsewhere(
        "tokens add_special_tokens",
        "add_tokens",
        "a list of texts",
        lambda value, *_: {"add_tokens": _items(value)},
    ),
    Elsewhere(
        "resize_token_embeddings_to_32x new_special_tokens_config resize_vocab",
        how="the embedding grows with add_tokens; leave it out",
    ),
    # Adapters and quantization
    Elsewhere("use_peft use_lora", "method", "method: lora, or full or qlora", _peft),
    Elsewhere(
        "finetuning_type peft_type",
        "method",
        "method: lora, or full or qlora",
        {"full": {"method": "full"}, "lora": LORA, "LORA": LORA},
        is_refused=True,
    ),
    Elsewhere("lora_rank r", "lora_r"),
    Elsewhere(
        "lora_target lora_attn_modules",
        "lora_target_modules",
        "a list; all-linear, the default, is every one",
        lambda value, *_: ALL_LINEAR if value == "all" else {"lora_target_modules": _items(value)},
    ),
    Elsewhere("lora_target_linear", "lora_target_modules", "all-linear is the default", _on(ALL_LINEAR)),
    Elsewhere(
        "additional_target modules_to_save",
        "lora_modules_to_save",
        "a list of names",
        lambda value, *_: {"lora_modules_to_save": _items(value)},
    ),
    Elsewhere("peft_use_dora", "use_dora"),
    Elsewhere("peft_use_rslora", "use_rslora"),
    Elsewhere("lora_model_dir adapter_name_or_path peft_model_id", "adapter model", "the folder of a trained adapter"),
    Elsewhere(
        "load_in_4bit",
        "method quantization",
        "method: qlora with quantization: nf4; in dsft eval the latter alone",
        _on(QLORA | {"quantization": "nf4"}),
    ),
    Elsewhere(
        "load_in_8bit",
        "method quantization",
        "method: qlora with quantization: int8; in dsft eval the latter alone",
        _on(QLORA | {"quantization": "int8"}),
    ),
    Elsewhere(
        "quantization_bit bnb_4bit_quant_type quantization_type",
        "quantization",
        "nf4 for 4 bits, int8 for 8, with method: qlora",
        {4: QLORA | {"quantization": "nf4"}, 8: QLORA | {"quantization": "int8"}, "nf4": {}},
    ),
    Elsewhere(
        "use_bnb_nested_quant double_quantization bnb_4bit_use_double_quant bnb_config_kwargs",
        how="nf4 always has it; leave it out",
    ),
    Elsewhere(
        "quantization_method bnb_4bit_quant_storage gptq gptq_groupsize gptq_model_v1",
        how="quantization names the format; a base that is packed already is not trained",
    ),
    Elsewhere("lora_fan_in_fan_out lora_task_type", how="peft finds it by the layer and the model; leave it out"),
    Elsewhere(
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel",
        how="a kernel of axolotl's that changes no result; leave it out",
    ),
    Elsewhere(
        "lora_target_parameters",
        "lora_options",
        "lora_options: {target_parameters: [...]}; all-linear has those of fused experts",
        lambda value, *_: {"lora_options": {"target_parameters": _items(value)}},
    ),
    Elsewhere("use_galore use_apollo use_badam use_llama_pro", how=WHOLE_OR_LORA, becomes=OFF, is_refused=True),
    Elsewhere("unfrozen_parameters", "trainable", "regular expressions, without ranges of rows", _unfrozen),
    Elsewhere(
        "relora lisa_n_layers mixture_of_depths freeze_trainable_layers oft_rank shift_attn train_from_scratch",
        how=WHOLE_OR_LORA,
        becomes=OFF,
        is_refused=True,
    ),
    # Data
    Elsewhere(
        "datasets",
        "data",
        "a list of files or hub names, as data: [a.jsonl, owner/name:config:split]; the format is found by the columns,"
        " or named by data_format (alpaca, sharegpt ...)",
        _data("data"),
    ),
    Elsewhere("pretraining_dataset", "data", "with streaming: true", _stream),
    Elsewhere("dataset", "data", "files or hub names; dsft reads no dataset_info.json", _listed_data("data")),
    Elsewhere(
        "dataset_name dataset_path data_path train_file data_files",
        "data",
        becomes=lambda value, *_: {"data": _items(value)},
    ),
    Elsewhere("dataset_dir", how="data names the files themselves"),
    Elsewhere("dataset_config dataset_config_name", "data_name"),
    Elsewhere("dataset_train_split", "data_split"),
    Elsewhere("test_datasets", "eval_data data", "a list of files or hub names", _data("eval_data")),
    Elsewhere("eval_dataset", "eval_data data", "a list of files or hub names", _listed_data("eval_data")),
    Elsewhere(
        "validation_file test_file",
        "eval_data data",
        "a list of files or hub names",
        lambda value, *_: {"eval_data": _items(value)},
    ),
    Elsewhere(
        "dataset_test_split", "eval_split data_split", "with eval_data, which may be the same data set", _held_out
    ),
    Elsewhere(
        "val_set_size val_size test_split_size test_size",
        "eval_fraction",
        "a share of the rows, such as 0.02; a file of its own goes to eval_data",
        _share_of_rows,
    ),
    Elsewhere(
        "validation_split_percentage",
        "eval_fraction",
        "a share: 0.05 for 5 percent",
        lambda value, *_: {"eval_fraction": float(value) / 100},
    ),
    Elsewhere(
        "max_samples max_train_samples",
        "max_documents data_split",
        "data_split: train[:1000] takes the first rows of a hub data set; shorten a file before",
        {},
    ),
    Elsewhere("dataset_text_field field", "text_column"),
    Elsewhere("dataset_streaming", "streaming"),
    Elsewhere("buffer_size streaming_multipack_buffer_size pretrain_multipack_buffer_size", "shuffle_buffer"),
    Elsewhere(
        "interleave_probs",
        "data_weights",
        "one weight for each entry of data",
        lambda value, *_: {"data_weights": [float(item) for item in _items(value)]},
    ),
    Elsewhere(
        "mix_strategy",
        "data_weights",
        "data_weights mixes the entries; without, each row is seen once",
        {"concat": {}, "interleave_under": {}, "interleave_over": {}, "interleave_once": {}},
    ),
    Elsewhere("dataset_prepared_path tokenized_path", "data_cache"),
    Elsewhere(
        "dataset_num_proc dataset_processes preprocessing_num_workers preprocessing_batch_size",
        how="all cores prepare the data; leave it out",
    ),
    Elsewhere("overwrite_cache", how="a change of data or options prepares it again; leave it out"),
    Elsewhere("shuffle_dataset shuffle_merged_datasets", how="every epoch has an order of its own, drawn by data_seed"),
    Elsewhere("dataset_exact_deduplication min_sample_len", how="dsft leaves no row out by itself; do it before"),
    Elsewhere("push_dataset_to_hub strict", how="dsft has no need of it; leave it out"),
    # Sequences
    Elsewhere(
        "max_length max_seq_length max_seq_len cutoff_len sequence_len seq_length block_size model_max_length",
        "seq_len",
        "too_long says what becomes of longer chats and prompts",
    ),
    Elsewhere(
        "truncation_mode excess_length_strategy",
        "too_long",
        "drop, truncate, split or error",
        {each: {"too_long": "truncate"} for each in ("keep_start", "keep_end", "truncate")}
        | {"drop": {"too_long": "drop"}, "raise": {"too_long": "error"}},
    ),
    Elsewhere("sample_packing neat_packing packed", "packing", "no sample sees another one"),
    Elsewhere(
        "padding_free batch_flattening",
        "packing",
        "batches without padding are packed rows",
        _on({"packing": True}) | {"auto": {}},
    ),
    Elsewhere("packing_strategy eval_packing eval_sample_packing", how="best fit, and evaluations are never packed"),
    Elsewhere(
        "pad_to_sequence_len pad_to_multiple_of",
        how="batches are padded to the longest sequence and a multiple of 8; leave it out",
    ),
    Elsewhere(
        "pad_token special_tokens eos_token eot_tokens",
        how="the tokenizer's own are taken, and padding changes no loss",
    ),
    Elsewhere(
        "template chat_template_path chat_template_jinja",
        "chat_template",
        "the tokenizer's own by default, else a Jinja file or a preset such as chatml",
    ),
    Elsewhere("default_system tool_format", how="the chat template has it, or the data"),
    Elsewhere(
        "train_on_inputs train_on_prompt",
        "train_on",
        "all learns prompts too; answers, the default, does not",
        _on({"train_on": "all"}),
    ),
    Elsewhere(
        "assistant_only_loss completion_only_loss",
        "train_on",
        "answers, the default of chats and prompts with completions; they are found in any chat template",
        _answers,
    ),
    Elsewhere(
        "roles_to_train response_template instruction_template",
        "train_on",
        "answers are found in any chat template; leave it out",
        {},
    ),
    Elsewhere("mask_history", "train_on", "last learns the last answer alone", _on({"train_on": "last"})),
    Elsewhere("enable_thinking preserve_thinking", "train_thinking", "auto, all, last or none", {}),
    # Steps
    Elsewhere(
        "micro_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu train_batch_size",
        "per_device_train_batch_size batch_tokens",
        "sequences of one GPU in one forward; global_batch_size counts those of a step over all GPUs. dsft eval counts"
        " tokens (batch_tokens)",
    ),
    Elsewhere(
        "batch_size",
        "per_device_train_batch_size batch_tokens",
        "sequences of one GPU in one forward (of axolotl, in one step). dsft eval counts tokens (batch_tokens)",
        _total_batch,
    ),
    Elsewhere(
        "eval_batch_size per_gpu_eval_batch_size", "per_device_eval_batch_size batch_tokens", "dsft eval counts tokens"
    ),
    Elsewhere("gradient_accumulation accumulate_grad_batches", "gradient_accumulation_steps"),
    Elsewhere("num_epochs epochs n_epochs max_epochs", "num_train_epochs"),
    Elsewhere("max_steps_per_epoch train_iters max_iters", "max_steps", "of the whole run"),
    Elsewhere("lr", "learning_rate"),
    Elsewhere("adam_eps", "adam_epsilon"),
    Elsewhere("optimizer", "optim", "a name, such as adamw_torch; its arguments go to optim_args"),
    Elsewhere("use_muon", how="zero: a DeepSpeed JSON of yours with optimizer.type Muon"),
    Elsewhere("lr_scheduler scheduler lr_decay_style", "lr_scheduler_type", "a name, such as cosine", _scheduler),
    Elsewhere(
        "cosine_min_lr_ratio",
        "lr_scheduler_kwargs",
        "lr_scheduler_type: cosine_with_min_lr with lr_scheduler_kwargs: {min_lr_rate: 0.1}",
        lambda *_: {},
    ),
    Elsewhere("warmup_ratio num_warmup_steps", "warmup_steps", "a number below 1 is a share of all steps"),
    Elsewhere("clip_grad_norm clip_grad gradient_clipping", "max_grad_norm"),
    Elsewhere(
        "group_by_length",
        "train_sampling_strategy",
        "train_sampling_strategy: group_by_length",
        _on({"train_sampling_strategy": "group_by_length"}),
    ),
    Elsewhere(
        "enable_activation_checkpointing use_gradient_checkpointing",
        "gradient_checkpointing",
        "true or false",
        _on({"gradient_checkpointing": True}, off={"gradient_checkpointing": False})
        | {"unsloth": {"gradient_checkpointing": True}},
    ),
    Elsewhere(
        "disable_gradient_checkpointing",
        "gradient_checkpointing",
        "true or false",
        _on({"gradient_checkpointing": False}, off={"gradient_checkpointing": True}),
    ),
    Elsewhere("use_reentrant_gc", how="activations are never computed again the reentrant way; leave it out"),
    Elsewhere("activation_offloading layer_offloading", how="zero offloads states, not activations"),
    Elsewhere("enable_liger_kernel use_liger liger_kernel", "use_liger_kernel"),
    Elsewhere(
        "liger_rope liger_rms_norm liger_glu_activation liger_layer_norm liger_rms_norm_gated"
        " liger_fused_linear_cross_entropy",
        "use_liger_kernel",
        "all of its kernels for the architecture",
        _on({"use_liger_kernel": True}),
    ),
    Elsewhere(
        "plugins", how="liger is use_liger_kernel; the loss is computed in pieces (tiled_loss); dsft takes no others"
    ),
    Elsewhere(
        "cut_cross_entropy chunked_cross_entropy flash_attn_cross_entropy",
        "tiled_loss",
        "auto, the default, computes the loss in pieces",
        _on({}),
    ),
    Elsewhere(
        "flash_attn_rms_norm flash_attn_fuse_mlp flash_optimum fused_attn_kernel flex_attn_compile_kwargs use_kernels"
        " use_v1_kernels experts_implementation use_scattermoe use_sonicmoe tiled_mlp upcast_layernorm",
        how="a kernel of theirs; dsft computes as transformers does, or with use_liger_kernel",
    ),
    Elsewhere("compile", "torch_compile"),
    Elsewhere("moe_aux_loss_coef router_aux_loss_coef", "router_aux_loss"),
    Elsewhere("zero_stage", "zero", "auto lets the planner choose", lambda value, *_: {"zero": str(value)}),
    Elsewhere(
        "accelerate_config config_file",
        "zero",
        "auto lets the planner choose; dsft launch --accelerate FILE takes a whole configuration of accelerate",
        _deepspeed,
    ),
    Elsewhere("sequence_parallel_degree sequence_parallel_size context_parallel_size", "sequence_parallel"),
    Elsewhere(
        "tensor_parallel_size expert_parallel_size pipeline_parallel_size dp_shard_size dp_replicate_size fsdp_version",
        how="ZeRO shards over all GPUs; zero: auto chooses how",
    ),
    Elsewhere(
        "num_processes nproc_per_node gpus num_gpus ray_num_workers",
        how="dsft train --num_gpus N, on the command line",
    ),
    Elsewhere(
        "num_machines nnodes", how="dsft launch --hostfile FILE train, or --nodes N with the command on each node"
    ),
    Elsewhere("stage", how=SUPERVISED, becomes={"sft": {}, "pt": {"data_format": "text"}}, is_refused=True),
    Elsewhere(
        "rl rl_beta pref_beta pref_loss pref_ftx ref_model reward_model process_reward_model dpo_loss_type kto_tag"
        " orpo_alpha simpo_gamma center_rewards_coefficient trl vllm ebft",
        how=SUPERVISED,
        becomes=OFF,
        is_refused=True,
    ),
    Elsewhere(
        "processor_type image_size image_max_pixels image_min_pixels video_max_pixels video_fps freeze_vision_tower"
        " media_dir",
        how=TEXT_ALONE,
        becomes=OFF,
        is_refused=True,
    ),
    Elsewhere("diffusion qat use_onebitllms num_labels", how=NEXT_TOKEN, becomes=OFF, is_refused=True),
    Elsewhere(
        "use_dft_loss use_asft_loss use_eaft_loss use_eaft",
        how=NEXT_TOKEN,
        becomes=OFF,
        is_refused=True,
    ),
    Elsewhere("loss_type", how=NEXT_TOKEN, becomes={"nll": {}, "chunked_nll": {}}, is_refused=True),
    Elsewhere("fp8 pure_bf16", how="dsft computes in dtype, with float32 copies of what is trained"),
    Elsewhere("early_stopping_steps", "early_stopping_patience", "a number of evaluations"),
    Elsewhere("loss_watchdog_threshold loss_watchdog_patience", how="a run ends at a loss that is NaN or infinite"),
    # Saving, evaluating, logging
    Elsewhere("save_dir output_path", "output_dir"),
    Elsewhere("overwrite_output_dir", "overwrite"),
    Elsewhere(
        "auto_resume_from_checkpoints resume",
        "resume_from_checkpoint",
        "auto, or the path of a checkpoint",
        _on({"resume_from_checkpoint": "auto"}),
    ),
    Elsewhere("evaluation_strategy", "eval_strategy"),
    Elsewhere(
        "evals_per_epoch",
        "eval_steps",
        "steps, or below 1 a share of all steps, with eval_strategy: steps",
        _per_epoch("eval"),
    ),
    Elsewhere(
        "eval_interval val_check_interval",
        "eval_steps",
        "steps, or below 1 a share of all steps, with eval_strategy: steps",
    ),
    Elsewhere(
        "saves_per_epoch",
        "save_steps",
        "steps, or below 1 a share of all steps, with save_strategy: steps",
        _per_epoch("save"),
    ),
    Elsewhere(
        "save_interval checkpoint_interval",
        "save_steps",
        "steps, or below 1 a share of all steps, with save_strategy: steps",
    ),
    Elsewhere("save_safetensors safe_serialization", how="weights are always safetensors; leave it out"),
    Elsewhere("log_every_n_steps log_interval", "logging_steps"),
    Elsewhere(
        "wandb_project wandb_entity wandb_name",
        "report_to",
        "report_to: wandb; WANDB_PROJECT in the environment",
        _wandb,
    ),
    Elsewhere(
        "wandb_watch wandb_log_model wandb_run_id swanlab_project swanlab_mode trackio_project_name trackio_run_name",
        how="the tracker reads its own variables of the environment",
    ),
    Elsewhere("use_tensorboard", "report_to", "report_to: tensorboard", _on({"report_to": "tensorboard"})),
    Elsewhere("use_wandb", "report_to", "report_to: wandb", _on({"report_to": "wandb"})),
    Elsewhere("use_mlflow", "report_to", "report_to: mlflow", _on({"report_to": "mlflow"})),
    Elsewhere("use_swanlab", "report_to", "report_to: swanlab", _on({"report_to": "swanlab"})),
    Elsewhere("metric_logger", "report_to", "a name, such as tensorboard or wandb", {}),
    Elsewhere("plot_loss", how="dsft report draws it from every run"),
    Elsewhere(
        "export_dir export_size export_device export_legacy_format",
        how="dsft merge writes a plain folder, with shards of safetensors",
    ),
    Elsewhere("limit max_eval_samples", "max_documents", becomes={}),
    Elsewhere("tasks num_fewshot model_args", how="dsft eval measures perplexity; lm_eval runs tasks"),
)
OF = {name: each for each in ELSEWHERE for name in each.names.split()}
"""By each of the names."""
SAME_NAME = (
    Elsewhere(
        "adapter",
        how="adapter is the folder of a trained adapter; a new one is trained with method: lora (or qlora)",
        becomes={"lora": LORA, "qlora": QLORA},
    ),
    Elsewhere("bf16 fp16", how="leave it out; dtype: auto, the default, finds it", becomes={"auto": {}}),
    Elsewhere("tf32", how="leave it out, or use true or false", becomes={"auto": {}}),
    Elsewhere(
        "chat_template",
        how="leave it out; the tokenizer's own is the default",
        becomes={"tokenizer_default": {}, "jinja": {}},
    ),
    Elsewhere(
        "gradient_checkpointing",
        how="true or false; activations are not offloaded",
        becomes={key: {"gradient_checkpointing": True} for key in ("offload", "offload_disk", "unsloth")},
    ),
    Elsewhere("deepspeed", how="zero takes its place", becomes=_deepspeed),
    Elsewhere("fsdp fsdp_config", how="ZeRO takes its place; zero: auto chooses how", becomes=lambda *_: {}),
    Elsewhere(
        "lora_target_modules",
        how="a list of names; all-linear is every one",
        becomes=_target_modules,
    ),
    Elsewhere(
        "lora_alpha",
        how="twice the rank where LLaMA-Factory is given none",
        becomes=lambda value, given, _: {"lora_alpha": value or 2 * int(given.get("lora_rank") or 8)},
    ),
    Elsewhere("add_tokens", how="a list of texts", becomes=lambda value, *_: {"add_tokens": _items(value)}),
    Elsewhere("save_steps", how="steps, or below 1 a share of all steps", becomes=_steps("save")),
    Elsewhere("eval_steps", how="steps, or below 1 a share of all steps", becomes=_steps("eval")),
    Elsewhere("max_steps", how="0 or less goes by the epochs", becomes={0: {}}),
)
"""What others give another form of value than dsft, under the same name."""
VALUES = {
    (name, value): each.how
    for each in SAME_NAME
    if isinstance(each.becomes, Mapping)
    for name in each.names.split()
    for value in each.becomes
    if isinstance(value, str)
}
"""(option of dsft, value that others give it) -> what is meant here."""

TRAINERS = {
    "axolotl": "base_model",
    "llamafactory": "stage finetuning_type cutoff_len template dataset_dir",
    "trl": "dataset_name datasets max_length use_peft",
}
"""Trainer that `dsft convert` reads -> options by which its files are known, in this order."""
DEFAULTS: dict[str, dict[str, Any]] = {
    # src/axolotl/utils/schemas, core/builders/base.py
    "axolotl": {
        "output_dir": "./model-out",
        "sequence_len": 512,
        "micro_batch_size": 1,
        "num_epochs": 1,
        "lr_scheduler": "cosine",
        "warmup_ratio": 0.03,
        "save_strategy": "epoch",
    },
    # src/llamafactory/hparams; lora_alpha is twice the rank; its processors cut what is too long
    "llamafactory": {
        "finetuning_type": "lora",
        "cutoff_len": 2048,
        "lora_rank": 8,
        "lora_alpha": None,
        "too_long": "truncate",
    },
    # trl/trainer/sft_config.py, model_config.py; trl/scripts/utils.py
    "trl": {
        "learning_rate": 2e-5,
        "truncation_mode": "keep_start",
        "lora_dropout": 0.05,
        "dataset_test_split": "test",
        "assistant_only_loss": None,
    },
}
"""What these trainers take where nothing is given, and dsft does not; None is written where it is derived."""
