"""Results are compared in pairs of documents; what cannot be compared is refused, and says how it could be."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest
from scipy import stats

from dsft.api import compare
from dsft.cli.main import run_command
from dsft.errors import UserError
from dsft.perplexity.compare import compare_results, read_evaluations
from dsft.perplexity.results import Evaluation, Results
from dsft.perplexity.sums import Perplexity

HASHES = {"texts": "t", "tokens": "k", "windows": "w"}
OPTIONS = {"mode": "rolling", "seq_len": 32, "stride": None, "scope": "corpus", "bos": "auto", "separator": "eos"}
OPTIONS["quantization"] = "none"


def evaluation(model: str, seed: int, *, documents: int = 40, blocks: int = 0, **changes) -> Evaluation:
    """A result as an evaluation leaves it; the same tokens for all seeds, and nats that are alike."""
    tokens = np.random.default_rng(0).integers(5, 60, documents)
    hard = np.random.default_rng(1).gamma(9.0, 1 / 3, documents)
    nats = np.round(tokens * (hard + np.random.default_rng(seed).normal(-0.05 * seed, 0.1, documents)), 6)
    block_tokens = np.full(blocks, max(1, int(tokens.sum()) // max(blocks, 1)))
    perplexity = Perplexity(
        nats=math.fsum(nats),
        tokens=int(tokens.sum()),
        document_nats=nats,
        document_tokens=tokens,
        document_bytes=tokens * 4,
        document_words=tokens,
        document_pairs=np.zeros((0, documents)),
        block_nats=np.round(block_tokens * (3 + np.random.default_rng(seed).normal(0, 0.1, blocks)), 6),
        block_tokens=block_tokens,
        fed_tokens=int(tokens.sum()),
        reported_loss=math.fsum(nats) / int(tokens.sum()),
    )
    values = {
        "perplexity": perplexity,
        "model": model,
        "data": "texts.jsonl",
        "protocol": None,
        "mode": "rolling",
        "options": OPTIONS | {"dtype": "float32"},
        "zero": "0",
        "ranks": 1,
        "machine": "",
        "reference": None,
        "tokens_folder": None,
        "truncated_documents": 0,
        "seconds": 1.0,
        "model_hash": model,
        "hashes": HASHES,
        "fingerprint": model,
        "versions": {},
        "peak_memory_bytes": {},
    }
    return Evaluation(**values | changes)


def comparison_of(*evaluations, **options):
    (comparison,) = compare_results(list(evaluations), **options)
    return comparison


def test_a_comparison_is_that_of_scipy_over_pairs_of_documents():
    base, other = evaluation("base", 0), evaluation("runs/a/final", 1)
    comparison = comparison_of(base, other)
    a, b = base.perplexity, other.perplexity
    change = b.document_nats - a.document_nats
    assert comparison.nats_per_token.value == pytest.approx(change.sum() / a.tokens)
    assert comparison.perplexity_ratio.value == pytest.approx(b.perplexity / a.perplexity)
    assert comparison.bits_per_byte.value == pytest.approx(b.bits_per_byte - a.bits_per_byte)
    assert comparison.byte_perplexity_ratio.value == pytest.approx(b.byte_perplexity / a.byte_perplexity)
    theirs = stats.bootstrap(
        (change, a.document_tokens), lambda x, y, axis=-1: x.sum(axis=axis) / y.sum(axis=axis),
        paired=True, vectorized=True, n_resamples=10_000, method="BCa", random_state=0, batch=1000,
    ).confidence_interval  # fmt: skip
    estimate = comparison.nats_per_token
    assert (estimate.low, estimate.high) == pytest.approx(tuple(theirs), abs=0.1 * (theirs.high - theirs.low))
    assert comparison.perplexity_ratio.low == math.exp(estimate.low)
    assert (comparison.better, comparison.worse) == ((change < 0).sum(), (change > 0).sum())
    assert comparison.p_value == pytest.approx(stats.binomtest(comparison.better, len(change)).pvalue)
    alone = np.ptp(other.intervals["nats_per_token"])
    assert estimate.high - estimate.low < alone / 2, "what is hard for both cancels"
    order = np.argsort(change, kind="stable")
    assert (comparison.gained_most, comparison.lost_most) == (tuple(order[:5]), tuple(order[::-1][:5]))


def test_a_result_that_two_folders_hold_counts_once():
    """As of a base model that was evaluated beside each of its runs: p-values are corrected for two comparisons."""
    base, first, second = (evaluation(name, seed) for seed, name in enumerate(("base", "a", "b")))
    again = dataclasses.replace(base, fingerprint="of another node")
    assert compare(base, first, again, second) == compare(base, first, second)


def test_few_documents_are_compared_by_document_and_one_by_blocks_of_windows():
    few, single = (
        comparison_of(*(evaluation(name, seed, documents=number, blocks=70) for seed, name in enumerate("ab")))
        for number in (3, 1)
    )
    assert few.units == "3 documents" and single.units.endswith(" blocks of neighbouring windows")
    for comparison in (few, single):
        assert comparison.nats_per_token.low < comparison.nats_per_token.high
    # Four bytes to each token.
    assert single.bits_per_byte.low * math.log(2) * 4 == pytest.approx(single.nats_per_token.low)


def test_of_one_document_of_fewer_than_60_windows_no_interval_is_printed():
    results = [evaluation(name, seed, documents=1, blocks=59) for seed, name in enumerate(("base", "other"))]
    shown = results[0].summary()
    assert shown["interval"] == "none: one document" and shown["perplexity"].endswith(", no interval")
    comparison = comparison_of(*results)
    assert comparison.units == "one document" and "(" not in comparison.row()["ratio (95 %)"]


def test_a_document_with_more_than_a_fifth_of_the_tokens_is_named():
    result = evaluation("base", 0, documents=3)
    share = result.perplexity.document_tokens.max() / result.perplexity.tokens
    assert result.summary()["interval"].endswith(f"; the longest document has {share:.0%} of the tokens")
    assert evaluation("base", 0).summary()["interval"] == "over 40 documents"


def test_two_dtypes_of_one_model_are_compared_by_name():
    results = [
        evaluation("base", seed, options=OPTIONS | {"dtype": f"{name}16"}) for seed, name in enumerate(("b", "f"))
    ]
    comparison = comparison_of(*results)
    assert (comparison.base, comparison.model) == ("base (b16)", "base (f16)")
    assert comparison_of(*results, base="base (f16)").model == "base (b16)"
    assert "dtype differs" in comparison.note


def test_over_two_tokenizers_only_bytes_are_a_measure():
    base, other = evaluation("base", 0), evaluation("other", 1, hashes=HASHES | {"tokens": "x", "windows": "y"})
    comparison = comparison_of(base, other)
    assert comparison.perplexity_ratio is comparison.nats_per_token is None and "two tokenizers" in comparison.note
    same = comparison_of(base, evaluation("other", 1))
    for ours, theirs in zip(vars(comparison.bits_per_byte).values(), vars(same.bits_per_byte).values(), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    assert comparison.byte_perplexity_ratio.value < 1
    assert comparison.row()["ratio (95 %)"].endswith(" per byte")


def test_bytes_that_one_tokenizer_alone_scores_do_not_count():
    """The first token of each document is context only for the first: 4 bytes and as many nats as any other."""
    other = evaluation("other", 0, hashes=HASHES | {"tokens": "x", "windows": "y"}, mode="windows")
    result, first = other.perplexity, 1 / other.perplexity.document_tokens
    nats_D = result.document_nats * (1 - first)
    shorter = dataclasses.replace(
        result, document_nats=nats_D, nats=math.fsum(nats_D), document_bytes=result.document_bytes - 4
    )
    (comparison,) = compare_results(
        [evaluation("base", 0, mode="windows"), dataclasses.replace(other, perplexity=shorter)]
    )
    assert comparison.bits_per_byte.value == pytest.approx(shorter.bits_per_byte - result.bits_per_byte)
    assert comparison.bits_per_byte.low < 0 < comparison.bits_per_byte.high
    assert "mode windows also scores tokens" in comparison.note


def test_an_option_that_changes_no_window_does_not_keep_results_apart():
    """The default stride is half of seq_len, and a tokenizer may have no BOS."""
    other = evaluation("other", 1, mode="sliding", options=OPTIONS | {"mode": "sliding", "stride": 16, "bos": "off"})
    base = evaluation("base", 0, mode="sliding", options=OPTIONS | {"mode": "sliding"})
    assert comparison_of(base, other).units == "40 documents"


def grouped(original: Evaluation) -> Evaluation:
    """With its odd documents in one domain and the even ones in another."""
    labels = np.where(np.arange(original.perplexity.documents) % 2, "other", "one").astype(object)
    return dataclasses.replace(original, document_groups={"domain": labels})


def test_a_group_is_compared_as_its_documents_alone_would_be(tmp_path, capsys):
    results = [grouped(evaluation(f"m{seed}", seed)) for seed in range(3)]
    for each in [*results, evaluation("plain", 4)]:  # whose documents are rows of the same file
        Results(tmp_path).add(each)
    read = read_evaluations([str(tmp_path)])
    for each, written in zip(read, results, strict=False):
        assert each.groups == written.groups and [group["group"] for group in each.groups["domain"]] == ["one", "other"]
    comparisons = compare(*read[:3], group_by="domain")
    assert [(each.model, each.group) for each in comparisons] == [
        (model, group) for model in ("m1", "m2") for group in ("one", "other")
    ]
    is_odd = np.arange(40) % 2 == 1
    for each in comparisons:
        alone = []
        for name in ("m0", each.model):
            result = evaluation(name, int(name[1])).perplexity
            chosen = is_odd == (each.group == "other")
            columns = ("document_nats", "document_tokens", "document_bytes", "document_words")
            parts = {column: getattr(result, column)[chosen] for column in columns}
            nats, tokens = math.fsum(parts["document_nats"]), int(parts["document_tokens"].sum())
            parts |= {"nats": nats, "tokens": tokens, "reported_loss": nats / tokens}
            smaller = dataclasses.replace(result, document_pairs=np.zeros((0, 20)), **parts)
            alone.append(dataclasses.replace(evaluation(name, int(name[1])), perplexity=smaller))
        expected = comparison_of(*alone)
        assert (each.better, each.worse, each.p_value) == (expected.better, expected.worse, expected.p_value)
        for name in ("nats_per_token", "bits_per_byte"):
            ours, theirs = (vars(getattr(comparison, name)).values() for comparison in (each, expected))
            assert [*ours] == pytest.approx([*theirs], rel=1e-9), (each.group, name)
    run_command("compare", [str(tmp_path), "--group_by", "domain", "--base", "m0"])
    shown = capsys.readouterr().out
    assert "texts.jsonl, other" in shown


def test_groups_over_two_tokenizers_have_bytes_and_unknown_ones_are_refused():
    base, other = (grouped(evaluation(name, seed)) for seed, name in enumerate(("base", "other")))
    foreign = dataclasses.replace(other, hashes=HASHES | {"tokens": "x"})
    assert all(each.bits_per_byte and not each.nats_per_token for each in compare(base, foreign, group_by="domain"))
    with pytest.raises(
        UserError, match="group_by=domian: the result of base .* was evaluated without it .it has domain"
    ):
        compare(base, other, group_by="domian")


def cut(original: Evaluation) -> Evaluation:
    bytes_D = original.perplexity.document_bytes - 1
    return dataclasses.replace(original, perplexity=dataclasses.replace(original.perplexity, document_bytes=bytes_D))


REFUSED = {
    "texts": (evaluation("other", 1, hashes=HASHES | {"texts": "x"}), "no result on the texts of texts.jsonl"),
    "windows": (
        evaluation("other", 1, options=OPTIONS | {"seq_len": 64}, hashes=HASHES | {"windows": "x"}),
        r"other windows \(seq_len 64 and 32\)",
    ),
    "protocol": (evaluation("other", 1, protocol="hf", options=OPTIONS | {"protocol": "hf"}), "protocol hf and None"),
    "spans": (evaluation("other", 1, hashes=HASHES | {"windows": "x"}), r"other windows \(by another dsft\)"),
    "cut": (
        cut(evaluation("other", 1, hashes=HASHES | {"tokens": "x"}, mode="answers", truncated_documents=1)),
        "cut to seq_len at other places",
    ),
    "rendered": (
        cut(evaluation("other", 1, hashes=HASHES | {"tokens": "x"}, mode="answers")),
        "rendered otherwise; evaluate both with a larger seq_len and the same chat_template, train_on",
    ),
    "alone": (evaluation("base", 1), "nothing to compare with base"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared_is_refused_with_the_way_out(name):
    other, part = REFUSED[name]
    with pytest.raises(UserError, match=part) as caught:
        compare_results([evaluation("base", 0, mode=other.mode), other])
    assert len(caught.value.problems) == 1


def test_the_base_is_found_by_the_end_of_its_path():
    results = [evaluation(name, seed) for seed, name in enumerate(("hub/base", "runs/a/final", "runs/b/final"))]
    assert [item.model for item in compare_results(results)] == ["runs/a/final", "runs/b/final"]
    assert [item.base for item in compare_results(results, base="b/final")] == ["runs/b/final"] * 2
    for base, part in (("final", "matches 2 of the models"), ("hub/bass", "matches 0 of the models .*: hub/base")):
        with pytest.raises(UserError, match=part):
            compare_results(results, base=base)


def test_results_and_comparisons_are_frames_of_pandas():
    base, other = evaluation("base", 0), evaluation("runs/<other>", 1)
    comparisons = compare(base, other)
    table = comparisons.to_pandas()
    assert table["perplexity_ratio_high"][0] == comparisons[0].perplexity_ratio.high and table["better"][0] > 20
    frame = base.to_pandas()
    assert list(frame.columns) == ["model", "data", "protocol", "document", "text", "nats", "tokens", "bytes", "words"]
    assert frame["nats"].tolist() == base.perplexity.document_nats.tolist()


@pytest.fixture
def folders(tmp_path) -> list[str]:
    for seed, name in enumerate(("base", "other")):
        Results(tmp_path / name).add(evaluation(name, seed, documents=1 + 39 * seed, blocks=70 - 70 * seed))
        Results(tmp_path / "both").add(evaluation(name, seed))
    return [str(tmp_path / name) for name in ("base", "other", "both")]


def test_what_is_read_back_is_what_was_written(folders):
    read = read_evaluations([folders[0], f"{folders[2]}/perplexity.json"])
    for result, wanted in zip(
        read, (evaluation("base", 0, documents=1, blocks=70), evaluation("base", 0)), strict=False
    ):
        assert result.report() == wanted.report() and result.intervals == wanted.intervals
    report = read[0].report()["interval"]
    assert (
        report["units"].endswith("blocks of neighbouring windows") and report["perplexity"][0] < report["perplexity"][1]
    )


def test_the_documents_that_changed_most_are_shown_with_their_text(tmp_path):
    texts = [f"{number} begins\nso" for number in range(40)]
    for seed, model in enumerate(("base", "other")):
        Results(tmp_path).add(evaluation(model, seed, document_texts=texts))
    comparisons = compare(str(tmp_path))
    change = (
        read_evaluations([str(tmp_path)])[1].perplexity.document_nats - evaluation("base", 0).perplexity.document_nats
    )
    gained = int(change.argmin())
    lost = int(change.argmax())
    assert comparisons.examples() == [
        ("other", "texts.jsonl", "gained most", gained, f"{gained} begins so"),
        ("other", "texts.jsonl", "lost most", lost, f"{lost} begins so"),
    ]


@pytest.mark.parametrize("columns", ["80", "40"])
def test_models_and_numbers_are_whole_in_a_narrow_terminal(tmp_path, monkeypatch, capsys, columns):
    names = ["base", "runs/llama-3.1-8b-lora-a/final", "runs/llama-3.1-8b-lora-b/final"]
    for seed, model in enumerate(names):
        Results(tmp_path).add(evaluation(model, seed))
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run_command("compare", [str(tmp_path)])
    shown = capsys.readouterr().out
    cells = [line.split("│")[2].strip() for line in shown.splitlines() if line.startswith("│")]
    assert "".join(cells) == "".join(names[1:]) and "…" not in shown
    for each in compare(str(tmp_path)):
        assert all(word in shown.split() for word in " ".join([*each.row().values()][2:]).split())


def test_a_report_without_its_documents_is_not_replaced(tmp_path):
    Results(tmp_path).add(evaluation("base", 0))
    (tmp_path / "documents.parquet").unlink()
    with pytest.raises(UserError, match="has a perplexity.json without its documents.parquet; remove it, or name"):
        Results(tmp_path)


def test_a_table_that_has_no_results_is_named(tmp_path):
    evaluation("base", 0).to_pandas().to_parquet(tmp_path / "documents.parquet")
    with pytest.raises(UserError, match=f"{tmp_path}/documents.parquet cannot be read as results"):
        read_evaluations([str(tmp_path)])


def test_the_command_prints_tables_or_json_and_names_a_folder_without_results(folders, tmp_path, capsys):
    run_command("compare", [folders[2], "--base", "other", "--json"])
    (printed,) = json.loads(capsys.readouterr().out)["comparisons"]
    (expected,) = compare(folders[2], base="other")
    assert printed["perplexity_ratio"]["low"] == expected.perplexity_ratio.low and printed["model"] == "base"
    run_command("compare", [folders[2]])
    assert "ratio (95 %)" in (shown := capsys.readouterr().out) and "against base; intervals over pairs: 40" in shown
    for name in (tmp_path, tmp_path / "perplexity.json"):
        with pytest.raises(
            UserError, match=f"no documents.parquet; write one with dsft eval ... --output_dir {tmp_path}$"
        ):
            run_command("compare", [str(name)])
    with pytest.raises(UserError, match="--results must be given"):
        run_command("compare", [])
