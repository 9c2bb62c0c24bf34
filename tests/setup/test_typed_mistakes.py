"""Bad input as users type it, each case one command: exit code 2 and one line that names the key or file.

The seconds of a case are those of a forked process, so the quick tier takes a few of them.
"""

import json
import shutil

import pytest
from conftest import grid
from ranks import run_entry
from tiny import write_jsonl

TRAIN = "train --model MODEL --data TEXTS --output_dir NEW --max_steps 1 --seq_len 32 --disable_tqdm"
EVAL = "eval --model MODEL --data TEXTS --seq_len 32"
CASES = {
    # the command itself
    "tran": "unknown command 'tran'; dsft --help lists them; did you mean 'train'",
    "plan": "model: missing",
    "plan --model MODEL --gpus 8": "--gpus '8'",
    "plan --model MODEL --gpus 8x80": "'80' is not a size",
    "plan --model MODEL --seq_len 32 --gpus 8x80GB --gpu_type H999": "gpu_type: removed; --gpus names the card",
    "plan --model MODEL --hostfile nowhere": "nowhere: no such file",
    "plan --model MODEL --seq_len 32 --num_gpus 8": "num_gpus: unknown key; --help all lists every option",
    "checkpoints NEW": "contains no checkpoints; name an output_dir of dsft train",
    "verify NEW": "is not a folder",
    "verify": "--folder must be given",
    "export NEW OUT": "NEW",
    "merge MODEL OUT": "MODEL",
    "preview --data TEXTS": "model: missing",
    "preview --model MODEL --data nowhere.txt": "nowhere.txt does not exist",
    "prepare --model MODEL --data EMPTY": "is empty",
    f"launch --hostfile nowhere {TRAIN}": "no such file",
    "launch --hostfile TEXTS --slurm train": "'--slurm' (removed; sbatch",
    "launch --hostfile SLOTS train --model MODEL --data TEXTS --output_dir NEW": "a line reads `worker-1 slots=8`",
    "launch tain": "expected train or eval, got 'tain'",
    "train qa.jsonl": "unexpected argument 'qa.jsonl'; options are written --key value",
    "finetun --model MODEL": "unknown command 'finetun'; dsft --help lists them; did you mean 'finetune'",
    "train --config FOREIGN": "options of another trainer: base_model, datasets, sequence_len; dsft convert",
    # names of options
    f"{TRAIN} --learning_rat 1": "learning_rat: unknown key; did you mean 'learning_rate'",
    f"{TRAIN} --lr fast": "learning_rate: expected a finite number, got 'fast'",
    f"{TRAIN} --stage dpo": "stage: unknown key; dsft train finetunes on text, prompts or chats",
    f"{TRAIN} --nproc_per_node 2": "nproc_per_node: unknown key; dsft train --num_gpus N",
    f"{TRAIN} --batch_size 4": "batch_size: unknown key",
    f"{TRAIN} --gpus 4": "gpus: unknown key",
    f"{TRAIN} --method lorra": "method: invalid choice: 'lorra' (choose from",
    f"{TRAIN} --zero 4": "zero=4: unknown",
    f"{TRAIN} --zero 3-ofload": "did you mean '3-offload'",
    f"{TRAIN} --zero nowhere.json": "zero=nowhere.json: cannot be read",
    f"{TRAIN} --deepspeed x.json": "deepspeed: dsft sets up sharding itself",
    f"{TRAIN} --eval_strategy step": "eval_strategy: invalid choice: 'step' (choose from",
    f"{TRAIN} --optim adam": "(choose from adamw_torch, adamw_torch_fused, adamw_torch_xla, adamw_torch_npu_fused,"
    " adamw_anyprecision, ...)",
    f"{TRAIN} --report_to tensorbord": "report_to=tensorbord: tensorbord is not supported, only",
    f"{TRAIN} --report_to wandb": "pip install wandb",
    f"{TRAIN} --attn_implementation flash": "built with these options",
    # values
    f"{TRAIN} --learning_rate": "learning_rate: needs a value",
    f"{TRAIN} --per_device_train_batch_size 0": "per_device_train_batch_size=0: must be at least 1",
    f"{TRAIN} --eval_fraction 1": "eval_fraction=1.0: must be at least 0 and less than 1",
    f"{TRAIN} --packing maybe": "packing: expected true or false, got 'maybe'",
    f"{TRAIN} --columns question,answer": "columns: expected a mapping such as '{user: question, assistant: answer}'",
    f"{TRAIN} --lora_r 0": "lora_r=0: must be at least 1",
    f"{TRAIN} --learning_rate 1 --learning_rate 2": "learning_rate: given 2 times (1, 2); keep one",
    f"{TRAIN} --bf16 --fp16": "bf16 and fp16 are both true",
    f"{TRAIN} --fp16": "fp16 needs a GPU",
    f"{TRAIN} --method qlora": "method=qlora",
    f"{TRAIN} --eval_strategy steps": "eval_strategy needs held-out data",
    f"{TRAIN} --method lora --lora_target_modules query": "'query' matches no layer",
    f"{TRAIN} --method lora --lora_target q_proj,v_proj": "several are a list, [a, b], or words of a flag",
    f'{TRAIN} --columns {{"text":"text"}}': "for text write text_column: COLUMN",
    f"{TRAIN} --prompt_template Q": "prompt_template needs completion_template",
    f"{TRAIN} --completion_template {{text": "completion_template='{text'",
    f"{TRAIN} --completion_template {{answer}}": "the template names the column answer; the columns are text",
    f"{TRAIN} --chat_template nothing": "chat_template: ",
    f"{TRAIN} --resume_from_checkpoint nowhere": "resume_from_checkpoint=nowhere",
    f"{TRAIN} --global_batch_size 7 --per_device_train_batch_size 2": "global_batch_size=7 is not divisible",
    # files
    "train --config nowhere.yaml": "--config nowhere.yaml: cannot be read",
    "train --config BROKEN": "not valid YAML",
    "train --config TABS": "a line is 'key: value', indented with spaces",
    "train --config LIST": "must contain 'key: value' lines, found a list",
    f"{TRAIN} --config TWICE": "line 2: duplicate key lora_r, first on line 1",
    f"{TRAIN} --zero MISSPELT": "zero_optimizaton: unknown key; did you mean 'zero_optimization'",
    f"{TRAIN} --zero HALVES": "bfloat16 and fp16 modes cannot be simultaneously enabled",
    "train --model NEW --data TEXTS --output_dir NEW2 --seq_len 32": "model=",
    "train --model EMPTYDIR --data TEXTS --output_dir NEW --seq_len 32": "model=",
    "train --model BARE --data TEXTS --output_dir NEW --seq_len 32": "contains a config but no weights",
    "train --model CUT --data TEXTS --output_dir NEW --seq_len 32": "model.safetensors",
    "train --model POINTER --data TEXTS --output_dir NEW --seq_len 32": "git lfs pull",
    "train --model GGUFS --data TEXTS --output_dir NEW --seq_len 32": "contains no model; use ",
    "train --model MODEL --data UTF16 --output_dir NEW --seq_len 32": "line 1: not valid UTF-8",
    "preview --model MODEL --data UNANSWERED --seq_len 32": "look for empty answers",
    "train --model MODEL --data TEXTS --output_dir TEXTS --seq_len 32": "is not a folder; name a new one",
    "train --model MODEL --data nowhere.jsonl --output_dir NEW --seq_len 32": "nowhere.jsonl does not exist",
    "train --model MODEL --data NULLS --output_dir NEW --seq_len 32": "line 2: column 'text' is null",
    "train --model MODEL --data HALF --output_dir NEW --seq_len 32": "line 2: not valid JSON",
    "train --model MODEL --data NUMBERS --output_dir NEW --seq_len 32": "must contain text; it contains int",
    "train --model MODEL --data COLUMNS --output_dir NEW --seq_len 32": "the columns are body",
    "train --model MODEL --data CHATS --output_dir NEW --seq_len 32": "no chat template",
    "train --model MODEL --data EMPTYDIR --output_dir NEW --seq_len 32": "contains no",
    "train --model MODEL --data TEXTS --output_dir /proc/run --seq_len 32": "cannot be written",
    "train --model MODEL --data TEXTS --output_dir NEW --seq_len 999": "seq_len=999 is beyond the 256 positions",
    "train --model MODEL --data TEXTS --seq_len 32": "output_dir: missing",
    # evaluation
    f"{EVAL} --mode slide": "slide",
    f"{EVAL} --mode sliding --stride 32": "stride=32: must be at least 1 and less than seq_len=32",
    f"{EVAL} --zero 2": "zero=2: evaluation needs a full model",
    f"{EVAL} --learning_rate 1": "learning_rate: unknown key",
    f"{EVAL} --output_dir /proc/x": "cannot be written",
    "eval --model nowhere/at/all --data TEXTS --seq_len 32": "nowhere/at/all",
    "eval --model CUT --data TEXTS --seq_len 32": "model.safetensors",
    "eval --model BARE --data TEXTS --seq_len 32": "weights",
    "eval --data TEXTS --seq_len 32": "model: missing",
    "eval --model MODEL --seq_len 32": "dsft eval --run RUN needs none",
    f"{EVAL} --tasks hellaswag": "tasks: unknown key; dsft eval measures perplexity",
    "eval --run EMPTYDIR": "is not a run folder: it has no run.json; name an output_dir of dsft train",
}
ENTRIES = {"train": "dsft.train", "eval": "dsft.eval_ppl"}
QUICK = [case for number, case in enumerate(CASES) if number % 12 == 0]


