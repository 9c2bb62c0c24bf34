"""The law: each token once, and the same bits on any number of ranks."""

import math

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from conftest import flags, read_json
from dsft.api import evaluate_perplexity
from dsft.config import EvalConfig
from dsft.evaluation import evaluate
from dsft.perplexity import evaluate_sequences, form_batches
from dsft.problems import TrainingStopped, UserError
from dsft.samples import IGNORED
from rank_helper import on_ranks
from tiny import write_texts


def _sums(many_options: list[dict]) -> list[tuple[float, int]]:
    results = [evaluate(EvalConfig(**options)).perplexity for options in many_options]
    return [(result.nats, result.tokens) for result in results]


def plain_nats(model_folder, sequences) -> tuple[float, int]:
    """The definition, one sequence at a time, with full logits."""
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    nats, tokens = 0.0, 0
    for row in sequences:
        with torch.no_grad():
            log_probs = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].double().log_softmax(-1)
        for position, target in enumerate(row["labels"][1:]):
            if target != IGNORED:
                nats -= log_probs[position, target].item()
                tokens += 1
    return nats, tokens


def test_batches_take_each_sequence_once_and_keep_the_budget():
    lengths = [5, 300, 7, 7, 64, 1, 12]
    batches = form_batches(lengths, 64)
    assert sorted(index for batch in batches for index in batch) == list(range(7))
    assert all(len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= 64 for batch in batches)


@pytest.mark.parametrize("data", ["held_out.jsonl", "pairs.jsonl"])
def test_perplexity_is_the_definition(tiny, data):
    from dsft.config import TrainConfig
    from dsft.model import load_tokenizer
    from dsft.samples import build_samples
    from dsft.text_data import read_rows

    config = TrainConfig(model=str(tiny / "model"), data=[str(tiny / data)], seq_len=64)
    samples = build_samples(read_rows(config.data, config, key="data", split="train"), config, load_tokenizer(config), key="data")
    nats, tokens = plain_nats(tiny / "model", samples.sequences)
    result = evaluate_perplexity(model=str(tiny / "model"), data=str(tiny / data), seq_len=64, batch_tokens=200, progress=False).perplexity
    assert result.tokens == tokens == samples.counts["trained_tokens"]
    assert result.nats == pytest.approx(nats, rel=1e-6)
    assert result.perplexity == math.exp(result.nats / result.tokens)


def test_ppl_has_the_same_bits_on_1_2_3_and_4_ranks_replicated_and_sharded(tiny, tmp_path):
    """For windows of text, for answers, and for fewer batches than ranks."""
    common = {"model": str(tiny / "model"), "seq_len": 64, "batch_tokens": 200}
    few = write_texts(tmp_path / "few.jsonl", 3)
    data = [tiny / "held_out.jsonl", tiny / "pairs.jsonl", few]
    cases = {zero: [common | {"data": [str(path)], "zero": zero} for path in data] for zero in ("0", "3")}
    expected = on_ranks(1, _sums, cases["0"])[0]
    assert len(set(expected)) == 3
    for world in (1, 2, 3, 4):
        for found in on_ranks(world, _sums, cases["0"] + cases["3"]):
            assert found == expected + expected, world


def test_batch_size_does_not_move_the_result(tiny):
    results = [
        evaluate_perplexity(model=str(tiny / "model"), data=str(tiny / "held_out.jsonl"), seq_len=64, batch_tokens=budget, progress=False).perplexity
        for budget in (64, 128, 4096)
    ]
    assert len({result.tokens for result in results}) == 1
    assert results[0].nats == pytest.approx(results[1].nats, rel=1e-6) == pytest.approx(results[2].nats, rel=1e-6)


def test_a_sequence_of_one_token_is_counted_as_unscored(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    rows = Dataset.from_list([{"input_ids": [5], "labels": [5]}, {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}])
    result = evaluate_sequences(model, rows, pad_token_id=0, batch_tokens=64, device=torch.device("cpu"), collective_forward=False)
    assert (result.sequences, result.tokens, result.unscored_sequences) == (2, 2, 1)


def test_nan_weights_stop_the_evaluation_and_name_the_sequence(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = math.nan
    rows = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in ([5, 6, 7], [5, 9, 7])])
    with pytest.raises(TrainingStopped, match="sequence 2 of 2"):
        evaluate_sequences(model, rows, pad_token_id=0, batch_tokens=3, device=torch.device("cpu"), collective_forward=False)


def test_problems_of_the_evaluator_come_together(tiny):
    with pytest.raises(UserError) as caught:
        evaluate_perplexity(model="./nowhere", data="nowhere.jsonl", bogus=1)
    text = str(caught.value)
    assert all(part in text for part in ("bogus: unknown key", "./nowhere", "nowhere.jsonl does not exist"))


@pytest.mark.launch
def test_every_launcher_gives_the_same_bits(run, tiny, tmp_path):
    launchers = {
        "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", "29621", "dsft/eval_ppl.py"],
        "module": ["deepspeed", "--num_gpus", "2", "--master_port", "29622", "--module", "dsft.eval_ppl"],
        "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", "29623", "dsft/eval_ppl.py"],
        "accelerate": ["accelerate", "launch", "--config_file", "ds_configs/accelerate/zero3_1x8.yaml", "--num_processes", "2", "dsft/eval_ppl.py"],
        "python": ["python", "dsft/eval_ppl.py"],
        "dsft": ["dsft", "eval"],
    }
    nats = {}
    for name, launcher in launchers.items():
        options = {"model": tiny / "model", "data": tiny / "held_out.jsonl", "seq_len": 64, "output_dir": tmp_path / name}
        result = run([*launcher, *flags(options)])
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("nats per token") == 1  # rank 0 alone prints
        report = read_json(tmp_path / name / "perplexity.json")
        assert report["ranks"] == (1 if name == "python" else ranks_of_this_machine() if name == "dsft" else 2)
        nats[name] = report["nats"]
    assert len(set(nats.values())) == 1, nats


def ranks_of_this_machine() -> int:
    from dsft.machine import default_ranks

    return default_ranks()
