"""How errors and commands look on a terminal."""

import pytest

from dsft.errors import UserError, ends_with_clear_errors, one_line
from dsft.runtime.console import show_text


def test_escape_sequences_of_other_people_s_texts_do_not_reach_the_terminal(capsys, monkeypatch):
    @ends_with_clear_errors
    def main():
        show_text("a \x1b]0;title\x07\nb")
        raise UserError(["column \x9b31mred\x1b[2J: missing"])

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert printed.out == "a \ufffd]0;title\ufffd\nb\n"
    assert printed.err == "dsft: error: column \ufffd31mred\ufffd[2J: missing\n"


def test_an_error_without_a_message_is_named():
    """run.json had `rank 0 on host: ` after a Ctrl-C."""
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt" and one_line(ValueError("a\n b")) == "a b"
