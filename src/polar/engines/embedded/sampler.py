"""Draws tokens, and says how likely each was under the distribution it was drawn from.

The distribution is softmax(logits / temperature), cut to the top k tokens, then to the smallest
set of those with probability top_p, and renormalised: what vLLM calls `processed_logprobs`.
A request's biases are added to its logits before, its penalties for tokens that it has sampled are taken
from them, and what its grammar forbids is left out of them.
At temperature 0 the most likely token is taken, and its logprob is that of the plain softmax
(temperature 1, nothing cut), as in vLLM, since the distribution drawn from would say 0 always.

Every request draws from a random generator of its own, one number a token, so what else is in
the batch does not change its tokens.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from polar.engines.embedded.grammar import Guide

GREEDY_BELOW = 1e-5
"""A temperature below this is taken for 0: dividing by it would overflow."""


@dataclass(slots=True)
class Draw:
    """How one request samples."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    guide: Guide | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    sampled: Counter[int] = field(default_factory=Counter, init=False)
    """How often each token was drawn; only kept where that is penalised."""
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_shaped(self) -> bool:
        return self.guide is not None or bool(self.logit_bias or self.sampled)

    def drew(self, id: int) -> None:
        """Take note of a token for the penalties of later ones."""
        if self.presence_penalty or self.frequency_penalty:
            self.sampled[id] += 1

    def shape(self, logits: torch.Tensor) -> None:
        """Change one row of logits into those to draw from."""
        if self.logit_bias:
            ids, biases = zip(*self.logit_bias, strict=True)
            logits[list(ids)] += torch.tensor(biases, device=logits.device)
        if self.sampled:
            counts = torch.tensor(list(self.sampled.values()), device=logits.device)
            logits[list(self.sampled)] -= self.presence_penalty + self.frequency_penalty * counts
        if self.guide is not None:
            self.guide.mask(logits)

    @property
    def is_cut(self) -> bool:
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0)


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """One token and its logprob for each row of logits."""
    device = logits.device
    greedy = [draw.is_greedy for draw in draws]
    temperatures = [1.0 if draw.is_greedy else draw.temperature for draw in draws]
    shaped = [row for row, draw in enumerate(draws) if draw.is_shaped]
    if shaped:
        logits = logits.to(torch.float32, copy=True)
        for row in shaped:
            draws[row].shape(logits[row])
    scores = logits.float() / torch.tensor(temperatures, device=device)[:, None]
    cut = [row for row, draw in enumerate(draws) if draw.is_cut]
    if cut:
        scores[cut] = _cut(scores[cut], [draws[row] for row in cut])
    logprobs = scores.log_softmax(dim=-1)
    if all(greedy):
        chosen = logprobs.argmax(dim=-1)
    else:
        chosen = _inverse_cdf(logprobs, [0.0 if draw.is_greedy else draw.random.random() for draw in draws])
        if any(greedy):
            chosen = torch.where(torch.tensor(greedy, device=device), logprobs.argmax(dim=-1), chosen)
    taken = logprobs.gather(1, chosen[:, None])[:, 0]
    ids: list[int] = chosen.tolist()
    for draw, id in zip(draws, ids, strict=True):
        draw.drew(id)
    return ids, taken.tolist()


def score(logits: torch.Tensor, ids: Sequence[int]) -> list[float]:
    """How likely given tokens are, one for each row of logits: at temperature 1, nothing cut."""
    targets = torch.tensor(ids, dtype=torch.long, device=logits.device)
    scores: list[float] = logits.float().log_softmax(dim=-1).gather(1, targets[:, None])[:, 0].tolist()
    return scores


def _inverse_cdf(logprobs: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """The token at which the cumulative probability passes a number from [0, 1)."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1]
    points = torch.tensor(uniforms, dtype=torch.float64, device=logprobs.device) * total
    # Rounding may reach the total itself, beyond which every token has probability zero.
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, points[:, None], right=True)[:, 0].clamp(max=logprobs.shape[1] - 1)


def _cut(scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Scores with -inf for the tokens that top_k and top_p exclude."""
    vocabulary = scores.shape[1]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocabulary, device=scores.device)
    limits = torch.tensor([d.top_k if d.top_k > 0 else vocabulary for d in draws], device=scores.device)
    ordered = ordered.masked_fill(ranks >= limits[:, None], -math.inf)
    probabilities = ordered.double().softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    limits = torch.tensor([d.top_p for d in draws], dtype=torch.float64, device=scores.device)
    # The most likely token has nothing before it and always stays.
    ordered = ordered.masked_fill((before >= limits[:, None]) & (ranks > 0), -math.inf)
    return torch.full_like(scores, -math.inf).scatter(1, order, ordered)
