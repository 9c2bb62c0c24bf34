"""A training by transformers and DeepSpeed without dsft, as another tool's. Arguments: model folder, output folder,
ZeRO stage, whether DeepSpeed alone saves.
"""

import os
import sys

import deepspeed
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator


def main() -> None:
    model_folder, output_dir, stage = sys.argv[1], sys.argv[2], int(sys.argv[3])
    deepspeed.init_distributed(verbose=False)
    args = TrainingArguments(
        output_dir=output_dir,
        max_steps=2,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=7,
        deepspeed={
            "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "auto",
        },
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    rows = [
        {"input_ids": ids, "labels": ids}
        for ids in torch.randint(5, 300, (8, 32), generator=torch.Generator().manual_seed(3)).tolist()
    ]
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows,
        data_collator=default_data_collator,
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
    trainer.train()
    trainer.model_wrapped.save_checkpoint(f"{output_dir}/deepspeed_alone")
    torch.distributed.barrier()
    os._exit(0)
