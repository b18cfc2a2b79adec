"""`polar train sft` learns what a generated dataset trains, and nothing else of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polar.errors import InvalidInput
from polar.tasksets.sft import Table, schema
from polar.training.material import PolicyVersions
from polar.training.run import train
from polar.training.settings import SftSettings
from polar.training.sources import Dataset
from tests.fakes.training_runs import quiet, same_tensors


def write_dataset(directory: Path, rows: list[tuple[list[int], list[int]]]) -> Path:
    """A tokens.parquet as `polar generate` writes it: ids, and which of them are trained."""
    directory.mkdir(parents=True, exist_ok=True)
    documents: list[dict[str, Any]] = []
    for ids, mask in rows:
        documents.append(
            {
                "input_ids": ids,
                "labels": [id if trained else -100 for id, trained in zip(ids, mask, strict=True)],
                "loss_mask": mask,
                "logprobs": [-1.0 * trained for trained in mask],
                "policy_versions": [0 if trained else -1 for trained in mask],
                "prompt_length": mask.index(1),
            }
        )
    shape = schema(Table.TOKENS)
    columns = {name: [row.get(name) for row in documents] for name in shape.names}
    pq.write_table(pa.table(columns, schema=shape), directory / Table.TOKENS.file)
    return directory


ROWS = [([1, 2, 3, 10 + n, 11 + n, 12 + n], [0, 0, 0, 1, 1, 1]) for n in range(6)]


def settings(model: Path, directory: Path, **changes: Any) -> SftSettings:
    document = {
        "out": directory / "run",
        "steps": 4,
        "rows": 4,
        "model": {"name": str(model), "device": "cpu"},
        "optimizer": {"lr": 1e-3},
        "batch": {"tokens": 16},
        "checkpoint": {"every": 2},
        "data": [directory / "data"],
    }
    return SftSettings.model_validate({**document, **changes})


def test_the_loss_falls_and_a_run_goes_on_exactly(tiny_model: Path, tmp_path: Path) -> None:
    for name in ("whole", "halves"):
        write_dataset(tmp_path / name / "data", ROWS)
    whole, halves = (settings(tiny_model, tmp_path / name) for name in ("whole", "halves"))
    kept = train(whole, quiet())
    losses = [json.loads(line)["loss"] for line in (whole.out / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    train(halves.model_copy(update={"steps": 2}), quiet())
    assert same_tensors(kept.weights, train(halves, quiet()).weights)


def test_every_row_comes_once_in_each_round(tiny_model: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", ROWS)
    source = Dataset(settings(tiny_model, tmp_path, rows=3))
    rounds = [
        [
            name.partition("-")[2]
            for batch in source.take(PolicyVersions(0)).packing.batches
            for name in batch.names
        ]
        for _ in range(4)
    ]
    assert sorted(rounds[0] + rounds[1]) == sorted(rounds[2] + rounds[3]) == list("012345")


def test_only_what_the_mask_says_is_trained_and_long_rows_are_counted(
    tiny_model: Path, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "data", [([1, 2, 3, 4], [0, 1, 0, 1]), ([1] * 40, [0] * 20 + [1] * 20)])
    found = Dataset(settings(tiny_model, tmp_path, rows=2)).take(PolicyVersions(0))
    (batch,) = found.packing.batches
    assert batch.labels.tolist() == [2, 4]
    assert batch.terms.weights.tolist() == [0.5, 0.5]
    assert +found.excluded == {"traces_over_budget": 1}


def test_long_rows_are_cut_where_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", [([1] * 40, [0] * 20 + [1] * 20)])
    cut = settings(tiny_model, tmp_path, rows=1, batch={"tokens": 30, "overlong": "cut"})
    found = Dataset(cut).take(PolicyVersions(0))
    (batch,) = found.packing.batches
    assert batch.terms.targets.tolist() == list(range(20, 30))
    assert +found.excluded == {"tokens_over_length": 10}


@pytest.mark.parametrize("rows", [[], None])
def test_a_dataset_that_is_not_there_or_empty_is_explained(
    tiny_model: Path, tmp_path: Path, rows: list[Any] | None
) -> None:
    if rows is not None:
        write_dataset(tmp_path / "data", rows)
    with pytest.raises(InvalidInput, match=r"no rows|cannot be read as tokens"):
        Dataset(settings(tiny_model, tmp_path))
