"""`dsft.train` on ranks of which one fails in a phase, of memory unless the phase says how: FAILING_RANK ("all": each)
and FAILING_PHASE name them. With NODE_FOLDERS each rank works in a folder of its own.
"""

import os
import signal
import sys

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import dsft.train
import dsft.training.run

ERROR = MemoryError("this rank has no memory left")


def main() -> None:
    if "NODE_FOLDERS" in os.environ:
        os.chdir(f"node-{os.environ['RANK']}")
    if os.environ["FAILING_RANK"] in (os.environ["RANK"], "all"):
        FAULTS[os.environ["FAILING_PHASE"]]()
    try:
        dsft.train.main()
    except Exception:
        sys.excepthook(*sys.exc_info())  # as at the top of a program; a forked process does not call it
        os._exit(1)


def out_of_memory(*_, **__):
    raise ERROR


def in_loading() -> None:
    """While a layer is built under ZeRO-3's `Init`, and only then: the message is composed of other models."""
    build_model, make_layer = dsft.training.run.build_model, LlamaDecoderLayer.__init__

    def build(*args, **kwargs):
        LlamaDecoderLayer.__init__ = out_of_memory
        try:
            return build_model(*args, **kwargs)
        finally:
            LlamaDecoderLayer.__init__ = make_layer

    dsft.training.run.build_model = build


def _with_layers(fail) -> None:
    """Call `fail(layer, output)` after the forward of each layer of the real model, once the training has begun."""

    def hook(module: nn.Module, _, output):
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(module, LlamaDecoderLayer) and type(tensor) is torch.Tensor and tensor.device.type == "cpu":
            fail(module, tensor)

    nn.modules.module.register_module_forward_hook(hook)


def in_forward() -> None:
    _after_start(lambda: _with_layers(lambda layer, output: out_of_memory() if layer.training else None))


def in_backward() -> None:
    def fail(layer: nn.Module, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(out_of_memory)

    _after_start(lambda: _with_layers(fail))


def in_evaluation() -> None:
    _after_start(lambda: _with_layers(lambda layer, output: None if layer.training else out_of_memory()))


def _after_start(fault) -> None:
    fit = dsft.training.run.fit

    def fit_with_fault(*args, **kwargs):
        fault()
        return fit(*args, **kwargs)

    dsft.training.run.fit = fit_with_fault


def in_step() -> None:
    DeepSpeedEngine.step = out_of_memory


def in_save() -> None:
    TorchCheckpointEngine.save = out_of_memory


def killed(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raises(*_, **__) -> None:
    raise RuntimeError("this GPU has had enough")


def in_second_step(fault) -> None:
    """Once metrics have been written."""
    step, calls = DeepSpeedEngine.step, []

    def second(*args, **kwargs):
        calls.append(1)
        return fault() if len(calls) > 1 else step(*args, **kwargs)

    DeepSpeedEngine.step = second


def killed_while_loading() -> None:
    dsft.training.run.build_model = killed


FAULTS = {
    "killed": lambda: in_second_step(killed),
    "killed while loading": killed_while_loading,
    "error": lambda: in_second_step(raises),
    "loading": in_loading,
    "forward": in_forward,
    "backward": in_backward,
    "step": in_step,
    "evaluation": in_evaluation,
    "save": in_save,
}
