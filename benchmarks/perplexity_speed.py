"""Speed and memory of perplexity: dsft beside lm-evaluation-harness, Hugging Face's loop, Trainer.evaluate and the
arithmetic's floor.

    pip install -c constraints.txt -e '.[benchmarks]'
    python benchmarks/perplexity_speed.py --out speed.json
    python benchmarks/perplexity_speed.py --tokenizer gpt2/ --text wiki.txt --documents gsm8k.jsonl --out speed.json

Every program gets the same model (random weights, one seed), the same token ids, tokenised once, and the same windows:
a prefix token, then windows of 512 predicted tokens with one token of context. That is dsft's mode `rolling` and
lm-evaluation-harness's loglikelihood_rolling. Their perplexities must agree; the difference is printed. There are two
data sets: `full`, one text cut into full windows, and `mixed`, documents of mixed length, each by itself.

- Each program runs on one thread in a process of its own, forked before any model exists. Programs alternate, round
  after round.
- Speed is CPU milliseconds (process time) per scored token, so that waiting for a core does not count. Loading,
  tokenising and one warm-up on 16 tokens are not counted.
- Extra memory is the peak of resident memory while scoring (the kernel's VmHWM, reset before) above the resident
  memory after the warm-up.
- The floor is 2 x matmul parameters x tokens / rate of torch.matmul, in the same process and dtype, at the model's own
  shapes, each at its best of several numbers of rows. Matmul parameters are those of all linear layers and the head,
  tied or not. Products of attention, softmax and norms are not counted.
- ZeRO-3 on 2 ranks is compared with two replicas through the launcher, in wall seconds of scoring, and in CPU
  seconds of the whole launch.

Ratios are medians over rounds of the ratio within a round. Not measured: GPUs, trained models, several threads, loading
and tokenising. Absolute times of a shared machine mean little.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads would not survive the fork
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from python_docs import write_python_docs
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from dsft.perplexity.modes import Windows, rolling_spans
from dsft.perplexity.scoring import evaluate_windows
from dsft.units import IGNORED

WINDOW = 512
MIB = 1024**2
ROWS = ("speed", "zero")
TITLES = {
    "dsft": "dsft, batch_tokens {}",
    "lm_eval": "lm-evaluation-harness, batch {}",
    "hf_loop": "Hugging Face loop, batch {}",
    "trainer": "Trainer.evaluate, batch {}",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model",
        type=Path,
        help="folder, or config.json for random weights; by default a Llama of 17.7 M parameters with tied head",
    )
    parser.add_argument("--tokenizer", help="folder or hub id; by default the demo tokenizer")
    parser.add_argument("--vocab_size", type=int, default=50257, help="of the default model (default: %(default)s)")
    parser.add_argument("--text", type=Path, help="text file for full windows; by default the demo corpus")
    parser.add_argument(
        "--documents",
        type=Path,
        help="jsonl of documents, all text fields of a row joined; by default the demo instructions",
    )
    parser.add_argument("--tokens", type=int, default=12288, help="tokens of --text (default: %(default)s)")
    parser.add_argument("--max_documents", type=int, default=100, help="rows of --documents (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument(
        "--batch_tokens", nargs="+", type=int, default=[2048, 4096], help="of dsft's evaluator (default: %(default)s)"
    )
    parser.add_argument(
        "--with_auto",
        action="store_true",
        help="also lm-evaluation-harness with batch size auto (slow, and needs gigabytes)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--zero_repeats",
        type=int,
        default=3,
        help="rounds of the launcher's comparison; 0 leaves it out (default: %(default)s)",
    )
    parser.add_argument(
        "--zero_tokens", type=int, default=65536, help="tokens of that comparison (default: %(default)s)"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=[*ROWS],
        choices=ROWS,
        help="what is measured (default: all)",
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--verbose", action="store_true", help="let the subjects write to the screen")
    return parser.parse_args()


# --- model and data -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token ids of documents, each with the prefix token in front."""

    documents: list[list[int]]
    tokenizer: PreTrainedTokenizerBase

    @property
    def tokens(self) -> int:
        """Scored tokens: all but the prefixes."""
        return sum(len(ids) - 1 for ids in self.documents)

    def spans(self) -> list[list[int]]:
        """Token ids of every window: one of context, up to WINDOW to predict (the last of a longer document has more
        context).
        """
        return [ids[start:end] for ids in self.documents for start, end, _ in rolling_spans(0, len(ids), WINDOW)]


def prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def read_corpora(args: argparse.Namespace, demo: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Corpus]:
    """The two data sets. Tokens of the text are cut to full windows, documents to one window, so that every subject
    scores the same.
    """
    if args.text:
        text = args.text.read_text(encoding="utf-8")[: 12 * max(args.tokens, args.zero_tokens)]
    else:
        text = "\n\n".join(
            json.loads(line)["text"]
            for line in (demo / "corpus/train.jsonl").read_text(encoding="utf-8").splitlines()[:400]
        )
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    args.zero_text = tokenizer.decode(ids[: args.zero_tokens])
    lines = (
        (args.documents or demo / "instructions/train.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()[: args.max_documents]
    )
    texts = ["\n".join(value for value in json.loads(line).values() if isinstance(value, str)) for line in lines]
    documents = [ids[:WINDOW] for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if ids]
    prefix = prefix_token(tokenizer)
    full = ids[: min(args.tokens, len(ids)) // WINDOW * WINDOW]
    return {
        "full": Corpus(documents=[[prefix, *full]], tokenizer=tokenizer),
        "mixed": Corpus(documents=[[prefix, *document] for document in documents], tokenizer=tokenizer),
    }


def write_default_model(folder: Path, vocab_size: int) -> Path:
    """config.json of a Llama, of 17.7 M parameters with GPT-2's vocabulary."""
    LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder / "config.json"


def load_model(path: Path, dtype: str) -> PreTrainedModel:
    set_seed(0)
    if path.suffix == ".json":
        model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(path), dtype=getattr(torch, dtype))
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return model.eval()


# --- subjects: each gives a function that scores a corpus and returns nats -------------------------------------------


def dsft_subject(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_tokens: int
) -> Callable[[Corpus], float]:
    def run(corpus: Corpus) -> float:
        result = evaluate_windows(
            model,
            as_windows(corpus),
            pad_token_id=tokenizer.eos_token_id,
            batch_tokens=batch_tokens,
            device=torch.device("cpu"),
            collective_forward=False,
        )
        return result.nats

    return run


def as_windows(corpus: Corpus) -> Windows:
    """What `build_windows` makes of texts in the mode `rolling`, from token ids."""
    tokens = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in corpus.documents])
    ends = np.cumsum([len(ids) for ids in corpus.documents])
    starts = np.array([0, *ends[:-1]])
    scorable = np.ones(len(tokens), dtype=bool)
    scorable[starts] = False
    spans = [span for start, end in zip(starts, ends, strict=True) for span in rolling_spans(start, end, WINDOW)]
    zeros = np.zeros(len(starts), dtype=np.int64)
    return Windows(
        tokens=tokens,
        scorable=scorable,
        document_ends=ends,
        spans=np.array(spans),
        document_bytes=zeros,
        document_words=zeros,
        document_hashes=np.zeros(0, dtype=np.uint64),
    )


def lm_eval_subject(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int | str
) -> Callable[[Corpus], float]:
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=WINDOW, device="cpu")

    def run(corpus: Corpus) -> float:
        # A request's text is the number of its document: tokens are given, as to every subject.
        harness.tok_encode = lambda text, **_: corpus.documents[int(text)][1:]
        requests = [
            Instance(request_type="loglikelihood_rolling", doc={}, arguments=(str(i),), idx=i)
            for i in range(len(corpus.documents))
        ]
        return -sum(harness.loglikelihood_rolling(requests, disable_tqdm=True))

    return run


