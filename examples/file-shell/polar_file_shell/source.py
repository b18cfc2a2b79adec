"""The file-and-shell tasks as a source of rows, with a training and a held-out split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, Field

from polar.errors import InvalidInput
from polar.tasksets.rows import BadRow, Row, RowSource
from polar_file_shell.draw import Draw, Split
from polar_file_shell.families import FAMILIES, HELD_OUT_ALONE, Family
from polar_file_shell.puzzle import Puzzle, as_script


class FileShell(RowSource):
    """`split: train` or `split: held_out`; the same options always make the same tasks.

    A row's columns have `family`, `instruction` and `solutions`, each a list of Pi's tool calls (`tool`,
    `arguments`). Only the instruction is part of the task.
    """

    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        seed: int = Field(default=0, ge=0)
        """Another seed makes other tasks."""
        of_each: int | None = Field(default=None, ge=1, le=500)
        """Number of tasks per family; if unset, 10 to train on and 3 held out."""
        of_each_new: int = Field(default=6, ge=0, le=500)
        """Number of held-out tasks per composition that is never trained on."""

    options: Options

    def rows(self, place: Path | None, split: str | None) -> Iterator[Row | BadRow]:
        try:
            wanted = Split(split or Split.TRAIN)
        except ValueError:
            raise InvalidInput(f"split: {split} must be one of {', '.join(Split)}") from None
        families = {name: (family, self._count(wanted)) for name, family in FAMILIES.items()}
        if wanted is Split.HELD_OUT:
            families |= {name: (family, self.options.of_each_new) for name, family in HELD_OUT_ALONE.items()}
        # Families alternate, so that the first tasks include every kind.
        for number in range(max(count for _, count in families.values())):
            for name, (family, count) in families.items():
                if number < count:
                    yield self._row(wanted, name, family, number)

    def _count(self, split: Split) -> int:
        return self.options.of_each or (10 if split is Split.TRAIN else 3)

    def _row(self, split: Split, name: str, family: Family, number: int) -> Row:
        puzzle = family(Draw(split, f"{self.options.seed} {split} {name} {number}"))
        task = {
            "id": f"{name}-{split.value.replace('_', '-')}-{number + 1}",
            "instruction": puzzle.instruction,
            "files": {path: {"text": content} for path, content in puzzle.files.items()},
            "evaluator": {"name": "command", "options": {"command": puzzle.check, "reward": "exit_code"}},
            "metadata": {"family": name, "split": split.value},
            "solution": as_script(puzzle.solutions[0]),
        }
        columns = {"family": name, "instruction": puzzle.instruction, "solutions": _plain(puzzle)}
        return Row(f"{name} {number + 1}", columns, task)


def _plain(puzzle: Puzzle) -> list[list[Mapping[str, object]]]:
    return [
        [{"tool": call.tool, "arguments": dict(call.arguments)} for call in solution]
        for solution in puzzle.solutions
    ]
