"""All that ranks import, for the process that the ranks of the tests are forked from."""

# ruff: noqa: F401
import functools
import gc
import importlib.metadata

# What DeepSpeed and torch import late, in the middle of a training; with Muon's optimizer also TorchInductor.
import cpuinfo
import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.superoffload.superoffload_stage3
import deepspeed.runtime.zero.muon.muon_optimizer
import peft
import pytest
import torch.utils.serialization
import transformers.models.llama.modeling_llama
import xdist.scheduler
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
from deepspeed.ops.op_builder.cpu.cpu_adam import CPUAdamBuilder
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import dsft.api
import dsft.errors
import dsft.eval_ppl
import dsft.perplexity.evaluation
import dsft.train
import dsft.training.run
from dsft.runtime.software import numeric_versions, versions

# DeepSpeed takes a second in each rank to see that an operator is compiled already.
for operator in (CPUAdamBuilder(), ShareMemCommBuilder()):
    operator.load(verbose=False)

# No launcher of these ranks kills all as soon as one has ended: the others need not wait for rank 0 to print first.
dsft.errors.RANK_0_SECONDS = 0.5
# Each of DeepSpeed's optimizers on a CPU asks a program that measures the clock for a second.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()
# A training asks dozens of times for versions of packages: to read them all was a quarter of a short one's seconds.
importlib.metadata.version = functools.cache(importlib.metadata.version)
versions(), numeric_versions()
get_checkpoint_conversion_mapping("llama")  # transformers compiles those of all architectures at once

# Objects that the collector leaves alone: a collection in a rank would copy every page that it shares with the others.
gc.collect()
gc.freeze()
