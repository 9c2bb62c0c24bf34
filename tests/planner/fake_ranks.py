"""One rank of a world of 16, in one process: unmodified DeepSpeed over torch's fake process group, its bytes counted.

Run as a program by `measure` (it changes the process: process group, variables); one forked child per configuration.
What the fake collectives return is not data: the sizes are DeepSpeed's own, the losses mean nothing.
"""

import json
import os
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from ranks import run_entry
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WORLD_SIZE = 16
RANKS_PER_NODE = 8
TOKENS = 2
"""So few that activations are negligible beside the model's states."""


class ByteLedger(TorchDispatchMode):
    """Bytes of all tensor storages alive, by the function of DeepSpeed (or the optimizer) that allocated them."""

    def __init__(self):
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref, int, str]] = {}
        self.by_owner: Counter[str] = Counter()
        self.total = self.peak = 0
        self.peak_by_owner: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._note(tensor)
                if func.overloadpacket is torch.ops.aten.empty:
                    # a fake all-gather leaves what was there: it must not be NaN, which would skip the step
                    tensor.zero_()
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive or not storage.nbytes():
            return
        owner = _owner(sys._getframe(2))
        self.alive[key] = (weakref.ref(storage, lambda _: self._free(key)), storage.nbytes(), owner)
        self.by_owner[owner] += storage.nbytes()
        self.total += storage.nbytes()
        self.peak = max(self.peak, self.total)
        self.peak_by_owner[owner] = max(self.peak_by_owner[owner], self.by_owner[owner])

    def _free(self, key: int) -> None:
        _, num_bytes, owner = self.alive.pop(key)
        self.by_owner[owner] -= num_bytes
        self.total -= num_bytes

    def restart_peak(self) -> None:
        self.peak, self.peak_by_owner = self.total, self.by_owner.copy()

    def now(self) -> dict[str, int]:
        return dict(+self.by_owner) | {"total": self.total}

    def peaks(self) -> dict[str, int]:
        """Each owner's largest number of bytes since the last restart, and the largest total."""
        return dict(+self.peak_by_owner) | {"total": self.peak}


def _owner(frame) -> str:
    """The innermost function of DeepSpeed's or of a torch optimizer's, leaving out its decorators."""
    skipped = ("wrapped_fn", "decorate_context", "wrapper", "wrapped")
    skipped += ("<listcomp>", "<dictcomp>", "<setcomp>")  # no functions of their own since Python 3.12 (PEP 709)
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "/torch/optim/" in file:
            return "torch_optimizer"
        if "/deepspeed/" in file and name not in skipped:
            return name
        frame = frame.f_back
    return "model"


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Three steps of training, or `steps`: bytes by owner and in total, after the last ("always") and at the peaks of
    load, compute and step, and of what is gathered for samples after them.

    `case`: model (fields of a LlamaConfig), config (DeepSpeed's), dtype, lora_r, rank, ranks, micro_batches (per step),
    tokens (rows and columns of a micro batch), steps.
    """
    import deepspeed
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ["LOCAL_RANK"] = str(case.get("rank", 0) % RANKS_PER_NODE)
    ranks = case.get("ranks", WORLD_SIZE)
    dist.init_process_group("fake", rank=case.get("rank", 0), world_size=ranks, store=FakeStore())
    deepspeed.init_distributed()
    ledger = ByteLedger()
    report: dict[str, Any] = {}
    tokens = torch.zeros(case.get("tokens", (1, TOKENS)), dtype=torch.long)
    with ledger:
        model, _keep = _build(case)  # transformers holds the configuration by weak reference
        report["load"] = ledger.peaks()
        engine = _engine(case, model)
        if case["config"]["zero_optimization"]["stage"] in (1, 2):
            report["load"]["total"] = (
                ledger.peak
            )  # with the flat copy that these make, before there are optimizer states
        compute, step = Counter(), Counter()
        for _ in range(case.get("steps", 3)):  # ZeRO-3 records its trace in the first two
            for _ in range(case.get("micro_batches", 1)):
                ledger.restart_peak()
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                compute |= ledger.peaks()
                ledger.restart_peak()
                engine.step()
                step |= ledger.peaks()
        report |= {"always": ledger.now(), "compute": compute, "step": step, "skipped_steps": engine.skipped_steps}
        ledger.restart_peak()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            report["sample"] = ledger.peaks()
    return report


def _build(case: dict[str, Any]):
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.integrations import HfDeepSpeedConfig

    from dsft.config.options import TrainConfig
    from dsft.models.trained import add_lora

    keep = HfDeepSpeedConfig(case["config"])
    dtype = getattr(torch, case["dtype"])
    model = AutoModelForCausalLM.from_config(LlamaConfig(**case["model"]), dtype=dtype)
    if case.get("lora_r"):
        model = add_lora(model, TrainConfig(method="lora", lora_r=case["lora_r"]))
        model.enable_input_require_grads()  # as dsft.models.build does
    return model, keep


def _engine(case: dict[str, Any], model):
    """As Trainer and accelerate build it: two parameter groups, and torch's AdamW unless the configuration names an
    optimizer.
    """
    import deepspeed

    trained = [p for p in model.parameters() if p.requires_grad]
    by_decay = [[p for p in trained if dimensions(p) > 1], [p for p in trained if dimensions(p) <= 1]]
    groups = [{"params": parameters} for parameters in by_decay if parameters]
    if "optimizer" in case["config"]:
        return deepspeed.initialize(model=model, model_parameters=groups, config=case["config"])[0]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=case["config"])[0]


def dimensions(parameter: torch.nn.Parameter) -> int:
    """Dimensions, of the full parameter where ZeRO-3 holds a piece."""
    return len(parameter.ds_shape) if hasattr(parameter, "ds_shape") else parameter.dim()


def measure(cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """`run_case` of every case, in a process of its own, which reads them in `folder`."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    done = run_entry("fake_ranks", [file], LOCAL_SIZE=str(RANKS_PER_NODE))
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _in_child(case: dict[str, Any]) -> dict[str, Any]:
    """`run_case` in a forked child: libraries are imported once, their global state is fresh each time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(2, 1)  # DeepSpeed prints; the parent's standard output is the answer alone
            os.write(writer, json.dumps(run_case(case)).encode())
            status = 0
        except Exception:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = stream.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"a child failed: {json.dumps(case)}")
    return json.loads(answer)


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({name: _in_child(case) for name, case in cases.items()}))
