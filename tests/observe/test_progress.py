"""Plain lines where there is no terminal."""

import io

from rich.console import Console

from megatron_sao.observe.progress import Progress


def lines(act) -> list[str]:
    file = io.StringIO()
    with Progress(Console(file=file, width=200)) as progress:
        act(progress)
    return file.getvalue().splitlines()


def test_lines_are_few_and_the_last_one_always_comes():
    def act(progress):
        for done in range(1, 101):
            progress.update("eval before: episodes", done, 100)

    assert lines(act) == ["eval before: episodes 1/100", "eval before: episodes 100/100"]


def test_a_step_with_numbers_always_gets_its_line():
    def act(progress):
        progress.update("train", 1, 3, {"pass": 0.51234})
        progress.update("train", 2, 3, {"pass": 0.25, "lag": 1.0})
        progress.say("[not markup] held-out: 0.5")

    assert lines(act) == ["train 1/3  pass 0.512", "train 2/3  pass 0.25  lag 1", "[not markup] held-out: 0.5"]


def test_a_terminal_gets_bars():
    file = io.StringIO()
    with Progress(Console(file=file, width=200, force_terminal=True)) as progress:
        progress.update("train", 1, 3, {"pass": 0.5})
        progress.update("train", 3, 3, {"pass": 0.75})
    assert "3/3" in file.getvalue() and "pass 0.75" in file.getvalue()
