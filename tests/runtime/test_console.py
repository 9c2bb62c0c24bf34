import io

from dsft.runtime.console import _Both


def test_bars_and_colours_of_the_terminal_are_not_in_the_rank_log():
    screen, file = io.StringIO(), io.StringIO()
    both = _Both(screen, file)
    for text in ("a line\n", "\rPerplexity:  10%", "\r    \r", "\033[31mdsft: error: \033[0manother\n"):
        both.write(text)
    assert screen.getvalue().count("\r") == 3 and "\033[31m" in screen.getvalue()
    assert file.getvalue() == "a line\ndsft: error: another\n"