@pytest.fixture(scope="module")
def places(tiny, tmp_path_factory):
    """What the words in capitals stand for."""
    folder = tmp_path_factory.mktemp("typed")
    for name in ("BARE", "CUT"):
        shutil.copytree(tiny / "model", folder / name)
    (folder / "BARE" / "model.safetensors").unlink()
    weights = folder / "CUT" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    shutil.copytree(tiny / "model", folder / "POINTER")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (folder / "POINTER" / "model.safetensors").write_text(pointer)
    (folder / "GGUFS").mkdir()
    (folder / "GGUFS" / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    (folder / "EMPTYDIR").mkdir()
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    files = {
        "BROKEN": ("broken.json", "a: [\n"),
        "LIST": ("list.yaml", "- a\n- b\n"),
        "TWICE": ("twice.yaml", "lora_r: 8\nlora_r: 9\n"),
        "FOREIGN": ("foreign.yaml", "{datasets: [], base_model: m, sequence_len: 64}"),
        "MISSPELT": ("misspelt.json", json.dumps({"zero_optimizaton": {"stage": 2}})),
        "HALVES": ("halves.json", json.dumps({"bf16": {"enabled": True}, "fp16": {"enabled": True}})),
        "TABS": ("tabs.yaml", "columns:\n\tuser: question\n"),
        "SLOTS": ("hosts", "node-0 slots 8\n"),
        "EMPTY": ("empty.jsonl", ""),
        "HALF": ("half.jsonl", '{"text": "a"}\n{"text": \n'),
    }
    rows = {
        "NULLS": [{"text": "a"}, {"text": None}],
        "NUMBERS": [{"text": 1}],
        "COLUMNS": [{"body": "a"}],
        "CHATS": [chat],
        "UNANSWERED": [{"prompt": "a", "completion": ""}],
    }
    words = {"MODEL": tiny / "model", "TEXTS": tiny / "texts.jsonl"}
    words |= {name: folder / name for name in ("BARE", "CUT", "POINTER", "GGUFS", "EMPTYDIR", "NEW", "NEW2", "OUT")}
    for name, (file, content) in files.items():
        words[name] = folder / file
        words[name].write_text(content)
    words["UTF16"] = folder / "utf16.jsonl"
    words["UTF16"].write_text('{"text": "a"}\n', encoding="utf-16")
    words |= {name: write_jsonl(folder / f"{name.lower()}.jsonl", content) for name, content in rows.items()}
    return words


@pytest.mark.parametrize(("case", "expected"), grid(CASES.items(), [(case, CASES[case]) for case in QUICK]))
def test_a_typed_mistake_is_one_line_with_exit_code_2(places, monkeypatch, case, expected):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    command, *words = [str(places.get(word, word)) for word in case.split()]
    entry = ENTRIES.get(command)
    result = run_entry(entry or "dsft.cli.main", words if entry else [command, *words])
    errors = [line for line in result.stderr.splitlines() if line.startswith("dsft: error: ")]
    print(f"exit code {result.returncode}", *errors, sep="\n")
    assert "Traceback" not in result.stderr, result.stderr[-2000:]
    assert result.returncode == 2, result.stdout + result.stderr
    assert len(errors) == 1, errors
    expected = expected if expected not in places else str(places[expected])
    assert expected in errors[0], errors
    assert 20 < len(errors[0]) < 900, errors
