"""`dsft init`: a commented run.yaml to begin with."""

from pathlib import Path

import yaml

from dsft.cli.commands import InitOptions
from dsft.errors import UserError

FULL_RATE, ADAPTER_RATE = 1e-5, 1e-4
"""Learning rates to begin with: of all weights, and of adapters, which take ten times as much."""
TEXT = """\
# dsft preview --config {path}   what the model will see
# dsft plan --config {path}      what fits, and how fast it is
# dsft train --config {path}     dsft train --help lists the options used most, --help all every one

model: {model}
data: {data}
eval_fraction: 0.02        # held out and measured; or eval_data: held_out.jsonl
output_dir: {output_dir}

method: {method}               # full, lora or qlora
# lora_r: 16               # rank of the adapters
learning_rate: {rate}
num_train_epochs: 1
global_batch_size: 64      # sequences of an optimizer step, over all ranks
seq_len: 2048              # tokens of a sequence
# packing: true            # several short samples in a row, which do not see each other

zero: auto                 # the plan chooses; or 0, 1, 2, 3, 3-offload ...
# save_strategy: steps     # checkpoints on the way, to resume from
# save_steps: 500
# resume_from_checkpoint: auto
"""


def write_config(options: InitOptions) -> None:
    """Write the file.

    Raises:
        UserError: where it exists.
    """
    path = Path(options.out)
    if path.exists():
        raise UserError([f"{path}: exists; name another file with --out"])
    rate = FULL_RATE if options.method == "full" else ADAPTER_RATE
    path.parent.mkdir(parents=True, exist_ok=True)
    text = TEXT.format(
        path=path,
        model=_quoted(options.model),
        data=_quoted(options.data[0] if len(options.data) == 1 else options.data),
        output_dir=_quoted(options.output_dir),
        method=options.method,
        rate=f"{rate:.0e}".replace("e-0", "e-"),
    )
    path.write_text(text, encoding="utf-8")
    print(f"dsft: {path}: written; next: dsft preview --config {path}")


def _quoted(value: str | list[str]) -> str:
    """As YAML writes it on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).removesuffix("\n...\n").strip()
    )
