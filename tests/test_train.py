"""`dsft.train`, and code of the user's own in a run: docs/python.md, and what it says."""

import re
import sys

import pytest
import torch
import yaml
from conftest import BIN, ROOT, flags, read_json
from ranks import run_entry
from safetensors.torch import load_file
from test_docs import blocks
from tiny import sentences, write_jsonl

from dsft.runtime.distributed import free_port

PAGE = ROOT / "docs" / "python.md"
CODE = """
import torch
from torch.nn import functional

def usual(logits, labels):
    return functional.cross_entropy(logits, labels, reduction="none")

def focal(logits, labels):
    nats = functional.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-nats)) ** 2 * nats

def mean(logits, labels):
    return functional.cross_entropy(logits, labels)

def reads_numbers(logits, labels):
    return usual(logits, labels) * float(logits.max() > -1e9)

def shout(row):
    return None if row["text"].startswith("the") else {"text": row["text"].upper()}

def broken(row):
    return {"text": row["texts"]}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny):
    """A folder with the scripts of the page, code and data."""
    folder = tmp_path_factory.mktemp("own")
    for block in blocks(PAGE, "python"):
        name = re.match(r"# (\w+\.py|in a notebook)\n", block)[1]
        (folder / ("notebook.py" if " " in name else name)).write_text(block)
    (folder / "own.py").write_text(CODE)
    rows = [{"question": text, "response": text[:number]} for number, text in enumerate(sentences(30))]
    write_jsonl(folder / "rows.jsonl", rows)
    return folder


@pytest.fixture
def configured(place, tiny, options):
    """Writes run.yaml into the folder of the scripts; returns the folder of the run."""

    def write(name: str, **changes):
        (place / "run.yaml").write_text(yaml.safe_dump(options(place / name, overwrite=True, **changes)))
        return place / name

    return write


def test_the_loss_of_the_page_trains_on_two_ranks(place, configured):
    run = configured("focal", logging_steps=1)
    result = run_entry("train_focal.py", [], world=2, folder=place)
    assert result.returncode == 0, result.stderr
    first, last = [entry for entry in read_json(run / "run.json")["results"]["log"] if "own_loss" in entry]
    assert 0 < first["own_loss"] < first["loss"] and last["loss"] < first["loss"]
    assert read_json(run / "run.json")["config"]["compute_loss"] == "__main__:focal"


def test_the_rows_of_the_page_are_prompts_of_which_short_answers_are_left_out(place, configured):
    run = configured("asked", data=str(place / "rows.jsonl"), map_row="my_code:ask")
    result = run_entry("dsft.train", ["--config", "run.yaml"], folder=place)
    assert result.returncode == 0, result.stderr
    counts = read_json(run / "run.json")["data"]
    assert (counts["rows"], counts["left_out_by_map_row"]) == (27, 3)
    assert "rows.jsonl (prompt_completion)" in result.stdout


def test_the_callback_of_the_page_stops_the_training(place, configured):
    configured("stopped", max_steps=50, logging_steps=1)
    result = run_entry("notebook.py", [], folder=place)
    assert result.returncode == 0, result.stderr
    steps, last = re.search(r"^(\d+) (\{.*)", result.stdout, re.MULTILINE).groups()
    assert 1 < int(steps) < 50 and "train_loss" in last


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_the_usual_loss_as_ones_own_gives_the_same_weights(place, options, world):
    """However a step is cut into micro batches, over padded rows."""
    weights = []
    for name, changes in {
        "plain": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1},
        "own": {"gradient_accumulation_steps": 2, "compute_loss": "own:usual"},
    }.items():
        case = options(place / f"{name}_{world}", packing=False, zero="2", logging_steps=1, overwrite=True, **changes)
        result = run_entry("dsft.train", flags(case), world=world, folder=place)
        assert result.returncode == 0, result.stderr
        log = read_json(place / f"{name}_{world}" / "run.json")["results"]["log"]
        weights.append((load_file(place / f"{name}_{world}" / "final" / "model.safetensors"), log[0]))
    (plain, plain_log), (same, own_log) = weights
    assert own_log["loss"] == pytest.approx(plain_log["loss"], rel=1e-6)
    assert own_log["own_loss"] == pytest.approx(own_log["loss"], rel=1e-6) and "own_loss" not in plain_log
    assert all(torch.allclose(plain[name], same[name], atol=2e-5) for name in plain)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"map_row": "own:broken"}, r"texts\.jsonl, line 1: map_row=own:broken raised KeyError: 'texts'\nTraceback"),
        ({"map_row": "own:brken"}, "map_row=own:brken: module 'own' has no attribute 'brken'$"),
        ({"compute_loss": "own:mean"}, r"compute_loss=own:mean returned a tensor \[\]; expected the loss of each lab"),
        ({"compute_loss": "own:usual", "label_smoothing_factor": 0.1}, r"smooth labels in your own loss$"),
        ({"callbacks": "own:usual"}, r"callbacks=own:usual: expected a class or an object of transformers\.Tr"),
    ],
)
def test_what_is_wrong_with_own_code_is_said_before_weights_load(place, options, changes, problem):
    result = run_entry("dsft.train", flags(options(place / "refused", **changes)), folder=place)
    assert result.returncode == 2 and re.search(problem, result.stderr, re.MULTILINE), result.stderr
    assert "site-packages" not in result.stderr and not (place / "refused" / "final").exists()


def test_one_process_raises_and_several_ranks_exit(place, configured):
    configured("raised", map_row="own:broken")
    (place / "catches.py").write_text(
        "import dsft\ntry:\n    dsft.train('run.yaml')\nexcept ValueError:\n    print(7)\n"
    )
    alone = run_entry("catches.py", [], folder=place)
    assert (alone.returncode, alone.stdout.splitlines()[-1:]) == (0, ["7"]), alone.stderr
    codes: list[int] = []
    together = run_entry("catches.py", [], world=2, folder=place, codes=codes)
    assert codes == [2, 2] and "dsft: error: data: " in together.stderr


def test_a_resume_with_other_code_notes_it_and_held_out_rows_are_mapped_too(place, tiny, options):
    case = {"save_strategy": "steps", "save_steps": 2, "map_row": "own:shout", "compute_loss": "own:usual"}
    case |= {"eval_data": str(tiny / "held_out.jsonl"), "eval_strategy": "steps", "eval_steps": 2}
    run = place / "resumed"
    first = run_entry("dsft.train", flags(options(run, **case)), folder=place)
    assert first.returncode == 0, first.stderr
    more = case | {"compute_loss": "own:focal", "max_steps": 4, "resume_from_checkpoint": "auto"}
    second = run_entry("dsft.train", flags(options(run, **more)), folder=place)
    assert second.returncode == 0, second.stderr
    assert re.search(r"the resume takes .*compute_loss own:focal \(source \w+\) \(own:usual \(source", second.stdout)
    scored = run_entry("dsft.eval_ppl", ["--run", str(run), "--output_dir", "scored"], folder=place)
    assert scored.returncode == 0, scored.stderr
    (held_out,) = read_json(place / "scored" / "perplexity.json")["results"]
    log = read_json(run / "run.json")["results"]["log"]
    perplexity = [entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry][-1]
    assert held_out["perplexity"] == pytest.approx(perplexity, rel=1e-6)


def test_a_change_of_the_functions_file_prepares_the_rows_again(place, options):
    counts = []
    # Of two lengths: Python takes a compiled file for the source's where both have the same second and size.
    for threshold in ("b", "zz"):
        (place / "cut.py").write_text(f"def before(row):\n    return row if row['text'] < '{threshold}' else None\n")
        run = place / f"cut_{threshold}"
        result = run_entry("dsft.train", flags(options(run, map_row="cut:before")), folder=place)
        assert result.returncode == 0, result.stderr
        counts.append(read_json(run / "run.json")["data"]["left_out_by_map_row"])
    assert counts[0] > counts[1] == 0


@pytest.mark.launch
@pytest.mark.exhaustive
def test_the_script_of_the_page_under_torchrun_and_deepspeed(place, configured, run):
    for launcher in ("torchrun --nproc_per_node 2 --master_port", "deepspeed --num_gpus 2 --master_port"):
        folder = configured("launched")
        words = [*launcher.split(), str(free_port()), place / "train_focal.py"]
        result = run(["env", f"PYTHONPATH={ROOT}", "bash", "-c", f"cd {place} && {' '.join(map(str, words))}"])
        assert result.returncode == 0, result.stderr[-3000:]
        assert read_json(folder / "run.json")["world_size"] == 2


@pytest.mark.launch
@pytest.mark.exhaustive
def test_a_notebook_shows_the_table_of_transformers(place, configured, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    configured("notebook", max_steps=4, logging_steps=1, disable_tqdm=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{BIN}:{sys.path[0]}:/usr/bin:/bin")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell((place / "notebook.py").read_text())])
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(place)}}).execute()
    shown = "".join(str(output) for output in notebook.cells[0].outputs)
    assert "Training Loss" in shown and "progress" in shown and "step      1" not in shown
