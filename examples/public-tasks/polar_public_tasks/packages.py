"""The packages to break and repair: their code, tests and licences."""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from polar.assets.pypi import Wheel
from polar_public_tasks.index import Sdist, sdist_directory, wheel_directory


class Split(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Package:
    """Pure Python without dependencies, permissively licensed, with tests that take seconds."""

    sdist: Sdist
    licence: str
    code: str
    """The directory or module that is broken."""
    tests: tuple[str, ...]
    """Directories and files that the agent never sees."""
    split: Split = Split.TRAIN
    root: str = "."
    """The directory that its modules are imported from."""

    @property
    def name(self) -> str:
        return self.sdist.name

    def sources(self) -> dict[str, str]:
        """Return the modules that may be broken, by path."""
        return {path: data.decode() for path, data in self.workspace().items() if path.endswith(".py")}

    def workspace(self) -> dict[str, bytes]:
        """Return the agent's files: the code, its documentation and licence."""
        directory = sdist_directory(self.sdist)
        kept = [
            path
            for path in directory.iterdir()
            if path.name.upper().startswith(("README", "LICEN", "COPYING"))
        ]
        return {
            path: data
            for path, data in _read(directory, [self.code, *(path.name for path in kept)])
            if not any(Path(path).is_relative_to(test) for test in self.tests)
        }

    def hidden(self) -> dict[str, bytes]:
        return dict(_read(sdist_directory(self.sdist), self.tests))


def _read(directory: Path, places: list[str] | tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    for place in sorted(places):
        top = directory / place
        for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if (
                file.is_file()
                and "__pycache__" not in file.parts
                and not file.name.endswith((".pyc", ".swp"))
            ):
                yield str(file.relative_to(directory)), file.read_bytes()


def content(data: bytes) -> dict[str, str]:
    """Return a file in the form in which tasks carry it."""
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


_PYTEST = (
    Wheel("pytest==8.3.5", ("c69214aa47deac29fad6c2a4f590b9c4a9fdb16a403176fe154b79c0b4d4d820",)),
    Wheel("pluggy==1.6.0", ("e920276dd6813095e9377c0bc5566d94c932c33b27a3e3945d8389c374dd4746",)),
    Wheel("iniconfig==2.1.0", ("9deba5723312380e77435581c6bf4935c94cbfab9b1ed33ef8d238ea168eb760",)),
    Wheel("packaging==25.0", ("29572ef2b1f17581046b3a2227d5c611fb25ec70ca1ba8554b24b0e69331a484",)),
)


@cache
def pytest_archive() -> bytes:
    """Return pytest as one importable file, since sandboxes may lack it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for wheel in _PYTEST:
            directory = wheel_directory(wheel)
            for file in sorted(directory.rglob("*")):
                if file.is_file() and file.name != "RECORD":
                    member = zipfile.ZipInfo(str(file.relative_to(directory)))
                    member.compress_type = zipfile.ZIP_DEFLATED
                    archive.writestr(member, file.read_bytes())
    return made.getvalue()


def _package(
    name: str, version: str, sha256: str, licence: str, code: str, *tests: str, **more: object
) -> Package:
    return Package(Sdist(name, version, sha256), licence, code, tests, **more)  # type: ignore[arg-type]


PACKAGES = {
    package.name: package
    for package in (
        _package(
            "aniso8601",
            "10.0.1",
            "25488f8663dd1528ae1f54f94ac1ea51ae25b4d531539b8bc707fed184d16845",
            "BSD-3-Clause",
            "aniso8601",
            "aniso8601/tests",
            "aniso8601/builders/tests",
        ),
        _package(
            "cachetools",
            "5.5.2",
            "1a661caa9175d26759571b2e19580f9d6393969e5dfca11fdb1f947a23e640d4",
            "MIT",
            "src/cachetools",
            "tests",
            root="src",
        ),
        _package(
            "inflection",
            "0.5.1",
            "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
            "MIT",
            "inflection",
            "test_inflection.py",
        ),
        _package(
            "isodate",
            "0.7.2",
            "4cd1aa0f43ca76f4a6c6c0292a85f40b35ec2e43e315b59f06e6d32171a953e6",
            "BSD-3-Clause",
            "src/isodate",
            "tests",
            root="src",
        ),
        _package(
            "mistune",
            "3.1.3",
            "a7035c21782b2becb6be62f8f25d3df81ccb4d6fa477a6525b15af06539f02a0",
            "BSD-3-Clause",
            "src/mistune",
            "tests",
            root="src",
        ),
        _package(
            "parse",
            "1.20.2",
            "b41d604d16503c79d81af5165155c0b20f6c8d6c559efa66b4b695c3e5a0a0ce",
            "MIT",
            "parse.py",
            "tests",
        ),
        _package(
            "schema",
            "0.7.7",
            "7da553abd2958a19dc2547c388cde53398b39196175a9be59ea1caf5ab0a1807",
            "MIT",
            "schema.py",
            "test_schema.py",
        ),
        _package(
            "simpleeval",
            "1.0.3",
            "67bbf246040ac3b57c29cf048657b9cf31d4e7b9d6659684daa08ca8f1e45829",
            "MIT",
            "simpleeval.py",
            "test_simpleeval.py",
        ),
        _package(
            "dictdiffer",
            "0.9.0",
            "17bacf5fbfe613ccf1b6d512bd766e6b21fb798822a133aa86098b8ac9997578",
            "MIT",
            "dictdiffer",
            "tests",
            split=Split.HELD_OUT,
        ),
        _package(
            "uritemplate",
            "4.1.1",
            "4346edfc5c3b79f694bccd6d6099a322bbeb628dbf2cd86eea55a456ce5124f0",
            "BSD-3-Clause OR Apache-2.0",
            "uritemplate",
            "tests",
            split=Split.HELD_OUT,
        ),
        _package(
            "voluptuous",
            "0.15.2",
            "6ffcab32c4d3230b4d2af3a577c87e1908a714a11f6f95570456b1849b0279aa",
            "BSD-3-Clause",
            "voluptuous",
            "voluptuous/tests",
            split=Split.HELD_OUT,
        ),
        _package(
            "xmltodict",
            "0.14.2",
            "201e7c28bb210e374999d1dde6382923ab0ed1a8a5faeece48ab525b7810a553",
            "MIT",
            "xmltodict.py",
            "tests",
            split=Split.HELD_OUT,
        ),
    )
}
