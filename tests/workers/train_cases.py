"""Runs many trainings on the ranks of one launch. Argument: a JSON file with a list of option dictionaries.

After each training every rank computes the logits of one fixed input with the trained model in memory; rank 0 writes
them to `logits.pt` in the run's folder, for the test to compare with the model that it loads from disk.
"""

import gc
import json
import sys
import traceback
from pathlib import Path

import torch
from probe import PROBE

from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.runtime import distributed
from dsft.training.run import finetune


def main() -> None:
    distributed.start_ranks()
    for options in json.loads(Path(sys.argv[-1]).read_text()):
        problems: list[str] = []
        try:
            trainer = finetune(make_config(TrainConfig, options, problems), problems)
            with torch.no_grad():
                logits = trainer.model.eval()(input_ids=PROBE.to(trainer.args.device), use_cache=False).logits
            if distributed.rank() == 0:
                torch.save(logits.cpu(), Path(options["output_dir"]) / "logits.pt")
            del trainer, logits
        except Exception:
            # One broken architecture must not hide the others; the test fails for want of logits.pt.
            traceback.print_exc()
        gc.collect()
    distributed.stop_ranks()


main()
