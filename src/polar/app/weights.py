"""A trainer's weights on their way to the engines of a rollout server."""

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
"""Nodes take weights from there unless their settings say otherwise, and no disk is written."""


class Exports(Protocol):
    """A policy whose weights can be written down."""

    def export(self, directory: Path) -> None:
        """Write the weights, or an adapter alone, as engines read them."""


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """A copy of a policy's weights that engines can take where it is."""

    write: Callable[[], None]
    """Writes the copy to files."""
    withdraw: Callable[[], None]
    """Lets go of the copy, as soon as no engine reads it."""
    files_at_once: bool = False
    """Whether files are written while engines take the copy: those that cannot wait for files."""


@runtime_checkable
class Shares(Exports, Protocol):
    """A policy whose weights engines can take where they are."""

    def share(self, directory: Path, share: Share) -> SharedWeights | None:
        """Copy the weights on their GPU for engines to take in the way that `share` has.

        None: these are not on a GPU, or an adapter, which files carry as fast.
        """


def forget_shared(out: Path, directory: Path | None = None) -> None:
    """Remove what a killed process of this run shared: the memory that it names has gone with the process,
    and an engine that starts again would not outlive reading it. The files beside it are not all there."""
    for manifest in _root(out, directory).glob(f"*/{MANIFEST}"):
        _remove_files(manifest.parent)
        manifest.unlink(missing_ok=True)


def _remove_files(directory: Path) -> None:
    """Once the manifest is gone, some of the files would be taken for all of them."""
    for file in directory.glob("*.safetensors*"):
        file.unlink(missing_ok=True)


def _root(out: Path, directory: Path | None) -> Path:
    # The same for the same run, so that what a killed one left is found and removed.
    run = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:12]
    return (directory or SHARED_MEMORY).absolute() / f"polar-weights-{run}"


class EngineWeights:
    """The engines of a rollout server's nodes, through its policy-update call.

    Engines freeze between two tokens while they load, and generations go on with the new weights: every
    token carries the version it was sampled with. The newest weights stay when the run has ended, for nodes
    that join later.
    """

    def __init__(
        self, client: Client, out: Path, directory: Path | None = None, *, share: Share | None = None
    ) -> None:
        """`directory` is one that the nodes see, below one of their `weight_roots`.

        `share`: engines take the weights from this process's GPU; files follow while training goes on.
        """
        self._client = client
        self._share = share
        self._writing: tuple[Path, Thread] | None = None
        self._unwritten: dict[Path, SharedWeights] = {}
        """Directories whose weights could not be written → those on the GPU."""
        self._version: int | None = None
        self._root = _root(out, directory)

    def push(self, policy: Exports) -> int:
        """Engines that cannot load, or that somebody pauses, keep what they have: the version stays."""
        self.wait_for_files()
        version = retry(self._client.policy).newest + 1
        began = time.monotonic()
        path, shared = self._exported(policy)
        exported = time.monotonic()
        if shared is not None and shared.files_at_once:
            self._begin_files(path, shared)
        try:
            view, refusal = self._ordered(path, version)
        finally:
            # Whatever became of the order, it may still be followed: from files, when the memory is let go.
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

    def _ordered(self, path: Path, version: int) -> tuple[PolicyView, PolarError | None]:
        """What the server says after it was asked for these weights, and why it refused, if it did."""
        refusal: PolarError | None = None
        try:
            view = self._client.update_policy(path, version=version)
        except (Unavailable, Conflict) as error:
            # The request may have been carried out and only its answer lost: what is stored holds.
            view, refusal = retry(self._client.policy), error
        # One that is still under way somewhere changes nothing once its version was asked for.
        self._remove_unneeded(view, undecided=path if view.newest < version else None)
        return view, refusal

    def close(self) -> None:
        """Let no engine read what ends with this process."""
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

    def _exported(self, policy: Exports) -> tuple[Path, SharedWeights | None]:
        """Where engines find the weights, and those on the GPU, if they are not in files yet."""
        self._root.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=self._root))
        path.chmod(0o755)
        try:
            shared = policy.share(path, self._share) if self._share and isinstance(policy, Shares) else None
            if shared is None:
                policy.export(path)
        except BaseException:
            # Half of them would take the room of the next attempt.
            shutil.rmtree(path)
            raise
        return path, shared

    def _remove_unneeded(self, view: PolicyView, *, undecided: Path | None) -> None:
        """Leave what nodes are told to load, and what they go back to if none of them can."""
        named = {view.path, view.fallback.path if view.fallback else None}
        for found in self._root.iterdir():
            if found != undecided and str(found) not in named:
                if self._writing is not None and found == self._writing[0]:
                    self.wait_for_files()
                # Somebody may be reading it who does not know better.
                transfer.withdraw(found)
                shutil.rmtree(found)
                if held := self._unwritten.pop(found, None):
                    held.withdraw()

    def _write_files(self, directory: Path, shared: SharedWeights) -> None:
        """Let engines that start later read the weights from files, and then let go of the GPU's memory."""
        try:
            if directory.is_dir():
                shared.write()
            shared.withdraw()
        except Exception as error:
            # An engine that finds the manifest reads the memory that it names, whatever is there by then.
            self._unwritten[directory] = shared
            if (directory / MANIFEST).exists():
                _remove_files(directory)
            log.error("the weights in %s are on the GPU alone, until this run ends: %s", directory, error)
