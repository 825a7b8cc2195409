"""The picture is drawn from whatever a run has written so far."""

import numpy as np
import pytest
from matplotlib import image

from megatron_sao.observe.metrics import MetricsSink
from megatron_sao.observe.report import running_mean, write_report


@pytest.mark.parametrize("num_steps", [0, 1, 2, 30])
def test_runs_of_any_length(tmp_path, num_steps):
    sink = MetricsSink(tmp_path)
    sink.log(0, "eval", {"eval/pass_rate": 0.3, "eval/mean_reward": 0.3})
    sink.log(0, "value_warmup", {"value/explained_variance": float("nan")})
    for step in range(num_steps):
        metrics = {"rollout/pass_rate": 0.5, "lag/mean": 0.4, "lag/max": float("inf"), "value/explained_variance": -3.0}
        sink.log(step, "train", metrics)
    sink.close()
    path = write_report(tmp_path, title="t")
    height, width, _ = image.imread(path).shape
    assert (width, height) == (1650, 880)


def test_a_run_without_any_line(tmp_path):
    MetricsSink(tmp_path).close()
    assert write_report(tmp_path, title="t").stat().st_size > 0


def test_running_mean_by_hand():
    assert running_mean([1.0, 2.0, 6.0], 1).tolist() == [1.0, 2.0, 6.0]
    assert running_mean([1.0, 2.0, 6.0], 3).tolist() == [1.5, 3.0, 4.0]
    assert running_mean([1.0, np.nan, 6.0, np.inf], 3).tolist() == [1.0, 3.5, 6.0, 6.0]
    assert np.isnan(running_mean([np.nan], 3)).all()
    assert running_mean([], 3).tolist() == []
