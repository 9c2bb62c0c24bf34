"""Every command in the shell blocks of README and docs, run in the folder of a user who has what the page speaks of.

Models are small, and stand for those of the hub under their names. The README's commands are typed into bash; those of
the other pages run on forked ranks. test_docs.py reads all of them in the quick tier.
"""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, flags
from ranks import run_entry
from test_docs import PAGES, SCRIPTS, commands, name_of
from tiny import sentences, write_jsonl, write_model

from dsft.models.measure import usual_config

pytestmark = [pytest.mark.exhaustive, pytest.mark.launch]

NETWORK, NODES, ITSELF = "loads from the network", "needs two nodes: tests/cluster", "runs these tests"
GPUS = "needs GPUs: tests/gpu"
NOT_RUN = {
    "scripts/quickstart": "tests/test_quickstart.py",
    "dsft chat runs/first": "asks at a terminal: tests/cli/test_chat.py",
    "scripts/real_model --short": NETWORK,
    "scripts/test": ITSELF,
    "scripts/test --all": ITSELF,
    "scripts/test --oldest": ITSELF,
    'scripts/test -m "not launch and not cluster and not exhaustive" tests/planner': ITSELF,
    "git clone URL dsft && cd dsft && python3 -m venv .venv && . .venv/bin/activate"
    " && pip install -c constraints.txt -e .": NETWORK,
    "pip install -c constraints.txt -e '.[quantization]'": NETWORK,
    "pip install -c constraints.txt -e .": NETWORK,
    "python3 -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt -e .": NETWORK,
    "dsft eval --model meta-llama/Llama-2-7b-hf --data wikitext:wikitext-2-raw-v1:test --protocol gptq": NETWORK,
    "dsft eval base --quantization none nf4 int8 --reference base --data test.txt"
    " --output_dir formats": "needs packages: tests/perplexity/test_quantized_models.py",
    "dsft eval base base-Q4_K_M.gguf base-GPTQ --reference base --data test.txt --output_dir formats": (
        "needs packages, GPTQ a GPU: tests/perplexity/test_quantized_models.py"
    ),
    "dsft export model-Q4_K_M.gguf unpacked": "needs such a file: tests/checkpoints/test_export.py",
    "dsft export gpt-oss-120b unpacked": "needs such a model: tests/models/test_quantization.py",
    "deepspeed --num_gpus 8 dsft/train.py --config run.yaml --seq_len 131072 --sequence_parallel 8": (
        "needs 8 GPUs: tests/training/test_long_context.py"
    ),
    **dict.fromkeys(
        (
            "python train_focal.py",
            "torchrun --nproc_per_node 8 train_focal.py",
            "deepspeed --hostfile hostfiles/2x8 train_focal.py",
        ),
        "tests/test_train.py",
    ),
    "scripts/test --gpu": GPUS,
    "scripts/test --gpu --minutes 20": GPUS,
    "scripts/test --gpu --only perplexity kill": GPUS,
    "scripts/test --gpu --share 4 --minutes 6": GPUS,
    "scripts/test --gpu --share 4 --minutes 6 --only share-checkpoints share-offload": GPUS,
    "scripts/test --gpu --tiny --minutes 100": "takes so long: tests/gpu",
    "dsft doctor --hostfile hosts --config run.yaml": NODES,
    "dsft doctor --hostfile H --config run.yaml": NODES,
    "dsft doctor --hostfile H --quick": NODES,
    "dsft doctor --hostfile H --json": NODES,
    "dsft launch --hostfile hosts train --config run.yaml": NODES,
    "sbatch scripts/slurm/torchrun.sbatch --config run.yaml": NODES,
    "sbatch scripts/slurm/tasks.sbatch --config run.yaml": NODES,
    "deepspeed --hostfile hosts dsft/train.py --config run.yaml": NODES,
    "deepspeed --hostfile hosts --no_ssh --node_rank 0 --master_addr node-0 dsft/train.py --config run.yaml": NODES,
    "accelerate launch --config_file ds_configs/accelerate/zero3_2x8.yaml --machine_rank 0 dsft/train.py"
    " --config run.yaml": NODES,
    "accelerate launch --config_file ds_configs/accelerate/zero3_2x8_pdsh.yaml dsft/train.py --config run.yaml": NODES,
    "HEAD=node-0 NODES=2 RANKS_PER_NODE=8 scripts/torchrun/train --config run.yaml": NODES,
    "HOSTFILE=hosts scripts/mpi/train --config run.yaml": NODES,
}
"""Command -> why it is not run here."""
BEGUN_WITHOUT = {
    "docs/migrating.md": ["run.yaml", "runs/first"],
    "README.md": ["run.yaml", "runs/first", "runs/lora", "results"],
    "docs/data.md": ["runs/first"],
    "docs/first_model.md": ["run.yaml", "runs/first", "results"],
    "docs/methods.md": ["runs/lora", "results"],
    "docs/agents.md": ["run.yaml"],
}
"""What a page's own commands make."""
RUN = "model: base\ndata: train.jsonl\neval_fraction: 0.1\noutput_dir: runs/first\nseq_len: 256\nmax_steps: 2\n"
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 131072}
"""Heads for 8 ranks, and the longest windows of the pages."""
NAMES = (
    "base",
    "quantised",
    "finetuned",
    "chat_model",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-0.5B-Instruct",
)
CHAT_MODELS = ("chat_model", "Qwen/Qwen2.5-0.5B-Instruct")
AXOLOTL = "base_model: base\ntrain_file: train.jsonl\nsequence_len: 256\nmax_steps: 2\noutput_dir: runs/first\n"
TRAININGS = {
    "runs/first": {"zero": "3", "max_steps": 20, "save_steps": 20, "save_strategy": "steps"},
    "runs/second": {"zero": "0", "learning_rate": 1e-3},
    "runs/lora": {"method": "lora", "lora_r": 4},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder that pages begin with a copy of."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("ds_configs", "hostfiles", "scripts", "dsft"):
        (folder / name).symlink_to(ROOT / name)
    for seed, name in enumerate(NAMES):
        write_model(folder / name, seed=seed, chat=name in CHAT_MODELS, **SIZES)
    for name in ("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-405B"):
        usual_config(name).save_pretrained(folder / name)
    for seed, (name, number) in enumerate({"train.jsonl": 300, "test.jsonl": 20}.items()):
        write_jsonl(folder / name, [{"text": text, "domain": text[0]} for text in sentences(number, seed=seed)])
    write_jsonl(folder / "books.jsonl", [{"text": " ".join(sentences(1000, seed=2, longest=200))}])
    turns = [{"role": "user", "content": "say it"}, {"role": "assistant", "content": "the token"}]
    write_jsonl(folder / "chats.jsonl", [{"messages": turns * 2}] * 5)
    for name in ("test.txt", "news.txt"):
        (folder / name).write_text(" ".join(sentences(200)))
    (folder / "run.yaml").write_text(RUN)
    (folder / "axolotl.yaml").write_text(AXOLOTL)
    for output_dir, options in TRAININGS.items():
        words = ["--config", "run.yaml", *flags({"output_dir": output_dir} | options)]
        result = run_entry("dsft.train", words, world=2, folder=folder)
        assert result.returncode == 0, result.stderr
    for output_dir, models in {"results": ["base", "runs/first"], "more_results": ["finetuned"]}.items():
        words = ["--model", *models, "--data", "test.jsonl", "--output_dir", output_dir]
        assert run_entry("dsft.eval_ppl", words, folder=folder).returncode == 0
    shutil.copytree(folder / "more_results", folder / "their_results")
    return folder


def started(line: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a command on forked ranks: two of a training, an evaluation, and where srun starts many."""
    words = shlex.split(line)
    world = 2 if words[0] == "srun" else 1
    name, *words = words[words.index("dsft") + 1 :]
    if name in ("train", "eval"):
        return run_entry(SCRIPTS_OF[name], words, world=2, folder=folder)
    return run_entry("dsft.cli.main", [name, *words], world=world, folder=folder)


SCRIPTS_OF = {name: module for module, name in SCRIPTS.items() if "/" not in module}


def typed(line: str, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True)


RUN_ELSEWHERE = ("docs/cookbook.md",)
"""Its commands are those of other pages, for other models."""


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page) and name_of(page) not in RUN_ELSEWHERE], ids=name_of
)
def test_every_command_of_a_page_does_its_work_and_prints_what_the_page_quotes(page, made, tmp_path):
    printed = ""
    folder = tmp_path / "place"
    shutil.copytree(made, folder, symlinks=True)
    for name in BEGUN_WITHOUT.get(name_of(page), []):
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    for line in commands(page):
        if line not in NOT_RUN:
            run = typed if name_of(page) == "README.md" or "dsft" not in line else started
            result = run(line, folder)
            assert result.returncode == 0, f"{line}\n{result.stdout[-2000:]}{result.stderr[-5000:]}"
            printed += result.stdout
    for quoted in re.findall(r"^> (.+)$", page.read_text(), re.MULTILINE):
        assert quoted in printed


def test_every_command_that_is_not_run_is_on_a_page():
    written = {line for page in PAGES for line in commands(page)}
    assert NOT_RUN.keys() <= written, NOT_RUN.keys() - written
