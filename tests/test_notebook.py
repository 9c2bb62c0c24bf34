"""The notebooks from top to bottom on tiny real runs, unchanged but for environment variables; and the parts of them
that are easy to get wrong.
"""

import ast
import html
import json
import re
import sys

import pytest
import torch
from conftest import ROOT, flags, read_json
from ranks import run_entry
from tiny import sentences, write_jsonl
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(ROOT / "notebooks"))

import checkpoint_tools as tools

import dsft

NOTEBOOK = ROOT / "notebooks" / "evaluate_checkpoints.ipynb"
MARKUP = "<b>&amp;</b> "
"""Begins every held-out text: a browser must show it, not obey it."""


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return write_jsonl(
        tmp_path_factory.mktemp("held_out") / "texts.jsonl", [{"text": MARKUP + text} for text in sentences(20, seed=1)]
    )


@pytest.fixture
def trained(options, held_out, tmp_path):
    """Trains in one process, evaluating and saving every 2 of 4 steps; the run's folder and its held-out perplexity by
    step.
    """

    def train(**changes):
        folder = tmp_path / "run"
        every = {
            "eval_strategy": "steps",
            "eval_steps": 2,
            "eval_on_start": True,
            "save_strategy": "steps",
            "save_steps": 2,
            "save_total_limit": 5,
        }
        case = {"max_steps": 4, "eval_data": str(held_out)} | every | changes
        result = run_entry("dsft.train", flags(options(folder, **case)))
        assert result.returncode == 0, result.stderr[-3000:]
        log = read_json(folder / "run.json")["results"]["log"]
        return folder, {entry["step"]: entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry}

    return train


def execute(monkeypatch, folder, held_out, *, notebook=NOTEBOOK, **environment) -> list[dict]:
    """All outputs of a notebook's cells in order; an exception in a cell is one here."""
    import nbformat
    from nbclient import NotebookClient

    values = {"RUN": folder, "DATA": held_out, "SEQ_LEN": 64, "OUT": folder / "perplexity"} | environment
    for name, value in values.items():
        monkeypatch.setenv(f"DSFT_{name}", str(value))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    content = nbformat.read(notebook, as_version=4)
    NotebookClient(
        content, timeout=None, kernel_name="python3", resources={"metadata": {"path": str(notebook.parent)}}
    ).execute()
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    return outputs


def tables(outputs) -> list[list[list[str]]]:
    """The cells of each HTML table, row by row, as text."""
    pages = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    rows = [
        [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
            for row in re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
        ]
        for page in pages
        if "<table>" in page
    ]
    return [[[html.unescape(cell) for cell in row] for row in table] for table in rows]


def shown_perplexities(outputs) -> dict[str, float]:
    """By model, of the table of results."""
    table = next(table for table in tables(outputs) if table[0][:2] == ["model", "perplexity"])
    return {row[0]: float(row[1]) for row in table[1:]}


def texts_in(page: str) -> list[str]:
    """What a browser would show of each coloured text."""
    return [
        html.unescape("".join(re.findall(r'<span style="[^"]*" title="[^"]*">(.*?)</span>', panel, re.DOTALL)))
        for panel in page.split("monospace")[1:]
    ]


