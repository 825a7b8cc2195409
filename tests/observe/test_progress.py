"""Plain lines where there is no terminal."""

import io

from rich.console import Console

from megatron_sao.observe.progress import BytesProgress, Progress


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


def test_bytes_have_a_bar_with_the_time_left_or_lines(monkeypatch):
    monkeypatch.setattr("megatron_sao.observe.progress.LINE_EVERY_S", 0.0)
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
        with BytesProgress("convert", console) as progress:
            progress.update(0, 4_000_000_000)
            progress.update(1_000_000_000, 4_000_000_000)
            progress.update(4_000_000_000, 4_000_000_000)
        said = console.file.getvalue()
        assert "convert" in said
        if is_terminal:
            assert "4.0/4.0 GB" in said and "0:00:00" in said
        else:
            lines = said.splitlines()
            assert len(lines) == 2 and lines[0].startswith("convert 1.00 GB of 4.00 GB, about ")
            assert lines[1] == "convert 4.00 GB of 4.00 GB, about 0 s left"
