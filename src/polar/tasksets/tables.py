"""Rows from files: JSON Lines, parquet, and datasets saved by Hugging Face's library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from polar.config.documents import parse_json
from polar.errors import InvalidInput
from polar.tasksets.rows import BadRow, Row, RowSource

ROWS_AT_ONCE = 256
"""Limits a batch in which every row may contain a whole repository."""


class JsonLinesRows(RowSource):
    """One JSON object per line."""

    def rows(self, place: Path | None, split: str | None) -> Iterator[Row | BadRow]:
        for file in _files(place, ".jsonl", split):
            with _naming_file(file), file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _json_row(line, file, number)


class Parquet(RowSource):
    """One file, or a directory of files."""

    def rows(self, place: Path | None, split: str | None) -> Iterator[Row | BadRow]:
        for file in _files(place, ".parquet", split):
            with _naming_file(file):
                yield from _number_rows(pq.ParquetFile(file).iter_batches(batch_size=ROWS_AT_ONCE), file)


class SavedDataset(RowSource):
    """The output of `Dataset.save_to_disk` or `DatasetDict.save_to_disk`, or a directory of arrow files."""

    def rows(self, place: Path | None, split: str | None) -> Iterator[Row | BadRow]:
        directory = _dataset_directory(_require_source(place), split)
        yield from _number_rows(chain.from_iterable(map(_arrow_batches, _arrow_files(directory))), directory)


@contextmanager
def _naming_file(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidInput(f"{file}: cannot be read: {reason}") from None


def _json_row(line: bytes, file: Path, number: int) -> Row | BadRow:
    where = f"{file}:{number}"
    try:
        columns = parse_json(line.decode().strip(), str(file), number)
    except UnicodeDecodeError as error:
        return BadRow(where, f"not UTF-8 text (byte {error.start})")
    except InvalidInput as error:
        place, _, problem = error.message.removeprefix(f"{file}:").partition(": ")
        return BadRow(f"{file}:{place}", problem)
    if not isinstance(columns, dict):
        return BadRow(where, f"must be a JSON object, not a {type(columns).__name__}")
    return Row(where, columns)


def _number_rows(batches: Iterable[pa.RecordBatch], source: Path) -> Iterator[Row]:
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, columns in enumerate(rows, start=1):
        # In a table, every row has the keys of all rows, with null for those it did not have.
        yield Row(f"{source}: row {number}", _without_null(columns))


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_null(inner) for inner in value]
    return value


def _require_source(place: Path | None) -> Path:
    if place is None:
        raise InvalidInput("source: is required")
    return place


def _files(place: Path | None, suffix: str, split: str | None) -> list[Path]:
    """Return the file itself, or the files of a directory, limited to those of the split."""
    place = _require_source(place)
    if not place.is_dir():
        if split is not None:
            raise InvalidInput(f"split: {place} is a single file", hint="select rows with filter instead")
        return [place]
    files = sorted(file for file in place.rglob("*") if file.suffix == suffix and file.is_file())
    if split is not None:
        files = [file for file in files if _is_of(file.relative_to(place), split)]
    if not files:
        of_split = f" of split {split!r}" if split is not None else ""
        raise InvalidInput(f"{place}: no {suffix} files{of_split}")
    return files


def _is_of(file: Path, split: str) -> bool:
    """Whether a file belongs to a split, as in `train.parquet`, `train-00000-of-00002.parquet`, `train/…`."""
    return split in file.parts[:-1] or file.name.startswith((f"{split}.", f"{split}-"))


def _dataset_directory(place: Path, split: str | None) -> Path:
    splits = sorted(inner.parent.name for inner in place.glob("*/state.json"))
    if not splits:
        if split is not None:
            raise InvalidInput(f"split: {place} has no splits", hint="select rows with filter instead")
        return place
    if split is None and len(splits) == 1:
        split = splits[0]
    if split not in splits:
        raise InvalidInput(f"split: {place} has the splits {', '.join(splits)}", hint="choose one of them")
    return place / split


def _arrow_files(directory: Path) -> list[Path]:
    state = directory / "state.json"
    if not state.is_file():
        files = sorted(directory.glob("*.arrow")) if directory.is_dir() else [directory]
        if not files:
            raise InvalidInput(f"{directory}: contains no saved dataset")
        return files
    with _naming_file(state):
        return [directory / part["filename"] for part in json.loads(state.read_bytes())["_data_files"]]


def _arrow_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a file in either Arrow format, memory-mapped and cut small."""
    with _naming_file(file), pa.memory_map(str(file)) as mapped:
        try:
            batches: Any = pa.ipc.open_stream(mapped)
        except pa.ArrowInvalid:
            reader = pa.ipc.open_file(mapped)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                yield batch.slice(start, ROWS_AT_ONCE)
