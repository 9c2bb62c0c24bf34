import io
import os
import subprocess
import sys

import pytest
from rich.table import Table

from dsft.runtime.console import LOGS, _Both, show_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_and_colours_of_the_terminal_are_not_in_the_rank_log():
    screen, file = io.StringIO(), io.StringIO()
    both = _Both(screen, file)
    for text in ("a line\n", "\rPerplexity:  10%", "\r    \r", "\033[31mdsft: error: \033[0manother\n"):
        both.write(text)
    assert screen.getvalue().count("\r") == 3 and "\033[31m" in screen.getvalue()
    assert file.getvalue() == "a line\ndsft: error: another\n"


def test_the_log_of_a_killed_rank_has_its_last_line(tmp_path):
    """Of rank 1, whose screen is its file: nothing is left in a buffer."""
    code = (
        "import os, signal; from dsft.runtime.console import log_to_files; log_to_files(os.environ['FOLDER'],"
        " append=False); print('last words'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "FOLDER": str(tmp_path), "PYTHONUNBUFFERED": ""}
    subprocess.run([sys.executable, "-c", code], env=os.environ | rank, stdout=subprocess.DEVNULL, check=False)
    assert (tmp_path / LOGS / "rank_1.log").read_text().splitlines()[1:] == ["last words"]


@pytest.mark.parametrize("screen", ["a closed pipe", "a full disk", "nothing"])
def test_a_screen_that_is_gone_or_full_ends_nothing(screen):
    code = (
        "import os, sys; from dsft.errors import ends_with_clear_errors\n"
        "from dsft.runtime.console import _watch_screen, show_text\n"
        "def main():\n"
        "    show_text('a', file=sys.stderr); _watch_screen(None); os.dup(2)\n"
        "    for _ in range(9): print('x' * 9999, flush=True); show_text('b', file=sys.stderr)\n"
        "ends_with_clear_errors(main)()\n"
    )
    words = [sys.executable, "-c", code]
    if screen == "nothing":
        words = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *words]
    with open("/dev/full", "w") as full:
        target = subprocess.PIPE if screen == "a closed pipe" else full
        with subprocess.Popen(words, stdout=target, stderr=target) as process:
            if screen == "a closed pipe":
                process.stdout.close()
                process.stderr.close()
            assert process.wait(120) == 0


def test_a_narrow_terminal_shows_whole_cells_and_no_escape_sequences(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    name = "".join(map(str, range(60)))
    table = Table("name", "loss", "of", caption="\033[31mred")
    table.add_row(name, "1.234", "\033[31mred")
    show_table(table)
    assert "…" not in screen.getvalue() and "1.234" in screen.getvalue() and name[-20:] in screen.getvalue()
    assert "\033[31m" not in screen.getvalue()
