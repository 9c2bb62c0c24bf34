"""What dsft calls the options of other trainers: the data of hints at unknown options, and of a table in
docs/reference.md.

Names of TRL 1.16, axolotl 0.19, LLaMA-Factory 0.9.5, torchtune 0.6, transformers' examples and its TrainingArguments
before version 5, and the usual ones of accelerate, torchrun, Lightning, DeepSpeed, Megatron-LM and
lm-evaluation-harness. What dsft has under the same name, with another form of value, is in VALUES.
"""

from typing import NamedTuple


class Elsewhere(NamedTuple):
    """Options of others for one thing."""

    names: str
    """Separated by blanks."""
    ours: str = ""
    """Options of dsft, of which a command has the first or another; none where dsft has no option for it."""
    how: str = ""
    """Where the meaning or the form of the value differs, or what takes the place of an option."""


ELSEWHERE = (
    # Model
    Elsewhere("model_name_or_path base_model model_name pretrained_model_name_or_path pretrained hf_model", "model"),
    Elsewhere("tokenizer_name tokenizer_name_or_path tokenizer_config tokenizer_path", "tokenizer"),
    Elsewhere("model_revision revision_of_model", "revision"),
    Elsewhere(
        "torch_dtype bfloat16 float16 compute_dtype infer_dtype mixed_precision precision",
        "dtype",
        "auto, bfloat16, float16 or float32",
    ),
    Elsewhere(
        "flash_attention flash_attn use_flash_attention_2 use_flash_attn sdp_attention xformers_attention"
        " eager_attention flex_attention",
        "attn_implementation",
        "eager, sdpa, flash_attention_2 or flex_attention; what transformers picks by default",
    ),
    Elsewhere("model_type tokenizer_type", how="the model's config.json has it; leave it out"),
    Elsewhere("hf_hub_token hf_use_auth_token use_auth_token token", how="set HF_TOKEN in the environment"),
    Elsewhere("cache_dir", how="set HF_HOME in the environment; data_cache is the folder of prepared tokens"),
    # Adapters and quantization
    Elsewhere("use_peft finetuning_type peft_type use_lora", "method", "method: lora, or full or qlora"),
    Elsewhere("lora_rank r", "lora_r"),
    Elsewhere("lora_target lora_attn_modules", "lora_target_modules", "a list; all-linear, the default, is every one"),
    Elsewhere("lora_target_linear", "lora_target_modules", "all-linear is the default"),
    Elsewhere("additional_target modules_to_save", "lora_modules_to_save"),
    Elsewhere("peft_use_dora", "use_dora"),
    Elsewhere("peft_use_rslora", "use_rslora"),
    Elsewhere("lora_model_dir adapter_name_or_path peft_model_id", "adapter model", "the folder of a trained adapter"),
    Elsewhere(
        "load_in_4bit", "method quantization", "method: qlora with quantization: nf4; in dsft eval the latter alone"
    ),
    Elsewhere(
        "load_in_8bit", "method quantization", "method: qlora with quantization: int8; in dsft eval the latter alone"
    ),
    Elsewhere("quantization_bit bnb_4bit_quant_type", "quantization", "nf4 for 4 bits, int8 for 8, with method: qlora"),
    Elsewhere(
        "use_bnb_nested_quant double_quantization bnb_4bit_use_double_quant", how="nf4 always has it; leave it out"
    ),
    # Data
    Elsewhere(
        "dataset datasets pretraining_dataset",
        "data",
        "a list of files or hub names, as data: [a.jsonl, owner/name:config:split]; the format is found by the columns,"
        " or named by data_format (alpaca, sharegpt ...)",
    ),
    Elsewhere("dataset_name dataset_path dataset_dir data_path train_file data_files", "data"),
    Elsewhere("dataset_config dataset_config_name", "data_name"),
    Elsewhere("dataset_train_split", "data_split"),
    Elsewhere("eval_dataset test_datasets validation_file test_file", "eval_data data", "a list of files or hub names"),
    Elsewhere("dataset_test_split", "eval_split data_split"),
    Elsewhere(
        "val_set_size val_size test_split_size test_size",
        "eval_fraction",
        "a share of the rows, such as 0.02; a file of its own goes to eval_data",
    ),
    Elsewhere("validation_split_percentage", "eval_fraction", "a share: 0.05 for 5 percent"),
    Elsewhere(
        "max_samples max_train_samples",
        "max_documents data_split",
        "data_split: train[:1000] takes the first rows of a hub data set; shorten a file before",
    ),
    Elsewhere("dataset_text_field field", "text_column"),
    Elsewhere("dataset_streaming", "streaming"),
    Elsewhere("buffer_size streaming_multipack_buffer_size", "shuffle_buffer"),
    Elsewhere("interleave_probs mix_strategy", "data_weights", "one weight for each entry of data"),
    Elsewhere("dataset_prepared_path tokenized_path", "data_cache"),
    Elsewhere(
        "dataset_num_proc dataset_processes preprocessing_num_workers", how="all cores prepare the data; leave it out"
    ),
    Elsewhere("overwrite_cache", how="a change of data or options prepares it again; leave it out"),
    # Sequences
    Elsewhere(
        "max_length max_seq_length max_seq_len cutoff_len sequence_len seq_length block_size model_max_length",
        "seq_len",
        "too_long says what becomes of longer chats and prompts",
    ),
    Elsewhere("truncation_mode excess_length_strategy", "too_long", "drop, truncate, split or error"),
    Elsewhere(
        "sample_packing neat_packing packed padding_free batch_flattening", "packing", "no sample sees another one"
    ),
    Elsewhere(
        "pad_to_sequence_len pad_to_multiple_of",
        how="batches are padded to the longest sequence and a multiple of 8; leave it out",
    ),
    Elsewhere("pad_token special_tokens eos_token", how="the tokenizer's own are taken, and padding changes no loss"),
    Elsewhere(
        "template chat_template_path chat_template_jinja",
        "chat_template",
        "the tokenizer's own by default, else a Jinja file or a preset such as chatml",
    ),
    Elsewhere("train_on_inputs train_on_prompt", "train_on", "all learns prompts too; answers, the default, does not"),
    Elsewhere(
        "assistant_only_loss completion_only_loss roles_to_train response_template instruction_template",
        "train_on",
        "answers, the default of chats and prompts with completions; they are found in any chat template",
    ),
    Elsewhere("mask_history", "train_on", "last learns the last answer alone"),
    Elsewhere("enable_thinking preserve_thinking", "train_thinking", "auto, all, last or none"),
    # Steps
    Elsewhere(
        "micro_batch_size batch_size train_batch_size per_gpu_train_batch_size train_micro_batch_size_per_gpu",
        "per_device_train_batch_size batch_tokens",
        "sequences of one GPU in one forward; global_batch_size counts those of a step over all GPUs. dsft eval counts"
        " tokens (batch_tokens)",
    ),
    Elsewhere(
        "eval_batch_size per_gpu_eval_batch_size", "per_device_eval_batch_size batch_tokens", "dsft eval counts tokens"
    ),
    Elsewhere("gradient_accumulation accumulate_grad_batches", "gradient_accumulation_steps"),
    Elsewhere("num_epochs epochs n_epochs max_epochs", "num_train_epochs"),
    Elsewhere("max_steps_per_epoch train_iters max_iters", "max_steps", "of the whole run"),
    Elsewhere("lr", "learning_rate"),
    Elsewhere("optimizer", "optim", "a name, such as adamw_torch; its arguments go to optim_args"),
    Elsewhere("lr_scheduler scheduler lr_decay_style", "lr_scheduler_type", "a name, such as cosine"),
    Elsewhere("warmup_ratio num_warmup_steps", "warmup_steps", "a number below 1 is a share of all steps"),
    Elsewhere("clip_grad_norm clip_grad gradient_clipping", "max_grad_norm"),
    Elsewhere("group_by_length", "train_sampling_strategy", "train_sampling_strategy: group_by_length"),
    Elsewhere(
        "enable_activation_checkpointing use_gradient_checkpointing disable_gradient_checkpointing",
        "gradient_checkpointing",
        "true or false",
    ),
    Elsewhere("enable_liger_kernel use_liger liger_kernel", "use_liger_kernel"),
    Elsewhere("compile", "torch_compile"),
    Elsewhere("zero_stage", "zero", "auto lets the planner choose"),
    Elsewhere("sequence_parallel_degree context_parallel_size", "sequence_parallel"),
    Elsewhere("num_processes nproc_per_node gpus num_gpus", how="dsft train --num_gpus N, on the command line"),
    Elsewhere(
        "num_machines nnodes", how="dsft launch --hostfile FILE train, or --nodes N with the command on each node"
    ),
    Elsewhere("stage rl rl_beta pref_beta pref_loss", how="dsft trains supervised alone (sft); leave it out"),
    Elsewhere(
        "early_stopping_patience early_stopping_steps",
        how="a run does not stop early; load_best_model_at_end keeps the best checkpoint",
    ),
    # Saving, evaluating, logging
    Elsewhere("save_dir output_path", "output_dir"),
    Elsewhere("overwrite_output_dir", "overwrite"),
    Elsewhere("auto_resume_from_checkpoints resume", "resume_from_checkpoint", "auto, or the path of a checkpoint"),
    Elsewhere("evaluation_strategy", "eval_strategy"),
    Elsewhere(
        "evals_per_epoch eval_interval val_check_interval",
        "eval_steps",
        "steps, or below 1 a share of all steps, with eval_strategy: steps",
    ),
    Elsewhere(
        "saves_per_epoch save_interval checkpoint_interval",
        "save_steps",
        "steps, or below 1 a share of all steps, with save_strategy: steps",
    ),
    Elsewhere("log_every_n_steps log_interval", "logging_steps"),
    Elsewhere(
        "wandb_project wandb_entity wandb_name", "report_to", "report_to: wandb; WANDB_PROJECT in the environment"
    ),
    Elsewhere(
        "use_tensorboard use_wandb use_mlflow use_swanlab metric_logger",
        "report_to",
        "a name, such as tensorboard or wandb",
    ),
    Elsewhere("plot_loss", how="dsft report draws it from every run"),
    Elsewhere("limit max_eval_samples", "max_documents"),
    Elsewhere("tasks num_fewshot model_args", how="dsft eval measures perplexity; lm_eval runs tasks"),
)
OF = {name: each for each in ELSEWHERE for name in each.names.split()}
"""By each of the names."""
VALUES = {
    **dict.fromkeys(
        (("adapter", "lora"), ("adapter", "qlora")),
        "adapter is the folder of a trained adapter; a new one is trained with method: lora (or qlora)",
    ),
    **dict.fromkeys((("bf16", "auto"), ("fp16", "auto")), "leave it out; dtype: auto, the default, finds it"),
    ("tf32", "auto"): "leave it out, or use true or false",
    ("chat_template", "tokenizer_default"): "leave it out; the tokenizer's own is the default",
}
"""(option of dsft, value that others give it) -> what is meant here."""
