"""The loss is averaged over all trained tokens of the global batch: batch size, accumulation and ranks can be
exchanged, whatever the batches are made of.
"""

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
import transformers
from conftest import grid, needed_cases, read_json
from ranks import train_all
from tiny import write_model, write_tokenizer

pytestmark = pytest.mark.launch
STEPS, SAVED_AT = 5, 2
DATA = ("padded", "packed", "mixed", "text", "own-loss", "unshifted")
SHARED = {1: ((8, 1), (2, 4)), 2: ((4, 1), (1, 4), (2, 2))}
"""Ranks -> (batch size of a rank, accumulation), each 8 sequences or rows per step."""
SHAPES = [f"{world}-{micro}" for world, shapes in SHARED.items() for micro, _ in shapes][1:]
"""Ranks and batch size of the runs that equal the one of 1 rank without accumulation."""
QUICK = ("padded", "packed")


OWN_LOSS = """
from transformers import LlamaForCausalLM

class OwnLoss(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)
"""


def write_own_loss(tiny) -> Path:
    """The tiny model with code of its own, whose loss is a mean over each micro batch."""
    folder = tiny / "own-loss"
    shutil.copytree(tiny / "model", folder)
    (folder / "modeling_own.py").write_text(OWN_LOSS)
    config = read_json(folder / "config.json") | {
        "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnLoss"},
        "architectures": ["OwnLoss"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_bart(tiny) -> Path:
    """A decoder whose own loss is a mean over each micro batch, of labels that it does not shift."""
    write_tokenizer(tiny / "bart")
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    dropouts = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    tokens = {"vocab_size": 384, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.BartConfig(**sizes, **dropouts, **tokens, max_position_embeddings=256)
    transformers.BartForCausalLM(config).save_pretrained(tiny / "bart")
    return tiny / "bart"


def write_router(tiny) -> Path:
    """A mixture of experts with its router's auxiliary loss."""
    return write_model(tiny / "router", "mixtral", output_router_logits=True, router_aux_loss_coef=0.1)


@pytest.fixture(scope="module")
def logs(request, options, tiny, tmp_path_factory):
    """Name of a run -> its log; two launches, of 1 and of 2 ranks, and one more that resumes the runs of 2 ranks
    on 1. Only what selected tests need is trained.
    """
    folder = tmp_path_factory.mktemp("global-batch")
    pairs = {"data": str(tiny / "pairs.jsonl")}
    kinds = {
        "padded": pairs,
        "packed": pairs | {"packing": True},
        "mixed": {
            "data": [str(tiny / "pairs.jsonl"), str(tiny / "texts.jsonl"), str(tiny / "pairs.jsonl")],
            "eval_fraction": 0.1,
        },
        "text": {"data": str(tiny / "texts.jsonl")},
        "own-loss": pairs | {"eval_data": pairs["data"], "model": str(write_own_loss(tiny)), "trust_remote_code": True},
        "unshifted": pairs | {"eval_data": pairs["data"], "model": str(write_bart(tiny))},
        "router": pairs | {"model": str(write_router(tiny))},
    }

    def case(name: str, kind: str, micro: int, accumulation: int, **more) -> dict:
        is_resumed = name.endswith("-2-1")  # this run's checkpoint is where the others go on
        saves = {"save_strategy": "steps", "save_steps": SAVED_AT, "save_total_limit": 9} if is_resumed else {}
        return options(
            folder / name,
            zero="2",
            max_steps=STEPS,
            logging_steps=1,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            **saves | kinds[kind] | more,
        )

    def train(world: int, cases: list[dict]) -> None:
        cases = [case for case in cases if Path(case["output_dir"]).name in needed]
        made.update(Path(case["output_dir"]).name for case in cases)
        if not cases:
            return
        cases = [case | {"data_cache": str(folder / f"cache-{world}")} for case in cases]
        logs[f"output of {world}"] = train_all(world, cases, folder / f"log-{world}")

    logs: dict = {}
    made: set[str] = set()
    needed = needed_cases(request)
    train(
        2,
        [case(f"{kind}-2-{micro}", kind, micro, accumulation) for kind in DATA for micro, accumulation in SHARED[2]]
        + [case("router-2-2", "router", 2, 2)],
    )
    resumed = [
        case(
            f"{kind}-resumed", kind, 2, 4, resume_from_checkpoint=str(folder / f"{kind}-2-1" / f"checkpoint-{SAVED_AT}")
        )
        for kind in DATA
    ]
    write_model(tiny / "bloom", "llama")
    transformers.AutoModelForCausalLM.from_config(
        transformers.BloomConfig(
            hidden_size=32, n_layer=2, n_head=4, vocab_size=384, bos_token_id=None, eos_token_id=0, pad_token_id=None
        )
    ).save_pretrained(tiny / "bloom")
    resumed += [case("router-1-8", "router", 8, 1), case("router-1-2", "router", 2, 4)]
    resumed.append(case("mixing", "packed", 8, 1, model=str(tiny / "bloom")))
    train(
        1,
        [case(f"{kind}-1-{micro}", kind, micro, accumulation) for kind in DATA for micro, accumulation in SHARED[1]]
        + resumed,
    )
    assert made == needed
    return logs | {path.parent.name: read_json(path)["results"]["log"] for path in folder.glob("*/run.json")}


@pytest.mark.cases("own-loss-2-4", "padded-1-8")
def test_a_model_with_a_mean_of_its_own_trains_as_all_others(logs):
    assert steps(logs["own-loss-2-4"], "loss") == pytest.approx(steps(logs["padded-1-8"], "loss"), rel=2e-5)


@pytest.mark.cases("router-1-8", "router-1-2", "router-2-2")
def test_a_router_s_auxiliary_loss_counts_once(logs):
    """The same on ranks and in accumulation; in one micro batch about the same, since it multiplies two means."""
    for name in ("loss", "aux_loss", "grad_norm"):
        assert steps(logs["router-2-2"], name) == pytest.approx(steps(logs["router-1-2"], name), rel=2e-5), name
    assert steps(logs["router-1-2"], "loss")[0] == pytest.approx(steps(logs["router-1-8"], "loss")[0], rel=2e-5)
    assert steps(logs["router-1-2"], "aux_loss") == pytest.approx(steps(logs["router-1-8"], "aux_loss"), rel=0.3)


@pytest.mark.cases("mixing")
def test_packing_is_left_out_where_samples_would_mix(logs):
    """Bloom takes no positions: the run says so, pads instead, and trains on."""
    assert len(steps(logs["mixing"], "loss")) == STEPS
    assert (
        "packing is left out, sequences are padded instead" in logs["output of 1"]
        and "tokens of one sample change the logits" in logs["output of 1"]
    )


def steps(log: list[dict], name: str) -> list[float]:
    return [entry[name] for entry in log if "loss" in entry]


@pytest.mark.cases("{kind}-1-8", "{kind}-{shape}")
@pytest.mark.parametrize(
    ("kind", "shape"),
    grid(
        product(DATA, SHAPES),
        [("padded", "2-1"), ("packed", "1-2"), ("packed", "2-1"), ("unshifted", "2-1")],
    ),
)
def test_ranks_accumulation_and_batch_size_can_be_exchanged(logs, kind, shape):
    """Losses and gradient norms of all steps, so that the gradients were the same too."""
    alone, shared = logs[f"{kind}-1-8"], logs[f"{kind}-{shape}"]
    for name in ("loss", "grad_norm"):
        assert len(steps(alone, name)) == STEPS
        assert steps(shared, name) == pytest.approx(steps(alone, name), rel=2e-5), name


@pytest.mark.cases("{kind}-resumed", "{kind}-2-1")
@pytest.mark.parametrize("kind", grid(DATA, QUICK))
def test_a_run_goes_on_at_its_sequence_on_another_number_of_ranks(logs, kind):
    assert steps(logs[f"{kind}-resumed"], "loss")[-(STEPS - SAVED_AT) :] == pytest.approx(
        steps(logs[f"{kind}-2-1"], "loss")[SAVED_AT:], rel=2e-5
    )


@pytest.mark.cases("padded-1-8")
def test_the_loss_is_the_sum_of_nats_over_all_trained_tokens(logs, tiny, options, tmp_path):
    """Of a first step, against a model run by hand over its 8 samples, one after the other."""
    import torch
    import transformers

    from dsft.config.options import TrainConfig
    from dsft.data.epoch import EpochSampler
    from dsft.data.training_data import check_sources, load_training_data
    from dsft.models.tokenizer import load_tokenizer

    config = TrainConfig(
        model=str(tiny / "model"), data=[str(tiny / "pairs.jsonl")], seq_len=64, data_cache=str(tmp_path)
    )
    tokenizer = load_tokenizer(config)
    data = load_training_data(
        config,
        check_sources(config.data, config, tokenizer, key="data", problems=[]),
        [],
        tokenizer,
    )
    order = EpochSampler(data.items, per_step=8, seed=42, step=lambda: 0, strategy=data.strategy).order(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tiny / "model"))
    nats = tokens = 0
    for index in order[:8]:
        ids, labels = (torch.from_numpy(data.items[index][0][name]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1].double()
        nats += torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum").item()
        tokens += int((labels[1:] != -100).sum())
    assert steps(logs["padded-1-8"], "loss")[0] == pytest.approx(nats / tokens, rel=2e-5)
