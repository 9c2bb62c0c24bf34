"""Finetunes a causal language model under DeepSpeed, on any number of ranks.

    deepspeed dsft/train.py --config run.yaml --learning_rate 1e-4
    deepspeed --hostfile hostfiles/2x8 dsft/train.py --config run.yaml
    accelerate launch --config_file ds_configs/accelerate/zero3_2x8.yaml dsft/train.py --config run.yaml
    torchrun --nproc_per_node 8 dsft/train.py --config run.yaml
    python dsft/train.py --config run.yaml

Reads and checks the options, which takes a second, then loads the libraries and joins the other ranks; what follows is
`training/run.py`. From Python, in a notebook or a script of one's own under any of these launchers, the module itself
is called:

    import dsft
    trainer = dsft.train("run.yaml", learning_rate=1e-4, compute_loss=my_loss)
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Started as a script, this file's own folder is first on sys.path, and its modules could shadow libraries there.
OWN_FOLDER = Path(__file__).resolve().parent
if Path(sys.path[0]).resolve() == OWN_FOLDER:
    sys.path[0] = str(OWN_FOLDER.parent)

from dsft.config.options import TrainConfig
from dsft.config.reader import field_types, make_config, read_config, read_yaml
from dsft.errors import ends_with_clear_errors, raise_if_any
from dsft.job import beat as watchdog
from dsft.runtime import distributed, quick_imports
from dsft.runtime.console import say, set_up_screen
from dsft.runtime.launcher_env import CHECKS_ALONE, map_launcher_variables, world_size
from dsft.setup import check_before_rendezvous

if TYPE_CHECKING:
    from dsft.training.trainer import PerplexityTrainer


@ends_with_clear_errors
def main(argv: list[str] | None = None) -> None:
    map_launcher_variables()  # first: from here on RANK decides who prints
    if argv is None:
        argv = sys.argv[1:]
    problems = []
    options = read_config(TrainConfig, argv, problems)
    finetune_with(options, problems)
    if CHECKS_ALONE not in os.environ:
        distributed.stop_ranks()


def finetune_with(options: TrainConfig, problems: Sequence[str] = ()) -> "PerplexityTrainer | None":
    """Check the options, join the other ranks and train. `problems`: of reading the options, raised with the others."""
    check_before_rendezvous(options, problems)
    if CHECKS_ALONE in os.environ:
        with quick_imports():
            from dsft.setup.decide import check_start
        return check_start(options, problems)
    say("loading PyTorch, transformers and DeepSpeed; a first start also compiles, about a minute")
    set_up_screen()
    # Before any TrainingArguments: transformers would make a process group that DeepSpeed does not know of.
    distributed.listen_for_signals()
    longest = max(1800, options.load_timeout, options.step_timeout, options.save_timeout)
    if options.training.get("torch_compile"):  # ranks wait in a collective for one that compiles
        longest = max(longest, options.compile_timeout + options.step_timeout)
    with quick_imports():
        distributed.start_ranks(
            timeouts=options,
            timeout_seconds=options.training.get("ddp_timeout", longest),
            output_dir=options.training.get("output_dir"),
        )
        from dsft.training.run import finetune  # loads torch, transformers and DeepSpeed

    return finetune(options, problems)


class _Train(ModuleType):
    """This module, which `dsft.train` names, as a function."""

    def __call__(self, config: TrainConfig | str | None = None, **options: Any) -> "PerplexityTrainer | None":
        """Train as `dsft train` does, in this process, or on all ranks where a launcher started this program.

        Args:
            config: what `load_config` returned, or the path of a YAML file.
            options: over those of `config`: options of `dsft train` by name, and user code as it is: `callbacks`
                (classes or objects of TrainerCallback), `compute_loss` and `map_row` (functions).

        Returns:
            The trainer, with the trained model; None where nothing was left to train.

        Raises:
            UserError, TrainingStopped: in a process of its own. Several ranks print the error and exit, as those of
                `dsft train` do.
        """

        def as_given():
            problems = []
            if isinstance(config, TrainConfig):
                values = {name: getattr(config, name) for name in field_types(TrainConfig)}
                values |= config.training
            else:
                values = read_yaml(config, problems) if config else {}
                raise_if_any(problems)
            trainer = finetune_with(make_config(TrainConfig, values | options, problems), problems)
            watchdog.close()  # what this program does from here on has no limits
            return trainer

        map_launcher_variables()
        if world_size() == 1:
            return as_given()
        distributed.stop_at_exit()
        return ends_with_clear_errors(as_given)()


if __name__ != "__main__":
    sys.modules[__name__].__class__ = _Train


if __name__ == "__main__":
    main()
