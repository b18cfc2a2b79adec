"""A trainer's weights on their way to the engines of a rollout server."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Protocol

from polar.client import Client
from polar.errors import Conflict, PolarError, Unavailable, retry
from polar.models.policy import PolicyView

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
"""Nodes take weights from there unless their settings say otherwise, and no disk is written."""


class Exports(Protocol):
    """A policy whose weights can be written down."""

    def export(self, directory: Path) -> None:
        """Write the weights, or an adapter alone, as engines read them."""


class EngineWeights:
    """The engines of a rollout server's nodes, through its policy-update call.

    Engines freeze between two tokens while they load, and generations go on with the new weights: every
    token carries the version it was sampled with. The newest weights stay when the run has ended, for nodes
    that join later.
    """

    def __init__(self, client: Client, out: Path, directory: Path | None = None) -> None:
        """`directory` is one that the nodes see, below one of their `weight_roots`."""
        self._client = client
        self._version: int | None = None
        # The same for the same run, so that what a killed one left is found and removed.
        run = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:12]
        self._root = (directory or SHARED_MEMORY).absolute() / f"polar-weights-{run}"

    def push(self, policy: Exports) -> int:
        """Engines that cannot load, or that somebody pauses, keep what they have: the version stays."""
        version = retry(self._client.policy).newest + 1
        path = self._written(policy)
        refusal: PolarError | None = None
        try:
            view = self._client.update_policy(path, version=version)
        except (Unavailable, Conflict) as error:
            # The request may have been carried out and only its answer lost: what is stored holds.
            view, refusal = retry(self._client.policy), error
        # One that is still under way somewhere changes nothing once its version was asked for.
        self._remove_unneeded(view, undecided=path if view.newest < version else None)
        if refusal is None or view.path == str(path):
            self._version = view.version
        elif self._version is None:
            raise refusal
        else:
            log.error("the engines stay at version %d: %s", self._version, refusal)
        return self._version

    def _written(self, policy: Exports) -> Path:
        self._root.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=self._root))
        path.chmod(0o755)
        try:
            policy.export(path)
        except BaseException:
            # Half of them would take the room of the next attempt.
            shutil.rmtree(path)
            raise
        return path

    def _remove_unneeded(self, view: PolicyView, *, undecided: Path | None) -> None:
        """Leave what nodes are told to load, and what they go back to if none of them can."""
        named = {view.path, view.fallback.path if view.fallback else None}
        for found in self._root.iterdir():
            if found != undecided and str(found) not in named:
                shutil.rmtree(found)
