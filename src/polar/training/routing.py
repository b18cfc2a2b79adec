"""Routing replay: tokens of a mixture of experts go to the experts that they were sampled with.

Engine and trainer round differently, and where two experts are nearly alike to a router, each may choose
another: the trainer would then compute another model than the one that sampled. Which experts are taken is
replayed; how much each counts is computed from the router's own scores, so that the router learns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polar.errors import InvalidInput
from polar.models.completion import Routing
from polar.training.head import to_device

_TOPKS = (torch.topk, torch.Tensor.topk)
_HINT = "set model.routing to own to train with the routing that the trainer computes"


class Router(NamedTuple):
    """The module that chooses a layer's experts."""

    layer: int
    module: Any

    @property
    def experts(self) -> int:
        return int(self.module.num_experts)

    @property
    def chosen(self) -> int:
        """Experts per token."""
        return int(self.module.top_k)


def routers(model: nn.Module) -> list[Router]:
    """Find the innermost modules with `top_k` and `num_experts`, by the layer number in their name."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "top_k", None), int)
        and isinstance(getattr(module, "num_experts", None), int)
    ]
    names = [name for name, _ in found]
    return [
        Router(int(layer[1]), module)
        for name, module in found
        if not any(other.startswith(f"{name}.") for other in names)
        and (layer := re.search(r"\.(\d+)\.", name)) is not None
    ]


class RoutingReplay:
    """Replays the recorded routing of batches in every router of these models.

    Every router takes the largest of its scores by `torch.topk`, whatever else it does with them: there, and
    only there, the recorded experts replace its own.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._routers = [router for model in models for router in routers(model)]
        self._rows: Tensor | None = None
        """Routing of the current batch, [tokens, layers, experts]."""
        self._known: Tensor | None = None
        for router in self._routers:
            forward = partial(self._forward, router, router.module.forward)
            router.module.forward = torch.compiler.disable(forward)

    def replay(self, routing: Routing | None, layers: int, device: torch.device) -> None:
        """Use this routing from now on; None for the routers' own."""
        self._rows = self._known = None
        if routing is None:
            return
        rows = self._lay_out(routing, layers)
        # Torch knows few operations on pairs of bytes.
        self._rows = to_device(rows if rows.dtype == np.uint8 else rows.astype(np.int32), device)
        self._known = (self._rows != 0).any(-1).any(-1)

    def _lay_out(self, routing: Routing, layers: int) -> Routing:
        if not self._routers:
            raise InvalidInput(
                "experts were recorded, and the model has no routers that are known", hint=_HINT
            )
        chosen, experts = self._routers[0].chosen, self._routers[0].experts
        if routing[0].size != layers * chosen or int(routing.max()) >= experts:
            raise InvalidInput(
                f"{routing[0].size} experts of each token were recorded, numbered up to {routing.max()}; the"
                f" model has {layers} layers that take {chosen} of {experts} experts",
                hint=f"train the model that was sampled with; or {_HINT}",
            )
        return routing.reshape(len(routing), layers, chosen)

    def _forward(self, router: Router, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._rows is None or self._known is None:
            return forward(*args, **kwargs)
        with _ChosenExperts(self._rows[:, router.layer].long(), self._known, router.experts) as chosen:
            made = forward(*args, **kwargs)
        if not chosen.are_taken and not chosen.are_those_of(made):
            raise InvalidInput(
                f"{type(router.module).__name__} of layer {router.layer} does not take the largest of its"
                " scores by torch.topk, and so not the experts that were recorded",
                hint=_HINT,
            )
        return made


class _ChosenExperts(TorchFunctionMode):  # type: ignore[misc]
    """Replaces `topk` results by the recorded experts."""

    def __init__(self, rows: Tensor, known: Tensor, experts: int) -> None:
        super().__init__()
        self._rows = rows
        self._known = known
        self._scored = (len(rows), experts)
        self.are_taken = False

    def are_those_of(self, made: Any) -> bool:
        """Whether a router chose these itself, as one that routes by token id does."""
        told = self._rows[self._known].sort(-1).values
        choices = [one for one in made if isinstance(one, Tensor) and one.shape == self._rows.shape]
        return not told.any() or any(torch.equal(one[self._known].sort(-1).values, told) for one in choices)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        # Routers that choose groups of experts first take the largest of other scores, too.
        if func not in _TOPKS or args[0].shape != self._scored or found.indices.shape != self._rows.shape:
            return found
        self.are_taken = True
        chosen = torch.where(self._known[:, None], self._rows, found.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
