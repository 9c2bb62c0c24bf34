"""CPU seconds that `dsft plan` takes for each architecture of transformers' causal mapping, at the size of its default
configuration, and whether its activations are traced from its own code, approximated, or the plan refused. No hub,
no GPU, and no earlier traces are used.

    python benchmarks/plan_speed.py [ARCHITECTURE ...] [--out FILE]
"""

import argparse
import json
import os
import platform
import signal
import tempfile
import time
import warnings
from pathlib import Path

import torch
import transformers

SEQ_LEN = 1024
"""Tokens, or as many as the architecture has positions for."""


def planned(model_type: str, limit: int) -> dict:
    """The row of one architecture."""
    from dsft.cli.commands import PlanOptions
    from dsft.cli.plan import read_machines
    from dsft.errors import UserError
    from dsft.models.size import max_positions
    from dsft.run_setup.resolve import plan_run, resolve_offline

    def stop(*_: object) -> None:
        raise TimeoutError(f"not planned in {limit} s")

    signal.signal(signal.SIGPROF, stop)
    (machine,) = read_machines(PlanOptions(gpus="8xH100", nodes="2"))
    row = {"architecture": model_type}
    with tempfile.TemporaryDirectory() as folder:
        signal.setitimer(signal.ITIMER_PROF, limit)
        start = time.process_time()
        try:
            config = transformers.CONFIG_MAPPING[model_type]()
            if hasattr(config, "is_decoder"):  # of encoders that may be decoders too
                config.is_decoder = True
            config.save_pretrained(folder)
            seq_len = min(SEQ_LEN, max_positions(config.get_text_config()) or SEQ_LEN)
            options = training_options(model=folder, seq_len=seq_len, dtype="bfloat16")
            start = time.process_time()
            run = resolve_offline(options, machine)
            chosen = plan_run(run.options, run.job, machine, must_fit=False).plan
            source = run.job.activations.source
            outcome = "traced" if source == "trace of its own code" else "approximated"
            size = run.job.size
            row |= {"outcome": outcome, "source": source, "params": size.num_params, "zero": chosen.zero}
        except UserError as error:
            row |= {"outcome": "refused", "source": str(error)[:300]}
        except Exception as error:  # which a plan must not end with
            row |= {"outcome": "failed", "source": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_PROF, 0)
    return row | {"seconds": round(time.process_time() - start, 2)}


def training_options(**options):
    from dsft.config.options import TrainConfig
    from dsft.config.reader import make_config

    return make_config(TrainConfig, options, [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architectures", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=int, default=120, help="CPU seconds for one architecture")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = arguments.architectures or list(transformers.MODEL_FOR_CAUSAL_LM_MAPPING._model_mapping)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        planned("gpt2", arguments.limit)  # imports, which take seconds once
        rows = []
        for name in names:
            rows.append(planned(name, arguments.limit))
            print("{architecture:28} {seconds:7.2f} s  {outcome:13}{source}".format(**rows[-1]), flush=True)
    outcomes = [row["outcome"] for row in rows]
    result = {
        "seq_len": SEQ_LEN,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))},
        "slowest_seconds": max(row["seconds"] for row in rows),
        "rows": rows,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
