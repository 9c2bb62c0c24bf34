"""All that ranks import, for the process that the ranks of the tests are forked from."""

# ruff: noqa: F401
import gc

import deepspeed.runtime.zero.muon.muon_optimizer  # DeepSpeed's ZeRO imports it late, and TorchInductor with it
import peft
import pytest
import transformers.models.llama.modeling_llama
import xdist.scheduler
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
from deepspeed.ops.op_builder.cpu.cpu_adam import CPUAdamBuilder

import dsft.api
import dsft.eval_ppl
import dsft.perplexity.evaluation
import dsft.train
import dsft.training.run
from dsft.runtime.disk import name_owners_of_operator_locks

name_owners_of_operator_locks()  # else the lock of a test that was killed while it compiled is waited for without end
# DeepSpeed takes a second in each rank to see that an operator is compiled already.
for operator in (CPUAdamBuilder(), ShareMemCommBuilder()):
    operator.load(verbose=False)

# Objects that the collector leaves alone: a collection in a rank would copy every page that it shares with the others.
gc.collect()
gc.freeze()
