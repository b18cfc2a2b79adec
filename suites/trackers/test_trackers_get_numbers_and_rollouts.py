"""A run's numbers and rollouts reach the real packages of trackers, whose own readers find them there."""

from __future__ import annotations

import io
import json
import struct
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polar.training import trackers
from polar.training.metrics import board
from polar.training.settings import MetricsSettings
from tests.fakes.scripted_rollouts import group
from tests.waiting import eventually_sync

GROUP = group(([[10, 11]], [[20]], [[30]]), (1.0, 0.0, 0.5), task_id="task")


def track(settings: MetricsSettings, out: Path) -> None:
    """A run of two steps, killed after the first, that goes on."""
    trackers.require(settings)
    out.mkdir(exist_ok=True)
    for step in (1, 2):
        with board(settings, out, step - 1, Console(file=io.StringIO())) as write:
            write(step, {"loss": 1.0 / step, "excluded/groups_equal": 2.0}, [GROUP])


def test_tensorboard_has_scalars_and_text(tmp_path: Path) -> None:
    track(MetricsSettings(tensorboard=True, rollouts=2), tmp_path / "run")
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]
    (text, _) = events.Tensors("rollouts/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert "**task-0**: reward 1.0" in shown
    assert "    answer 0 [20]" in shown
    assert "task-2" not in shown


def test_mlflow_has_one_run_with_metrics_and_tables(tmp_path: Path) -> None:
    track(MetricsSettings(mlflow="polar", rollouts=2), tmp_path / "run")
    mlflow: Any = import_module("mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("polar")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 1.0), (2, 0.5)]
    names = [file.path for file in client.list_artifacts(run.info.run_id, "rollouts")]
    assert names == ["rollouts/step-000001.json", "rollouts/step-000002.json"]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, names[0])).read_text())
    assert table["columns"] == ["session", "reward", "prompt", "response"]
    assert [row[:2] for row in table["data"]] == [["task-0", 1.0], ["task-1", 0.0]]
    assert table["data"][0][2:] == ["[user] go", "answer 0 [10, 11]"]


def test_weights_and_biases_has_one_run_offline(tmp_path: Path) -> None:
    track(MetricsSettings(wandb="polar", rollouts=2), tmp_path / "run")
    stores = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    # An offline run that goes on is another file of the same run.
    assert len({file.name for file in stores}) == 1
    # A process of its own writes them, and may be behind.
    eventually_sync(lambda: len(values(stores, "loss")) == 2)
    assert values(stores, "loss") == [1.0, 0.5]
    assert values(stores, "rollouts/ncols") == [4, 4]
    assert values(stores, "rollouts/nrows") == [2, 2]


def values(stores: list[Path], name: str) -> list[Any]:
    """All values that were logged under a name."""
    items = [item for file in stores for record in records(file) for item in record.history.item]
    return [json.loads(item.value_json) for item in items if "/".join(item.nested_key) == name]


BLOCK, HEADER = 32_768, struct.Struct("<IHB")


def records(file: Path) -> list[Any]:
    """What a file of an offline run holds: its package only writes such files, a log in LevelDB's format."""
    messages = import_module("wandb.proto.wandb_internal_pb2")
    data, place, whole, found = file.read_bytes(), HEADER.size, b"", []
    while place + HEADER.size <= len(data):
        if BLOCK - place % BLOCK < HEADER.size:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, place)
        place += HEADER.size
        whole += data[place : place + length]
        place += length
        # 1 is a whole record and 4 the last part of one.
        if kind in (1, 4):
            found.append(messages.Record.FromString(whole))
            whole = b""
    return found


def test_trackio_has_one_run_with_numbers_and_tables(tmp_path: Path) -> None:
    track(MetricsSettings(trackio="polar", rollouts=2), tmp_path / "run")
    trackio: Any = import_module("trackio")
    (run,) = trackio.Api().runs("polar")
    assert run.name == "run"
    rows = import_module("trackio.sqlite_storage").SQLiteStorage.get_logs("polar", "run")
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 0.5)]
    table = rows[0]["rollouts"]
    assert "trackio.table" in json.dumps(table)


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_run_without_rollouts_is_tracked_too(tmp_path: Path, package: str) -> None:
    settings = MetricsSettings.model_validate({package: True if package == "tensorboard" else "polar"})
    (tmp_path / "run").mkdir()
    with board(settings, tmp_path / "run", 0, Console(file=io.StringIO())) as write:
        write(1, {"loss": 1.0})
