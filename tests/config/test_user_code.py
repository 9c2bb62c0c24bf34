"""Code of the user's own is loaded by name or taken as it is, and its errors are shown with its own traceback."""

import linecache
import sys
import threading

import numpy as np
import pytest
from transformers import TrainerCallback

from dsft.config import user_code
from dsft.config.options import TrainConfig, as_dict
from dsft.errors import UserError

CODE = """
from transformers import TrainerCallback
def double(row, *, by=2):
    return {"text": row["text"] * by}
def fails(row):
    return helper(row)
def helper(row):
    return row["missing"]
number = 3
class Own(TrainerCallback):
    pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_rows.py").write_text(CODE)
    (tmp_path / "own_broken.py").write_text("import json\njson.loads('{')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "own_rows", raising=False)
    return user_code.load("map_row", "own_rows:double").__globals__


def test_a_name_and_the_object_are_the_same_code(module):
    assert user_code.load("map_row", "own_rows:double") is module["double"]
    assert user_code.name_of(module["double"]) == "own_rows:double" == user_code.name_of("own_rows:double")
    assert user_code.load("callbacks", "own_rows:Own") is module["Own"]
    assert user_code.name_of(module["Own"]()) == user_code.name_of(module["Own"]) == "own_rows:Own"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("map_row", "own_rows", "name it as module:function, such as my_code:map_row"),
        ("map_row", "own_row:double", "No module named 'own_row', neither among installed packages nor in"),
        ("map_row", "own_rows:duble", "module 'own_rows' has no attribute 'duble'"),
        ("map_row", "own_rows:number", "expected a function, got int"),
        ("callbacks", None, "got None"),
        ("callbacks", "own_rows:double", "expected a class or an object of transformers.TrainerCallback"),
        ("compute_loss", "own_broken:loss", "raised JSONDecodeError: Expecting property name"),
    ],
)
def test_what_cannot_be_loaded_is_named(module, key, value, problem):
    with pytest.raises(UserError) as raised:
        user_code.load(key, value)
    assert f"{key}={user_code.name_of(value)}" in str(raised.value) and problem in str(raised.value)


def test_an_error_has_the_users_lines(module):
    with pytest.raises(UserError) as raised:
        user_code.mapped(module["fails"], {"text": "a"}, lambda: "rows.jsonl, line 7")
    first, *traceback = str(raised.value).splitlines()
    assert first == "rows.jsonl, line 7: map_row=own_rows:fails raised KeyError: 'missing'"
    assert [line.split(", in ")[1] for line in traceback if "File " in line][-2:] == ["fails", "helper"]
    with pytest.raises(UserError, match="returned list; expected a row"):
        user_code.mapped(lambda row: [row], {}, lambda: "r")


def test_a_digest_changes_with_the_file_the_defaults_and_what_is_closed_over(module, tmp_path):
    before = user_code.digest(module["double"])
    assert before == user_code.digest(module["double"]) != user_code.digest(module["helper"])
    module["double"].__kwdefaults__ = {"by": 3}
    assert user_code.digest(module["double"]) != before

    def closing(number):
        return lambda row: number

    for value, other in ((1, 2), (np.zeros(9), np.ones(9)), ({("a", 1): 2}, {("a", 1): 3})):
        assert user_code.digest(closing(value)) == user_code.digest(closing(value)) != user_code.digest(closing(other))
    lock = threading.Lock()  # it cannot be pickled
    assert user_code.digest(closing(lock)) == user_code.digest(closing(lock)) != user_code.digest(closing(1))

    def refers_to_a_later_one():
        return lambda row: later

    without = user_code.digest(refers_to_a_later_one())
    later = 1
    assert user_code.digest(refers_to_a_later_one()) != without
    (tmp_path / "own_rows.py").write_text(CODE + "\n# changed\n")
    linecache.checkcache()
    module["double"].__kwdefaults__ = {"by": 2}
    assert user_code.digest(module["double"]) != before


def test_options_are_written_with_names():
    class Mine(TrainerCallback):
        pass

    def rows(row):
        return row

    written = as_dict(TrainConfig(map_row=rows, callbacks=[Mine(), "mine:Other"]))
    assert written["map_row"].endswith(":test_options_are_written_with_names.<locals>.rows")
    assert written["callbacks"][0].endswith("<locals>.Mine") and written["callbacks"][1] == "mine:Other"
    assert written["compute_loss"] is None


def test_a_cell_of_a_notebook_is_known_by_all_of_its_text():
    digests = set()
    for method in ("lower", "upper"):
        name = f"<cell {method}>"
        source = f"def clean(text):\n    return text.{method}()\ndef map_row(row):\n    return clean(row)\n"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        cell = {"__name__": "__main__"}
        exec(compile(source, name, "exec"), cell)
        digests.add(user_code.digest(cell["map_row"]))
    assert len(digests) == 2


@pytest.mark.parametrize("is_cell", [True, False])
def test_a_callback_of_a_notebook_is_its_text_and_not_what_it_has_gathered(is_cell):
    source = "losses = []\nclass Own:\n    def on_log(self, logs):\n        losses.append(len(logs) + 1)\n"
    digests = []
    for text in (source, source.replace("1", "2")):
        if is_cell:
            linecache.cache[f"<{text}>"] = (len(text), None, text.splitlines(keepends=True), f"<{text}>")
        cell = {"__name__": "a_notebook"}
        exec(compile(text, f"<{text}>" if is_cell else "<stdin>", "exec"), cell)
        digests.append(user_code.digest(cell["Own"]))
        cell["losses"] += [1.0, threading.Lock()]
        assert user_code.digest(cell["Own"]()) == digests[-1]
    assert digests[0] != digests[1]
