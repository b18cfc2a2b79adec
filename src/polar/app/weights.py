"""Brings a trainer's weights to the engines of a rollout server."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Protocol, runtime_checkable

from polar.client import Client
from polar.engines import transfer
from polar.engines.transfer import MANIFEST, Share
from polar.errors import Conflict, PolarError, Unavailable, retry
from polar.models.policy import PolicyView

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
"""Nodes load weights from here by default, without writing to a disk."""


class Exports(Protocol):
    def export(self, directory: Path) -> None:
        """Write the weights, or only an adapter, in a format that engines read."""


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """A copy of a policy's weights that engines can read in place."""

    write: Callable[[], None]
    withdraw: Callable[[], None]
    """Frees the copy once no engine reads it."""
    files_at_once: bool = False
    """Whether files are written while engines read the copy, for engines that cannot wait for files."""


@runtime_checkable
class Shares(Exports, Protocol):
    """A policy whose weights engines can read in place."""

    def share(self, directory: Path, share: Share) -> SharedWeights | None:
        """Copy the weights on their GPU for engines to read; None if they are elsewhere, or an adapter."""


def forget_shared(out: Path, directory: Path | None = None) -> None:
    """Remove what a killed process of this run shared.

    The memory it refers to is gone with the process, and reading it would crash a restarting engine. The
    files beside it may be incomplete.
    """
    for manifest in _root(out, directory).glob(f"*/{MANIFEST}"):
        _remove_files(manifest.parent)
        manifest.unlink(missing_ok=True)


def _remove_files(directory: Path) -> None:
    """Remove weight files; without a manifest, some of them would be mistaken for all."""
    for file in directory.glob("*.safetensors*"):
        file.unlink(missing_ok=True)


def _root(out: Path, directory: Path | None) -> Path:
    # Stable for a run, so that what a killed process left is found and removed.
    run = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:12]
    return (directory or SHARED_MEMORY).absolute() / f"polar-weights-{run}"


class EngineWeights:
    """The engines of a rollout server's nodes, reached through its policy updates.

    Engines pause between two tokens while they load, and generations continue with the new weights: every
    token carries the version that sampled it. The newest weights remain after the run, for nodes that join
    later.
    """

    def __init__(
        self, client: Client, out: Path, directory: Path | None = None, *, share: Share | None = None
    ) -> None:
        """Write weights to `directory`, which nodes must see below one of their `weight_roots`.

        With `share`, engines read the weights from this process's GPU, and files follow while training
        continues.
        """
        self._client = client
        self._share = share
        self._writing: tuple[Path, Thread] | None = None
        self._unwritten: dict[Path, SharedWeights] = {}
        """Weights on the GPU, by the directory to which they could not be written."""
        self._version: int | None = None
        self._root = _root(out, directory)

    def push(self, policy: Exports) -> int:
        """Push the weights; return the version, which stays the same if engines are paused or cannot load."""
        self.wait_for_files()
        version = retry(self._client.policy).newest + 1
        began = time.monotonic()
        path, shared = self._export(policy)
        exported = time.monotonic()
        if shared is not None and shared.files_at_once:
            self._begin_files(path, shared)
        try:
            view, refusal = self._order_update(path, version)
        finally:
            # The order may still be carried out later, from files, once the memory is freed.
            if shared is not None and not shared.files_at_once:
                self._begin_files(path, shared)
        if refusal is None or view.path == str(path):
            self._version = view.version
            log.info(
                "weights %d: %.2f s to %s, %.2f s to the engines",
                version,
                exported - began,
                "share" if shared else "write",
                time.monotonic() - exported,
            )
        elif self._version is None:
            raise refusal
        else:
            log.error("the engines stay at version %d: %s", self._version, refusal)
        return self._version

    def _order_update(self, path: Path, version: int) -> tuple[PolicyView, PolarError | None]:
        """Order the update; return the server's answer, and why it refused, if it did."""
        refusal: PolarError | None = None
        try:
            view = self._client.update_policy(path, version=version)
        except (Unavailable, Conflict) as error:
            # The request may have succeeded with its answer lost: the stored state is valid.
            view, refusal = retry(self._client.policy), error
        # An order in progress changes nothing once its version has been requested.
        self._remove_unneeded(view, undecided=path if view.newest < version else None)
        return view, refusal

    def close(self) -> None:
        """Prevent engines from reading what ends with this process."""
        self.wait_for_files()
        for shared in self._unwritten.values():
            shared.withdraw()
        self._unwritten.clear()

    def wait_for_files(self) -> None:
        """Return once the newest weights can be read from files."""
        if self._writing is not None:
            self._writing[1].join()

    def _begin_files(self, path: Path, shared: SharedWeights) -> None:
        writing = Thread(target=self._write_files, args=(path, shared), name="weights")
        self._writing = path, writing
        writing.start()

    def _export(self, policy: Exports) -> tuple[Path, SharedWeights | None]:
        """Return where engines find the weights, and those on the GPU if they are not in files yet."""
        self._root.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=self._root))
        path.chmod(0o755)
        try:
            shared = policy.share(path, self._share) if self._share and isinstance(policy, Shares) else None
            if shared is None:
                policy.export(path)
        except BaseException:
            # Incomplete files would take space from the next attempt.
            shutil.rmtree(path)
            raise
        return path, shared

    def _remove_unneeded(self, view: PolicyView, *, undecided: Path | None) -> None:
        """Remove all but the weights that nodes are told to load, and those they return to if none can."""
        named = {view.path, view.fallback.path if view.fallback else None}
        for found in self._root.iterdir():
            if found != undecided and str(found) not in named:
                if self._writing is not None and found == self._writing[0]:
                    self.wait_for_files()
                # A node that has not been told may still be reading it.
                transfer.withdraw(found)
                shutil.rmtree(found)
                if held := self._unwritten.pop(found, None):
                    held.withdraw()

    def _write_files(self, directory: Path, shared: SharedWeights) -> None:
        """Write the weights to files for engines that start later, then free the GPU's memory."""
        try:
            if directory.is_dir():
                shared.write()
            shared.withdraw()
        except Exception as error:
            # An engine that finds the manifest reads that memory, whatever it then contains.
            self._unwritten[directory] = shared
            if (directory / MANIFEST).exists():
                _remove_files(directory)
            log.error("the weights in %s are only on the GPU until this run ends: %s", directory, error)
