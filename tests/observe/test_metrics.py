"""Metrics survive any value and can be read back."""

import json

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from megatron_sao.observe.metrics import METRICS_FILE, MetricsSink, read_metrics


def test_numbers_come_back(tmp_path):
    sink = MetricsSink(tmp_path)
    sink.log(0, "value_warmup", {"value/loss": 0.5})
    sink.log(1, "train", {"a/numpy": np.float32(0.25), "a/count": np.int64(3), "a/nan": float("nan"), "a/inf": -np.inf})
    sink.close()
    first, second = read_metrics(tmp_path / METRICS_FILE)
    assert (first["phase"], first["step"], first["value/loss"]) == ("value_warmup", 0, 0.5)
    assert (second["a/numpy"], second["a/count"], second["a/inf"]) == (0.25, 3, float("-inf"))
    assert np.isnan(second["a/nan"])


def test_every_line_is_strict_json_whatever_the_text(tmp_path):
    texts = ["a\ud83d b", "nul\0", "😀", "line\u2028separator", "two\nlines", 'quote"']
    sink = MetricsSink(tmp_path)
    for step, text in enumerate(texts):
        sink.log(step, "train", {"text": text, "object": object, "none": None})
    sink.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    lines = (tmp_path / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line, parse_constant=refuse)["text"] for line in lines] == texts


def test_a_metric_cannot_hide_its_step(tmp_path):
    sink = MetricsSink(tmp_path)
    sink.log(7, "train", {"step": 99, "phase": "x", "time_s": 0})
    sink.close()
    (record,) = read_metrics(tmp_path / METRICS_FILE)
    assert (record["step"], record["phase"]) == (7, "train")
    assert record["time_s"] > 0


def test_an_incomplete_last_line_is_left_out(tmp_path):
    sink = MetricsSink(tmp_path)
    sink.log(0, "train", {"a": 1.0})
    sink.close()
    with open(tmp_path / METRICS_FILE, "a", encoding="ascii") as file:
        file.write('{"phase": "train", "st')  # a process killed while writing
    assert [record["a"] for record in read_metrics(tmp_path / METRICS_FILE)] == [1.0]


def tensorboard_points(folder) -> list[tuple[str, int, float]]:
    """(tag, step, number) of everything in the files of a run."""
    points = []
    for path in (folder / "tensorboard").iterdir():
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
                points.append((value.tag, event.step, number))
    return points


def test_tensorboard_holds_the_numbers_by_phase(tmp_path):
    sink = MetricsSink(tmp_path)
    sink.log(0, "value_warmup", {"value/loss": 0.5, "eval/name": "text is left out"})
    sink.log(4, "train", {"value/loss": 0.25})
    sink.close()
    assert tensorboard_points(tmp_path) == [("value_warmup/value/loss", 0, 0.5), ("value/loss", 4, 0.25)]


def test_a_run_that_goes_on_cuts_off_what_came_after_its_checkpoint(tmp_path):
    first = MetricsSink(tmp_path)
    first.log(70, "value_pretrain", {"a": 1.0})
    first.log(3, "train", {"a": 2.0})
    position = first.position()
    first.log(4, "train", {"a": 3.0})
    rolled_back = MetricsSink(tmp_path, position)  # the first was killed: it did not close
    rolled_back.log(4, "train", {"a": 4.0})
    rolled_back.close()
    last = MetricsSink(tmp_path, position)
    last.log(4, "train", {"a": 5.0})
    last.close()
    expected = [("value_pretrain", 70, 1.0), ("train", 3, 2.0), ("train", 4, 5.0)]
    assert [(r["phase"], r["step"], r["a"]) for r in read_metrics(tmp_path / METRICS_FILE)] == expected
    assert sorted(tensorboard_points(tmp_path)) == [("a", 3, 2.0), ("a", 4, 5.0), ("value_pretrain/a", 70, 1.0)]


def test_a_run_whose_last_lines_were_lost_goes_on_after_the_last_whole_one(tmp_path):
    sink = MetricsSink(tmp_path)
    sink.log(0, "train", {"a": 1.0})
    sink.log(1, "train", {"a": 2.0})
    position = sink.position()
    sink.close()
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-5])
    sink = MetricsSink(tmp_path, position)
    sink.log(2, "train", {"a": 3.0})
    sink.close()
    assert [record["a"] for record in read_metrics(path)] == [1.0, 3.0]


def test_a_run_goes_on_where_its_files_were_not_brought_along(tmp_path):
    sink = MetricsSink(tmp_path, {METRICS_FILE: 100, "tensorboard/events.out.tfevents.1.a": 50})
    sink.log(2, "train", {"a": 3.0})
    sink.close()
    assert [record["a"] for record in read_metrics(tmp_path / METRICS_FILE)] == [3.0]