def hf_loop_subject(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> Callable[[Corpus], float]:
    """https://huggingface.co/docs/transformers/perplexity with stride = WINDOW: windows that do not overlap but for the
    token of context.
    """

    def run(corpus: Corpus) -> float:
        nats = 0.0
        for ids in corpus.spans():
            input_ids = torch.tensor([ids])
            with torch.no_grad():
                loss = model(input_ids, labels=input_ids.clone()).loss
            nats += loss.item() * (len(ids) - 1)
        return nats

    return run


def trainer_subject(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> Callable[[Corpus], float]:
    """Its eval_loss is a mean over batches, weighted by samples, so on documents of mixed length it is another
    number.
    """
    folder = tempfile.mkdtemp()
    options = TrainingArguments(
        output_dir=folder,
        per_device_eval_batch_size=batch_size,
        prediction_loss_only=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        rows = [row["input_ids"] for row in rows]
        longest = max(map(len, rows))
        pad = tokenizer.eos_token_id
        return {
            "input_ids": torch.tensor([row + [pad] * (longest - len(row)) for row in rows]),
            "labels": torch.tensor([row + [IGNORED] * (longest - len(row)) for row in rows]),
        }

    trainer = Trainer(model=model, args=options, data_collator=collate)

    def run(corpus: Corpus) -> float:
        rows = [{"input_ids": ids} for ids in corpus.spans()]
        return trainer.evaluate(rows)["eval_loss"] * corpus.tokens

    return run


SUBJECTS = {"dsft": dsft_subject, "lm_eval": lm_eval_subject, "hf_loop": hf_loop_subject, "trainer": trainer_subject}


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(subject: str, setting: int | str, path: Path, dtype: str, corpus: Corpus) -> dict[str, float]:
    """One subject on one corpus, in this process."""
    torch.set_num_threads(1)
    model = load_model(path, dtype)
    run = SUBJECTS[subject](model, corpus.tokenizer, setting)
    run(dataclasses.replace(corpus, documents=[corpus.documents[0][:17]]))
    before = resident_bytes_set_back()
    start = time.process_time()
    nats = run(corpus)
    seconds = time.process_time() - start
    extra = status_bytes("VmHWM") - before
    floor, gflops = floor_seconds_per_token(model)
    return {
        "cpu_ms_per_token": seconds / corpus.tokens * 1e3,
        "extra_memory_bytes": extra,
        "nats": nats,
        "perplexity": math.exp(nats / corpus.tokens),
        "floor_ms_per_token": floor * 1e3,
        "matmul_gflops": gflops,
    }


def resident_bytes_set_back() -> int:
    """Resident memory, after giving back what is free and setting the kernel's high-water mark to it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(field: str, process: int | str = "self") -> int:
    status = Path(f"/proc/{process}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@torch.no_grad()
def floor_seconds_per_token(model: PreTrainedModel) -> tuple[float, float]:
    """(seconds of the matrix products of one token at their best, their GFLOP/s)."""
    # A tied head is a linear layer of its own here, and counts.
    linears = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    counts: dict[tuple[int, int], int] = {}
    for weight in linears:
        counts[tuple(weight.shape)] = counts.get(tuple(weight.shape), 0) + 1
    seconds = sum(count * best_seconds_per_row(*shape, linears[0].dtype) for shape, count in counts.items())
    flops = 2 * sum(weight.numel() for weight in linears)
    return seconds, flops / seconds / 1e9


def best_seconds_per_row(outputs: int, inputs: int, dtype: torch.dtype) -> float:
    weight = torch.randn(outputs, inputs, dtype=dtype)
    best = math.inf
    for rows in (256, 512, 2048) if outputs * 2048 < 2**25 else (128, 256, 512):
        x = torch.randn(rows, inputs, dtype=dtype)
        out = torch.empty(rows, outputs, dtype=dtype)
        for _ in range(5):
            start = time.process_time()
            torch.matmul(x, weight.T, out=out)
            best = min(best, (time.process_time() - start) / rows)
    return best


def call_apart(function: Callable, *job, verbose: bool) -> dict[str, float]:
    """`function(*job)` in a process of its own."""

    def child(sender) -> None:
        with open(os.devnull, "w") as nothing, contextlib.ExitStack() as stack:
            if not verbose:
                stack.enter_context(contextlib.redirect_stdout(nothing))
                stack.enter_context(contextlib.redirect_stderr(nothing))
            try:
                sender.send(function(*job))
            except Exception:  # whatever it is, the parent reports it
                sender.send(traceback.format_exc())

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender,))
    process.start()
    sender.close()
    try:
        result = receiver.recv()
    except EOFError:
        result = "it ended without a word; out of memory?"
    process.join()
    if isinstance(result, str):
        raise RuntimeError(f"{function.__name__} of {job[0]} failed:\n{result}")
    return result


def zero_seconds(
    args: argparse.Namespace, model: Path, tokenizer: PreTrainedTokenizerBase, folder: Path, zero: str
) -> dict[str, float]:
    """Wall seconds of scoring on 2 ranks of the launcher, CPU seconds of the whole launch, and the perplexity."""
    repository = Path(__file__).resolve().parent.parent
    data, output = folder / "zero.jsonl", folder / f"zero{zero}"
    data.write_text(json.dumps({"text": args.zero_text}) + "\n", encoding="utf-8")
    command = [
        str(Path(sys.executable).parent / "deepspeed"),
        "--num_gpus",
        "2",
        "--master_port",
        str(29500 + os.getpid() % 1000),
        str(repository / "dsft/eval_ppl.py"),
        "--model",
        str(model),
        "--tokenizer",
        tokenizer.name_or_path,
        "--data",
        str(data),
        "--seq_len",
        str(WINDOW),
        "--dtype",
        "float32",
        "--batch_tokens",
        "4096",
        "--zero",
        zero,
        "--output_dir",
        str(output),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(repository),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    shutil.rmtree(output, ignore_errors=True)  # else the result of the round before is taken over
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment, capture_output=not args.verbose, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stderr or '')[-3000:]}")
    report = json.loads((output / "perplexity.json").read_text())["results"][0]
    return {name: report[name] for name in ("seconds", "perplexity", "tokens")} | {
        "launch_cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    }


def compare_zero(args: argparse.Namespace, model: Path, tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict:
    """ZeRO-3 on 2 ranks beside two replicas, in turn, on weights in a folder: random ones would come out differently
    when sharded.
    """
    load_model(model, "float32").save_pretrained(folder / "weights")
    launches: dict[str, list[dict]] = {"0": [], "3": []}
    for _ in range(args.zero_repeats):
        for zero, measured in launches.items():
            measured.append(zero_seconds(args, folder / "weights", tokenizer, folder, zero))
    pairs = list(zip(launches["0"], launches["3"], strict=True))
    return {
        "launches": launches,
        "time_over_replicas": statistics.median(sharded["seconds"] / replica["seconds"] for replica, sharded in pairs),
        "launch_cpu_over_replicas": statistics.median(
            sharded["launch_cpu_seconds"] / replica["launch_cpu_seconds"] for replica, sharded in pairs
        ),
        "relative_difference": pairs[0][1]["perplexity"] / pairs[0][0]["perplexity"] - 1,
    }


# --- results --------------------------------------------------------------------------------------------------------


def name_of(subject: str, setting: int | str) -> str:
    return TITLES[subject].format(setting)


def summarise(runs: list[dict], jobs: list[tuple[str, int | str]], dtype: str, data: str) -> dict:
    """Medians of each subject of one table, and of the ratios within rounds."""
    table = [run for run in runs if (run["dtype"], run["data"]) == (dtype, data)]
    by_job = {
        job: sorted((run for run in table if (run["subject"], run["setting"]) == job), key=lambda run: run["round"])
        for job in jobs
    }
    last_dsft = [job for job in jobs if job[0] == "dsft"][-1]
    rows = []
    for (subject, setting), runs_of_job in by_job.items():
        rows.append(
            {
                "name": name_of(subject, setting),
                "subject": subject,
                "setting": setting,
                "cpu_ms_per_token": statistics.median(run["cpu_ms_per_token"] for run in runs_of_job),
                "tokens_per_cpu_second": 1e3 / statistics.median(run["cpu_ms_per_token"] for run in runs_of_job),
                "extra_memory_mib": statistics.median(run["extra_memory_bytes"] for run in runs_of_job) / MIB,
                "share_of_floor": statistics.median(
                    run["floor_ms_per_token"] / run["cpu_ms_per_token"] for run in runs_of_job
                ),
                "time_over_dsft": statistics.median(
                    run["cpu_ms_per_token"] / ours["cpu_ms_per_token"]
                    for run, ours in zip(runs_of_job, by_job[last_dsft], strict=True)
                ),
                "perplexity": runs_of_job[0]["perplexity"],
                "relative_difference": runs_of_job[0]["perplexity"] / by_job[last_dsft][0]["perplexity"] - 1,
            }
        )
    return {
        "dtype": dtype,
        "data": data,
        "rows": rows,
        "floor_ms_per_token": statistics.median(run["floor_ms_per_token"] for run in table),
        "matmul_gflops": statistics.median(run["matmul_gflops"] for run in table),
    }


def goals_of(tables: list[dict], zero: dict | None) -> list[dict]:
    """The aims that dsft measures itself by, and what was reached."""
    goals = []

    def aim(text: str, reached: float, wanted: float, *, at_most: bool = False) -> None:
        goals.append(
            {
                "goal": text,
                "wanted": wanted,
                "reached": reached,
                "holds": reached <= wanted if at_most else reached >= wanted,
            }
        )

    for table in tables:
        where = f"{table['dtype']}, {table['data']}"
        fastest = {
            subject: min(row["time_over_dsft"] for row in table["rows"] if row["subject"] == subject)
            for subject in SUBJECTS
        }
        last_dsft = [row for row in table["rows"] if row["subject"] == "dsft"][-1]
        if table["data"] == "full":
            if table["dtype"] == "float32":
                aim(f"share of the floor ({where})", last_dsft["share_of_floor"], 0.75)
            aim(
                f"speed over lm-evaluation-harness at its best batch ({where})",
                fastest["lm_eval"],
                1.5 if table["dtype"] == "float32" else 2.0,
            )
            aim(f"speed over the Hugging Face loop ({where})", fastest["hf_loop"], 1.35)
            harness = next(row for row in table["rows"] if (row["subject"], row["setting"]) == ("lm_eval", 8))
            aim(
                f"extra memory over lm-evaluation-harness at batch 8 ({where})",
                last_dsft["extra_memory_mib"] / harness["extra_memory_mib"],
                0.1,
                at_most=True,
            )
        else:
            aim(f"speed over lm-evaluation-harness at its best batch ({where})", fastest["lm_eval"], 2.0)
    if zero:
        aim("time of ZeRO-3 on 2 ranks over two replicas", zero["time_over_replicas"], 1.3, at_most=True)
    return goals


def print_markdown(tables: list[dict], goals: list[dict], zero: dict | None) -> None:
    for table in tables:
        print(
            f"\n**{table['dtype']}, {table['data']}** (floor {table['floor_ms_per_token']:.3f} ms per token at"
            f" {table['matmul_gflops']:.0f} GFLOP/s)\n"
        )
        print(
            "| | CPU ms/token | tokens/s | share of floor | time over dsft | extra MiB | perplexity differs by"
            " |\n|---|---|---|---|---|---|---|"
        )
        for row in table["rows"]:
            print(
                f"| {row['name']} | {row['cpu_ms_per_token']:.3f} | {row['tokens_per_cpu_second']:.0f} |"
                f" {row['share_of_floor']:.0%} | {row['time_over_dsft']:.2f} | {row['extra_memory_mib']:.0f} |"
                f" {row['relative_difference']:.1e} |"
            )
    if zero:
        print(
            f"\nZeRO-3 on 2 ranks: {zero['time_over_replicas']:.2f} of the time of two replicas, with the start"
            f" {zero['launch_cpu_over_replicas']:.2f} of their CPU seconds; perplexity differs by"
            f" {zero['relative_difference']:.1e}"
        )
    if goals:
        print("\n| goal | wanted | reached | |\n|---|---|---|---|")
    for goal in goals:
        print(
            f"| {goal['goal']} | {goal['wanted']} | {goal['reached']:.2f} |"
            f" {'holds' if goal['holds'] else 'does not hold'} |"
        )


def surroundings(args: argparse.Namespace) -> dict:
    """Hardware, versions and the command; of paths only the last part."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    flags = Path("/proc/cpuinfo").read_text()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "amx_bf16": "amx_bf16" in flags,
        "python": platform.python_version(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "deepspeed", "lm_eval")
        },
        "command": " ".join(
            [
                "python",
                "benchmarks/perplexity_speed.py",
                *(Path(word).name if "/" in word else word for word in sys.argv[1:]),
            ]
        ),
        "window": WINDOW,
        "threads": 1,
        "rounds": args.repeats,
    }


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    begun = time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not (args.tokenizer and args.text and args.documents):
            write_python_docs(folder / "demo")
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or folder / "demo/model")
        model = args.model or write_default_model(folder / "model", args.vocab_size)
        corpora = read_corpora(args, folder / "demo", tokenizer)
        jobs = [
            *(("dsft", size) for size in args.batch_tokens),
            ("lm_eval", 1),
            ("lm_eval", 8),
            ("hf_loop", 1),
            ("trainer", 8),
        ]
        jobs += [("lm_eval", "auto")] if args.with_auto else []
        runs = []
        for turn in range(args.repeats if "speed" in args.rows else 0):
            for dtype in args.dtypes:
                for data, corpus in corpora.items():
                    for subject, setting in jobs:
                        result = call_apart(measure, subject, setting, model, dtype, corpus, verbose=args.verbose)
                        runs.append(
                            {
                                "round": turn,
                                "dtype": dtype,
                                "data": data,
                                "subject": subject,
                                "setting": setting,
                                **result,
                            }
                        )
                        print(
                            f"{time.time() - begun:5.0f} s  round {turn + 1}  {dtype} {data}:"
                            f" {name_of(subject, setting)} {result['cpu_ms_per_token']:.3f} ms, floor"
                            f" {result['floor_ms_per_token']:.3f} ms",
                            file=sys.stderr,
                        )
        zero = None
        if args.zero_repeats and "zero" in args.rows:
            zero = compare_zero(args, model, tokenizer, folder)
        tables = [summarise(runs, jobs, dtype, data) for dtype in args.dtypes for data in corpora] if runs else []
        goals = goals_of(tables, zero)
        print_markdown(tables, goals, zero)
        counts = {
            data: {"documents": len(corpus.documents), "windows": len(corpus.spans()), "scored_tokens": corpus.tokens}
            for data, corpus in corpora.items()
        }
        results = {**surroundings(args), "data": counts, "goals": goals, "tables": tables, "zero": zero, "runs": runs}
        results["load_average"] = os.getloadavg()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
