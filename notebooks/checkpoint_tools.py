"""Helps the notebooks beside it, beside the Python API, so that their cells stay short.

Finds the models of a run's folder, reads results back, generates, and draws: tables and coloured texts are HTML strings
(everything in them escaped), plots are matplotlib figures. It computes no perplexity of its own (`perplexity/` does),
changes no file of a run, and loads each model in full on one device.
"""

import contextlib
import html
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dsft.checkpoints.manifest import checkpoints, read_trainer_state
from dsft.checkpoints.run_folder import FINAL, path_of, read_options_of_run, read_run
from dsft.config.options import EvalConfig
from dsft.config.reader import make_config
from dsft.data.formats import Chat, Pair
from dsft.data.tokens import TokensBuilder, encode_open
from dsft.data.training_data import check_sources
from dsft.errors import raise_if_any
from dsft.launch import launch
from dsft.models import tokenizer as models_tokenizer
from dsft.models.build import resolve_dtype
from dsft.models.tokenizer import load_tokenizer
from dsft.perplexity.compare import Comparisons, compare_results, read_evaluations
from dsft.perplexity.documents import Documents
from dsft.perplexity.evaluation import loaded_for_scoring
from dsft.perplexity.of_training import shared_options
from dsft.runtime.console import set_up_screen as set_up_screen
from dsft.runtime.hardware import default_ranks, has_gpu

DARKEST_NATS = 8.0
"""Tokens of this loss or more have the full colour: a probability of 1 in 3,000 or less."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Names something of a run that can be evaluated."""

    name: str
    kind: Literal["base", "model", "adapter", "shards"]
    """shards: DeepSpeed's files alone, as a checkpoint of which the 16-bit weights were not kept."""
    path: str
    step: int | None = None
    tokens_seen: int | None = None
    """Tokens trained on when it was saved, over all ranks, without padding; None where that is not known."""


def find_models(run_folder: str) -> list[Model]:
    """List the base model of a run, its complete checkpoints by step, exports in its folder, and the final model.

    Raises:
        UserError: where the folder is no run.
    """
    folder, options = Path(run_folder), read_options_of_run(run_folder)
    base = path_of(options["adapter"] or options["model"], run_folder)
    models = [Model(name="base", kind="base", path=base, step=0, tokens_seen=0)]
    seen = {}  # by the name of a checkpoint: its step and tokens
    for path in checkpoints(run_folder):
        if kind := kind_of(path):
            state = read_trainer_state(path)
            seen[path.name] = {"step": state["global_step"], "tokens_seen": state["num_input_tokens_seen"]}
            models.append(Model(name=path.name, kind=kind, path=str(path), **seen[path.name]))
    for path in sorted(folder.iterdir()):
        is_export = path.name not in ("base", FINAL) and not path.name.startswith("checkpoint-")
        if is_export and (kind := kind_of(path)):
            models.append(Model(name=path.name, kind=kind, path=str(path)))
    if kind := kind_of(folder / FINAL):
        run = read_run(run_folder)
        results = run.get("results", {})
        steps = {"step": results.get("steps"), "tokens_seen": results.get("tokens_seen")}
        if run["config"].get("load_best_model_at_end") and results.get(
            "best_checkpoint"
        ):  # which is then the final one
            steps = seen.get(Path(results["best_checkpoint"]).name, {})
        models.append(Model(name=FINAL, kind=kind, path=str(folder / FINAL), **steps))
    return models


def kind_of(folder: Path) -> str | None:
    """Tell "adapter", "model" or "shards", or None where there is no folder or it holds no weights."""
    if (folder / "adapter_config.json").is_file():
        return "adapter"
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return "model"
    return "shards" if any(folder.glob("global_step*")) else None


def evaluation_options(run_folder: str) -> dict[str, Any]:
    """Return the options of a run that its evaluation must share, such as dtype, tokenizer, templates and columns."""
    return shared_options(read_options_of_run(run_folder), run_folder)


def usual_ranks() -> int:
    """One for each GPU of this machine; without GPUs 1."""
    return default_ranks() if has_gpu() else 1


def evaluate_on_ranks(num_ranks: int, models: Iterable[str], data: str, **options: Any) -> None:
    """Run `dsft eval` on so many ranks of this machine; the results go to the option `output_dir`.

    Raises:
        RuntimeError: where it fails; its own messages stand above.
    """
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    code = launch(["--no_preflight", "eval", "--num_gpus", str(num_ranks), "--model", *models, "--data", data, *words])
    if code:
        raise RuntimeError(
            f"dsft eval ended with exit code {code}; its messages stand above, or in the terminal that Jupyter was"
            " started in"
        )


def read_results(folder: str, paths: dict[str, str], data: str) -> tuple[dict[str, dict], dict[str, list[dict]]]:
    """Read (reports, documents) of the models of `paths` (name -> path) on `data`, both by name."""
    reports = json.loads((Path(folder) / "perplexity.json").read_text(encoding="utf-8"))["results"]
    by_path = {report["model"]: report for report in reports if report["data"] == data}
    rows = pyarrow.parquet.read_table(Path(folder) / "documents.parquet").to_pylist()
    documents = {
        name: [row for row in rows if (row["model"], row["data"]) == (path, data)] for name, path in paths.items()
    }
    return {name: by_path[path] for name, path in paths.items()}, documents