@pytest.mark.launch
def test_the_notebook_shows_what_training_logged_for_every_kind_of_checkpoint(trained, tiny, held_out, monkeypatch):
    folder, logged = trained(model=str(tiny / "model" / "config.json"), learning_rate=1e-2)
    (folder / "checkpoint-2" / "model.safetensors").unlink()  # DeepSpeed's shards alone
    outputs = execute(monkeypatch, folder, held_out)

    listed = next(table for table in tables(outputs) if table[0][:2] == ["name", "kind"])
    assert [row[:2] for row in listed[1:]] == [
        ["base", "base"],
        ["checkpoint-2", "shards"],
        ["checkpoint-4", "model"],
        ["final", "model"],
    ]
    expected = {"base": logged[0], "checkpoint-2": logged[2], "checkpoint-4": logged[4], "final": logged[4]}
    assert shown_perplexities(outputs) == pytest.approx(expected, rel=1e-5)
    assert any("Perplexity:" in output.get("text", "") and "token/s" in output["text"] for output in outputs)  # the bar

    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 2 and all(len(picture) > 10_000 for picture in pictures)
    coloured = next(
        output["data"]["text/html"]
        for output in outputs
        if "nats in all" in output.get("data", {}).get("text/html", "")
    )
    base, finetuned = texts_in(coloured)
    assert base == finetuned and base.startswith(MARKUP)
    documents = next(table for table in tables(outputs) if table[0][1] == "document")
    assert [row[0] for row in documents[1:]] == ["best"] * 3 + ["worst"] * 3
    generated = next(table for table in tables(outputs) if table[0][0] == "prompt")
    assert generated[0] == ["prompt", "base", "final"] and len(generated) == 4
    assert not any(cell.startswith("[") for row in generated for cell in row), "text, not ids"
    assert not any("<b>&amp;" in output.get("data", {}).get("text/html", "") for output in outputs)


@pytest.mark.exhaustive
@pytest.mark.launch
def test_the_notebook_starts_the_launcher_for_a_lora_run(trained, held_out, monkeypatch):
    folder, logged = trained(method="lora", lora_r=4)
    outputs = execute(monkeypatch, folder, held_out, RANKS=2, MODELS="base checkpoint-2 final")
    assert shown_perplexities(outputs) == pytest.approx(
        {"base": logged[0], "checkpoint-2": logged[2], "final": logged[4]}, rel=1e-5
    )
    assert {report["ranks"] for report in read_json(folder / "perplexity" / "perplexity.json")["results"]} == {2}
    assert {model.kind for model in tools.find_models(str(folder))} == {"base", "adapter"}


@pytest.mark.parametrize("path", [NOTEBOOK], ids=lambda path: path.stem)
def test_notebooks_are_kept_with_outputs_that_a_page_can_show(path):
    text = path.read_text()
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert len(text) < 600_000 and not re.search(r"[^.\w/](/tmp|/home|/root|/mnt)/", text)
    assert "DSFT_RUN" in "".join(code[0]["source"])


@pytest.mark.parametrize("path", [NOTEBOOK], ids=lambda path: path.stem)
def test_cells_import_of_dsft_its_public_api_alone(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    tree = ast.parse("\n".join("".join(cell["source"]) for cell in cells))
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert "dsft" in imported and not [name for name in imported if name.startswith("dsft.")]
    used = {
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dsft"
    }
    assert used and used <= {*dir(dsft)}


TEXT = "the big model 😀 learns 漢字"
"""Its last words are characters of several tokens."""


@pytest.fixture
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny / "model")


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


def plain_nats(model, ids: list[int]) -> list[float]:
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return [-log_probs[position, token].item() for position, token in enumerate(ids[1:])]


def test_pieces_are_the_text_and_their_losses_those_of_its_tokens(model, tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    pieces = tools.token_nats(model, tokenizer, TEXT, seq_len=256)
    assert "".join(piece for piece, _ in pieces) == TEXT
    assert len(pieces) < len(ids) and all(piece for piece, _ in pieces), "tokens of one character are one piece"
    assert pieces[0][1] is None, "nothing stands before the first token"
    expected = plain_nats(model, ids)
    assert sum(nats for _, nats in pieces[1:]) == pytest.approx(sum(expected), rel=1e-5)
    assert pieces[1][1] == pytest.approx(expected[0], rel=1e-5)


def test_a_bos_token_is_context_and_no_piece(model, tokenizer):
    bos = tokenizer.convert_tokens_to_ids("<|user|>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", bos)])
    ids = tokenizer(TEXT)["input_ids"]
    assert ids[0] == bos
    pieces = tools.token_nats(model, tokenizer, TEXT, seq_len=256)
    assert "".join(piece for piece, _ in pieces) == TEXT
    assert pieces[0][1] == pytest.approx(plain_nats(model, ids)[0], rel=1e-5)
