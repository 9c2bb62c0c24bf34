"""Finetunes a causal language model under DeepSpeed, on any number of ranks.

    deepspeed dsft/train.py --config run.yaml --learning_rate 1e-4
    deepspeed --hostfile hostfiles/2x8 dsft/train.py --config run.yaml
    accelerate launch --config_file ds_configs/accelerate/zero3_2x8.yaml dsft/train.py --config run.yaml
    torchrun --nproc_per_node 8 dsft/train.py --config run.yaml
    python dsft/train.py --config run.yaml

Reads and checks the options, which takes a second, then loads the libraries and joins the other ranks; what follows is
`training/run.py`.
"""

import os
import sys
from pathlib import Path

# Started as a script, this file's own folder stands first on sys.path, and its modules could shadow libraries there.
if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.errors import ends_with_clear_errors
from dsft.run_setup.named_files import check_before_rendezvous
from dsft.runtime import distributed, preemption, quick_imports
from dsft.runtime.console import say, set_up_screen
from dsft.runtime.launcher_env import CHECKS_ALONE, check_words, map_launcher_variables


@ends_with_clear_errors
def main(argv: list[str] | None = None) -> None:
    map_launcher_variables()  # first: from here on RANK decides who prints
    if argv is None:
        check_words(argv := sys.argv[1:])
    problems: list[str] = []
    options = read_config(TrainConfig, argv, problems)
    check_before_rendezvous(options, problems)
    if CHECKS_ALONE in os.environ:
        with quick_imports():
            from dsft.run_setup.resolve import check_start
        return check_start(options, problems)
    say("loading PyTorch, transformers and DeepSpeed")
    set_up_screen()
    # Before any TrainingArguments: transformers would make a process group that DeepSpeed does not know of.
    preemption.listen()
    longest = max(1800, options.load_timeout, options.save_timeout)
    if options.training.get("torch_compile"):  # ranks wait in a collective for one that compiles
        longest = max(longest, options.compile_timeout + options.step_timeout)
    with quick_imports():
        distributed.start_ranks(
            timeouts=options,
            timeout_seconds=options.training.get("ddp_timeout", longest),
            output_dir=options.training.get("output_dir"),
        )
        from dsft.training.run import finetune  # loads torch, transformers and DeepSpeed

    finetune(options, problems)
    distributed.stop_ranks()


if __name__ == "__main__":
    main()
