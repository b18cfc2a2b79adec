"""Parquet files written a row group at a time, so that what is held in memory stays small."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from polar.errors import InvalidInput, PolarError
from polar.files import atomic_file

ROWS_PER_GROUP = 4096
TOKENS_PER_GROUP = 1 << 20
"""A row group is written when either is reached: what is held in memory stays at some 30 MB."""


def make_directory(directory: Path) -> None:
    """Make a directory for files; InvalidInput if they could not be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except FileExistsError:
        raise InvalidInput(f"{directory}: is a file, not a directory") from None
    except OSError as error:
        raise InvalidInput(f"{directory}: cannot be written: {error.strerror}") from None


@contextmanager
def parquet_files(directory: Path, schemas: Mapping[str, pa.Schema]) -> Iterator[dict[str, ParquetFile]]:
    """Files to add rows to, by name; all are in the directory when the body ends without an error."""
    make_directory(directory)
    try:
        with ExitStack() as stack:
            files = {}
            for name, schema in schemas.items():
                part = stack.enter_context(atomic_file(directory / f"{name}.parquet"))
                writer = stack.enter_context(pq.ParquetWriter(part, schema, compression="zstd"))
                files[name] = ParquetFile(writer, schema)
            yield files
            for file in files.values():
                file.flush()
    except OSError as error:
        raise PolarError(f"{directory}: cannot be written: {error.strerror or error}") from error


class ParquetFile:
    def __init__(self, writer: pq.ParquetWriter, schema: pa.Schema) -> None:
        self._writer = writer
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self.count = 0
        self._tokens = 0

    def add(self, row: dict[str, Any], tokens: int) -> None:
        self._rows.append(row)
        self.count += 1
        self._tokens += tokens
        if len(self._rows) >= ROWS_PER_GROUP or self._tokens >= TOKENS_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
            self._rows.clear()
            self._tokens = 0


def json_text(value: Any) -> str:
    """A cell for values whose keys differ from row to row."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
