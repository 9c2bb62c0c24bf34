"""What charts show of a run is what the run recorded: nothing is counted twice, invented or lost."""

import random
from itertools import pairwise

import pytest
from test_report import logged, write_run

from dsft.report.charts import COLOURS, MEASURED, MOST_PARTS, MOST_POINTS, charts, largest_parts, memory_parts
from dsft.report.runs import read_report
from dsft.units import GiB

PHASES = ("always", "compute", "step", "sample", "save")


def drawn(*folders) -> dict:
    return {chart.name: chart.spec for chart in charts(read_report([str(folder) for folder in folders]), COLOURS)}


def drawn_terms(seed: int) -> list[dict]:
    """Some terms of a plan, of each phase and place, as run.json has them."""
    chance = random.Random(seed)
    return [
        {"name": f"{place} {phase} {number}", "num_bytes": chance.randrange(1 << 34), "phase": phase, "place": place}
        | {"formula": "x"}
        for place in ("device", "host")
        for phase in (*PHASES, "load")
        for number in range(chance.randrange(4))
    ]


@pytest.mark.parametrize("steps", [1, 2, MOST_POINTS, MOST_POINTS + 1, 4 * MOST_POINTS + 7])
def test_a_long_line_is_thinned_evenly_and_keeps_its_ends(tmp_path, steps):
    log = [{"step": step, "num_input_tokens_seen": 10 * step, "loss": 1 / step} for step in range(1, steps + 1)]
    points = drawn(write_run(tmp_path / "run", log=log))["loss"]["layer"][0]["data"]["values"]
    shown = [point["step"] for point in points]
    assert shown[0] == 1 and shown[-1] == steps and len(points) <= MOST_POINTS + 1
    gaps = {later - earlier for earlier, later in pairwise(shown[:-1])}
    assert len(gaps) <= 1 and all(point["value"] == 1 / point["step"] for point in points)
    assert steps > MOST_POINTS or len(points) == steps


def test_each_source_and_each_set_has_a_line_of_its_own(tmp_path):
    log = [{"step": step, "source_a_loss": 1.0, "source_b_loss": 2.0, "eval_c_loss": 3.0} for step in (1, 2)]
    run, other = write_run(tmp_path / "run", log=log), write_run(tmp_path / "other", log=log)
    for folders, names in (([run], ["a", "b"]), ([run, other], ["run: a", "other: a", "run: b", "other: b"])):
        spec = drawn(*folders)["loss_by_source"]
        assert spec["encoding"]["color"]["scale"]["domain"] == names
        assert len(spec["layer"][0]["data"]["values"]) == 2 * len(names)
    assert "loss_by_eval" in drawn(run)


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_a_planned_bar_is_as_long_as_the_peak_of_the_plan(tmp_path, seed, has_gpu):
    terms, ranks = drawn_terms(seed), 3
    plan = {"has_gpu": has_gpu, "ranks_per_node": ranks, "terms": terms, "reason": "x"}
    report = read_report([str(write_run(tmp_path / "run", plan=plan))])
    bytes_of = {
        (place, phase): sum(term["num_bytes"] for term in terms if (term["place"], term["phase"]) == (place, phase))
        for place in ("device", "host")
        for phase in PHASES
    }
    peak = {
        place: bytes_of[place, "always"] + max(bytes_of[place, phase] for phase in PHASES[1:])
        for place in ("device", "host")
    }
    expected = peak["device"] if has_gpu else ranks * peak["device"] + peak["host"]
    parts = memory_parts(report.runs[0])
    assert sum(part["value"] for part in parts) == pytest.approx(expected / GiB)
    assert {part["bar"] for part in parts} <= {"planned"}, "nothing was measured"


@pytest.mark.parametrize("seed", range(5))
def test_adding_up_small_parts_keeps_the_length_of_each_bar(seed):
    chance = random.Random(seed)
    rows = [
        {"bar": bar, "part": part, "value": chance.random(), "detail": ""}
        for bar in "abc"
        for part in chance.sample([*map(str, range(12)), *MEASURED], k=chance.randrange(1, 12))
    ]
    kept = largest_parts(rows)
    for bar in "abc":
        before, after = ([row for row in some if row["bar"] == bar] for some in (rows, kept))
        assert sum(row["value"] for row in after) == pytest.approx(sum(row["value"] for row in before))
        assert {row["part"] for row in before} & MEASURED.keys() == {row["part"] for row in after} & MEASURED.keys()
    assert len({row["part"] for row in kept} - MEASURED.keys()) <= MOST_PARTS + 1


@pytest.mark.parametrize(
    ("seconds", "unit", "scale"), [(100.0, "seconds", 1), (300.0, "minutes", 60), (5e4, "hours", 3600)]
)
def test_the_parts_of_the_time_add_up_to_all_of_it(tmp_path, seconds, unit, scale):
    results = {"seconds": seconds, "saves": {"seconds": 10.0}}
    chart = drawn(write_run(tmp_path / "run", log=logged(4), results=results))["time"]
    assert chart["encoding"]["x"]["title"] == unit
    assert {row["part"]: round(scale * row["value"], 6) for row in chart["data"]["values"]} == {
        "training": seconds - 21.0,
        "waiting for data": 6.0,
        "evaluation": 5.0,
        "saving": 10.0,
    }


def test_one_run_needs_no_legend_and_several_have_a_colour_each(tmp_path):
    folders = [write_run(tmp_path / name, log=logged(2)) for name in ("a", "b", "c")]
    assert drawn(folders[0])["loss"]["encoding"]["color"]["legend"] is None
    colour = drawn(*folders)["loss"]["encoding"]["color"]
    assert colour["scale"]["domain"] == ["a", "b", "c"] and len(set(colour["scale"]["range"])) == 3
    assert colour["legend"]["orient"] == "bottom"
    bars = drawn(*folders)["memory"]["data"]["values"]
    assert {row["bar"] for row in bars} == {"a: planned", "b: planned", "c: planned"}