def compare_models(folder: str, paths: dict[str, str], data: str, *, base: str) -> Comparisons:
    """Compare the models of `paths` (name -> path) with one of them, by its name, on `data`."""
    results = [item for item in read_evaluations([folder]) if item.data == data and item.model in paths.values()]
    return compare_results(results, base=paths[base])


@contextlib.contextmanager
def loaded(path: str, **options: Any) -> Iterator[tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """Load (model, tokenizer) on this process's device for a `with`; the memory is given back at its end.

    Args:
        options: those of `dsft eval`.
    """
    config = replace(_eval_config({"data": "unused"} | options), model=path)
    with loaded_for_scoring(config, "0", resolve_dtype(config.dtype)) as model:
        yield model, load_tokenizer(config)


def _eval_config(options: dict[str, Any]) -> EvalConfig:
    problems: list[str] = []
    config = make_config(EvalConfig, {"model": "unused"} | options, problems)
    raise_if_any(problems)
    return config


@torch.no_grad()
def token_nats(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, *, seq_len: int
) -> list[tuple[str, float | None]]:
    """Score the first `seq_len` tokens of `text`: (piece of the text, its loss in nats, None without a token before).

    The pieces joined are the text again. Tokens that share a character are one piece, with the sum of their losses.
    """
    encoded = tokenizer(
        text, return_offsets_mapping=True, return_special_tokens_mask=True, truncation=True, max_length=seq_len
    )
    ids_T = torch.tensor(encoded["input_ids"], device=model.device)
    if not len(ids_T):
        return []
    logits_TV = model(input_ids=ids_T[None], use_cache=False).logits[0]
    nats_T = torch.nn.functional.cross_entropy(logits_TV[:-1].float(), ids_T[1:], reduction="none")
    nats: list[float | None] = [None, *nats_T.tolist()]
    pieces: list[tuple[str, float | None]] = []
    shown = 0
    for (_, end), special, value in zip(encoded["offset_mapping"], encoded["special_tokens_mask"], nats, strict=True):
        if special:
            continue  # BOS, for example: context, but no part of the text
        if end > shown or not pieces:
            pieces.append((text[shown:end], value))
        elif value is not None:
            pieces[-1] = (pieces[-1][0], (pieces[-1][1] or 0.0) + value)
        shown = max(shown, end)
    return pieces


def read_documents(data: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> tuple[list[str], list[str]]:
    """Read (texts, prompts) of the documents of `data`, in the order of documents.parquet.

    A prompt is the first eight words of a text, the prompt of a completion, or a chat up to the first answer.
    """
    config = _eval_config(options | {"data": data})
    problems: list[str] = []
    sources = check_sources([data], config, tokenizer, key="data", problems=problems)
    raise_if_any(problems)
    rules = sources[0].rules
    rows = Documents(max_documents=config.max_documents).rows(sources[0].rows(), rules)
    samples = TokensBuilder([*rows], rules).samples
    if rules.is_text:
        texts = [sample.text for sample in samples]
        return texts, [re.match(r"(?:\s*\S+){0,8}", text)[0] for text in texts]

    def render(chat: list[dict], **options: Any) -> str:
        """Without the BOS token, which tokenising the text adds again."""
        return tokenizer.apply_chat_template(chat, tokenize=False, **options).removeprefix(tokenizer.bos_token or "")

    texts, prompts = [], []
    for sample in samples:
        text = prompt = ""
        if isinstance(sample, Pair):
            text, prompt = sample.prompt + sample.completion, sample.prompt
        elif isinstance(sample, Chat):
            trained = [each["role"] == "assistant" and each.get("weight", 1) > 0 for each in sample.messages]
            first = trained.index(True)
            text, prompt = render(sample.messages), render(sample.messages[:first], add_generation_prompt=True)
        texts.append(text)
        prompts.append(prompt)
    return texts, prompts


def generate(model: Any, tokenizer: Any, prompt: str) -> str:
    """Continue `prompt` by at most 40 tokens, always the likeliest."""
    (ids,) = encode_open(tokenizer, [prompt])
    return tokenizer.decode(models_tokenizer.generate(model, tokenizer, ids, max_new_tokens=40))


def table(rows: list[dict[str, Any]]) -> str:
    """Return an HTML table with the keys of the first row as its head; floats with seven digits."""
    style = "text-align:left;vertical-align:top;white-space:pre-wrap;max-width:40em;overflow-wrap:anywhere"
    head = "".join(f'<th style="{style}">{html.escape(name)}</th>' for name in rows[0])
    cells = ["".join(f'<td style="{style}">{_cell(value)}</td>' for value in row.values()) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    text = f"{value:.7g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
    return html.escape("" if text is None else str(text))


def best_and_worst(
    documents: list[dict], texts: list[str], *, number: int = 3, least_tokens: int = 1, longest: int = 300
) -> list[dict]:
    """Return rows for `table`: the documents with the least and the most nats per token.

    Documents with fewer than `least_tokens` scored tokens are left out.
    """
    scored = [row for row in documents if row["tokens"] >= max(1, least_tokens)]
    scored.sort(key=lambda row: row["nats"] / row["tokens"])
    number = min(number, len(scored) // 2)
    chosen = [("best", row) for row in scored[:number]] + [("worst", row) for row in scored[len(scored) - number :]]
    return [
        {
            "": end,
            "document": row["document"],
            "nats per token": round(row["nats"] / row["tokens"], 3),
            "tokens": row["tokens"],
            "text": texts[row["document"]][:longest] + ("..." if len(texts[row["document"]]) > longest else ""),
        }
        for end, row in chosen
    ]


def coloured(pieces: list[tuple[str, float | None]], *, title: str) -> str:
    """Return HTML of a text, each piece the redder the more nats it cost; the number shows under the mouse."""
    spans = []
    for text, nats in pieces:
        hint = "nothing stands before it" if nats is None else f"{nats:.2f} nats"
        spans.append(f'<span style="background:{_colour(nats or 0.0)}" title="{hint}">{html.escape(text)}</span>')
    total = sum(nats for _, nats in pieces if nats is not None)
    panel = "flex:1;min-width:20em;color:black;background:white;padding:0.5em"
    body = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1.6"
    return (
        f'<div style="{panel}"><b>{html.escape(title)}</b>, {total:.1f} nats in all'
        f'<div style="{body}">{"".join(spans)}</div></div>'
    )


def side_by_side(*panels: str) -> str:
    """Put HTML panels next to each other, above them the scale of colours."""
    scale = "".join(
        f'<span style="background:{_colour(nats)};padding:0 0.6em">{nats:g}</span>'
        for nats in (0.0, 2.0, 4.0, 6.0, DARKEST_NATS)
    )
    return (
        f'<div style="color:black;background:white;padding:0.5em">nats: {scale} and more</div><div'
        f' style="display:flex;flex-wrap:wrap">{"".join(panels)}</div>'
    )


def _colour(nats: float) -> str:
    return f"rgba(220,50,30,{0.75 * min(nats / DARKEST_NATS, 1.0):.3f})"


def plot_perplexity(models: list[Model], perplexities: dict[str, float], log: list[dict]):
    """Return a figure of perplexity against tokens seen, with the held-out perplexity that training itself logged.

    Args:
        perplexities: by the name of the model.
        log: `results.log` of run.json.
    """
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    logged = [(entry["num_input_tokens_seen"], entry["eval_perplexity"]) for entry in log if "eval_perplexity" in entry]
    if logged:
        axis.plot(*zip(*logged, strict=True), "-", color="0.6", label="logged in training, on its own held-out data")
    points: dict[str, list[tuple[int, float]]] = {}
    names: dict[int, list[str]] = {}
    for model in models:
        if model.tokens_seen is not None and model.name in perplexities:
            points.setdefault(model.kind, []).append((model.tokens_seen, perplexities[model.name]))
            names.setdefault(model.tokens_seen, []).append(model.name)
    for kind, marker in {"base": "s", "model": "o", "adapter": "o", "shards": "^"}.items():
        if kind in points:
            axis.plot(*zip(*points[kind], strict=True), marker, label=f"measured here: {kind}")
    above = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center", "fontsize": 8}
    for tokens, here in names.items():
        axis.annotate("\n".join(here), (tokens, max(perplexities[name] for name in here)), **above)
    values = [value for kind in points.values() for _, value in kind]
    if values and max(values) > 20 * min(values):
        axis.set_yscale("log")  # a model with random weights would flatten all others
    axis.margins(x=0.1, y=0.2)
    axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axis.set(xlabel="tokens seen in training", ylabel="perplexity")
    axis.legend()
    return finished(figure, axis)


def plot_documents(before: list[dict], after: list[dict], *, names: tuple[str, str]):
    """Return a figure of nats per token of each document before and after; below the line it got better."""
    from matplotlib import pyplot

    points = [
        (a["nats"] / a["tokens"], b["nats"] / b["tokens"]) for a, b in zip(before, after, strict=True) if a["tokens"]
    ]
    figure, axis = pyplot.subplots(figsize=(4.5, 4.5), layout="constrained")
    axis.plot(*zip(*points, strict=True), "o", alpha=0.5)
    ends = [min(min(point) for point in points), max(max(point) for point in points)]
    axis.plot(ends, ends, "-", color="0.6")
    better = sum(y < x for x, y in points)
    title = f"{better:,} of {len(points):,} documents got better"
    axis.set(title=title, xlabel=f"nats per token, {names[0]}", ylabel=f"nats per token, {names[1]}")
    axis.set_aspect("equal")
    return finished(figure, axis)


def finished(figure, axis):
    """Close a figure in pyplot, so that it shows where a cell returns it, and not a second time."""
    from matplotlib import pyplot

    axis.grid(alpha=0.3)
    pyplot.close(figure)
    return figure
