"""Both ends of a push of weights: policies that are exported or shared, servers that have them loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from polar.app.weights import SharedWeights
from polar.engines import transfer
from polar.engines.embedded.model import read_weights
from polar.engines.transfer import Share
from polar.errors import PolarError
from polar.models.policy import PolicyView


class Saved:
    """A policy of one small file."""

    def __init__(self, content: str = "whole") -> None:
        self._content = content

    def export(self, directory: Path) -> None:
        (directory / "weights").write_text(self._content)


class LoadingServer:
    """Takes weights as an embedded engine of this model does."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self.engine: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.version = 0
        self.path: str | None = None
        self.refusal: PolarError | None = None

    def policy(self) -> PolicyView:
        return PolicyView(version=self.version, newest=self.version, path=self.path)

    def update_policy(self, path: Path, *, version: int) -> PolicyView:
        if self.refusal is not None:
            raise self.refusal
        self.version, self.path = version, str(path)
        state = self.engine.state_dict()
        found = read_weights(self.version, path, self._model, state)
        for name, tensor in found.tensors.items():
            state[name].copy_(tensor)
        return self.policy()


class SharingServer:
    """Sees what engines are asked to load."""

    found: tuple[str, ...] = ()
    view = PolicyView(version=0, newest=0, path=None)
    trouble: BaseException | None = None
    is_decided = True
    """Whether an order that fails is known not to be followed any more."""

    def policy(self) -> PolicyView:
        return self.view

    def update_policy(self, path: Path, *, version: int) -> PolicyView:
        if self.trouble is not None:
            if self.is_decided:
                self.view = self.view.model_copy(update={"newest": version})
            raise self.trouble
        self.found = tuple(file.name for file in path.iterdir())
        self.view = PolicyView(version=version, newest=version, path=str(path))
        return self.view


class OnGpu:
    """Stands for a policy on a GPU; its copies are known to be held or let go."""

    def __init__(self, trouble: Exception | None = None, *, files_at_once: bool = False) -> None:
        self._files_at_once = files_at_once
        self.trouble = trouble
        """Why its copies cannot be written to files."""
        self.held: list[Path] = []

    def export(self, directory: Path) -> None:
        raise AssertionError("it is shared")

    def share(self, directory: Path, share: Share) -> SharedWeights:
        lock = transfer.publish({}, directory)
        self.held.append(directory)

        def write() -> None:
            if self.trouble is not None:
                (directory / "model-00001-of-00002.safetensors").touch()
                raise self.trouble
            (directory / "model.safetensors").touch()

        def withdraw() -> None:
            transfer.withdraw(directory)
            lock.close()
            self.held.remove(directory)

        return SharedWeights(write, withdraw, files_at_once=self._files_at_once)
