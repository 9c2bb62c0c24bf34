"""Names that other trainers have for dsft's options, for files that are written for them and for `dsft convert`.

Names of TRL, axolotl, LLaMA-Factory, torchtune and transformers' examples. The table of docs/migrating.md is made from
these dictionaries by scripts/reference.py.
"""

_SAME_MEANING = {
    "model": "model_name_or_path base_model model_name pretrained_model_name_or_path",
    "tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "revision": "model_revision",
    "dtype": "torch_dtype",
    "lora_r": "lora_rank r",
    "lora_target_modules": "lora_target",
    "lora_modules_to_save": "modules_to_save additional_target",
    "use_dora": "peft_use_dora",
    "use_rslora": "peft_use_rslora",
    "adapter": "lora_model_dir adapter_name_or_path",
    "data": "dataset_name dataset_path data_path train_file data_files",
    "data_name": "dataset_config dataset_config_name",
    "data_split": "dataset_train_split",
    "eval_data": "validation_file eval_dataset",
    "eval_fraction": "val_set_size val_size test_size",
    "text_column": "dataset_text_field",
    "data_cache": "dataset_prepared_path tokenized_path",
    "seq_len": "max_length max_seq_length max_seq_len cutoff_len sequence_len seq_length block_size",
    "packing": "sample_packing neat_packing",
    "per_device_train_batch_size": "micro_batch_size per_gpu_train_batch_size",
    "per_device_eval_batch_size": "eval_batch_size per_gpu_eval_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation accumulate_grad_batches",
    "num_train_epochs": "num_epochs epochs max_epochs",
    "learning_rate": "lr",
    "optim": "optimizer",
    "lr_scheduler_type": "lr_scheduler",
    "warmup_steps": "warmup_ratio num_warmup_steps",
    "max_grad_norm": "clip_grad_norm gradient_clipping",
    "gradient_checkpointing": "enable_activation_checkpointing use_gradient_checkpointing",
    "use_liger_kernel": "enable_liger_kernel",
    "torch_compile": "compile",
    "sequence_parallel": "sequence_parallel_degree sequence_parallel_size context_parallel_size",
    "router_aux_loss": "router_aux_loss_coef",
    "output_dir": "save_dir output_path output out",
    "overwrite": "overwrite_output_dir",
    "eval_strategy": "evaluation_strategy",
    "logging_steps": "log_every_n_steps log_interval",
    "max_documents": "max_eval_samples",
}
OURS = {theirs: ours for ours, names in _SAME_MEANING.items() for theirs in names.split()}
"""Their name -> the option of dsft that takes the value as it is."""

_OTHER_FORM = {
    "flash_attention flash_attn sdp_attention": "leave it out; transformers picks the attention kernel",
    "use_peft use_lora finetuning_type": "method is full, lora or qlora",
    "load_in_4bit load_in_8bit quantization_bit": "use method: qlora with quantization: nf4 or int8",
    "lora_target_linear": "leave it out; all linear layers are adapted by default",
    "datasets dataset": "data is a list of files or hub data sets, such as [a.jsonl, owner/name:config:split]",
    "train_on_inputs assistant_only_loss completion_only_loss": "train_on is answers (the default), all or last",
    "template": "chat_template is a Jinja file or a preset; the tokenizer's own is the default",
    "zero_stage": "zero is auto, 0, 1, 2, 3, or the path of a DeepSpeed JSON",
    "batch_size train_batch_size": "global_batch_size counts the sequences of a step on all GPUs",
    "evals_per_epoch": "use eval_steps; below 1 it is a share of all steps",
    "saves_per_epoch": "use save_steps; below 1 it is a share of all steps",
    "wandb_project use_wandb": "use report_to: wandb, with WANDB_PROJECT in the environment",
    "group_by_length": "use train_sampling_strategy: group_by_length",
}
HINTS = {theirs: hint for names, hint in _OTHER_FORM.items() for theirs in names.split()}
"""Their name, if the value has another form in dsft -> what to write instead."""

SAME_VALUES = {
    ("zero", "zero0"): "0",
    ("zero", "zero1"): "1",
    ("zero", "zero2"): "2",
    ("zero", "zero3"): "3",
    ("zero", "zero2_offload"): "2-offload",
    ("zero", "zero3_offload"): "3-offload",
    ("dtype", "bf16"): "bfloat16",
    ("dtype", "fp16"): "float16",
    ("dtype", "fp32"): "float32",
    ("optim", "adamw"): "adamw_torch",
}
"""(option, their value) -> dsft's."""
