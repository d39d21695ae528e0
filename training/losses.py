"""What training minimises, and what it reports: answers, dense labels, exact matches."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from training.model import Model, Views, in_patch_order
from training.samples import SKILLS, UNKNOWN

Batch = dict[str, Tensor]
_LINKS = 0.5  # weight of each link
_NOTHING = 0.15  # weight of patches that hold nothing: most do


class Losses(NamedTuple):
    answers: Tensor  # mean over answer tokens
    dense: Tensor
    by_skill: Tensor  # [2, skills]: sums of losses, numbers of tokens; detached


def losses(model: Model, batch: Batch) -> Losses:
    hidden, views = _forward(model, batch)
    at = batch["answers"]
    logits = model.logits(hidden.flatten(0, 1)[at]).float()
    each = F.cross_entropy(logits, batch["targets"].flatten()[at].long(), reduction="none")
    skills = batch["skills"].flatten()[at].long()
    sums = torch.zeros(2, len(SKILLS), device=each.device)
    sums[0].index_add_(0, skills, each.detach())
    sums[1].index_add_(0, skills, torch.ones_like(each))
    return Losses(each.mean(), dense_loss(model, views, batch), sums)


def dense_loss(model: Model, views: Views, batch: Batch) -> Tensor:
    glyphs, colors, places, *links = model.dense(views.patches)
    named = torch.zeros((), device=glyphs.device)
    for logits, name in ((glyphs, "glyphs"), (colors, "colors")):
        labels = in_patch_order(batch[name]).flatten().long()
        each = F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="none", ignore_index=UNKNOWN)
        weights = torch.where(labels == 0, _NOTHING, (labels != UNKNOWN).float())
        named = named + (each * weights).sum() / weights.sum()
    for logits, cells in zip(links, batch["links"], strict=True):
        labels = in_patch_order(cells).flatten().long()
        each = F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=0, reduction="sum")
        named = named + _LINKS * each / (labels != 0).sum().clamp(min=1)
    return named + F.mse_loss(places.float(), _places(batch["glyphs"]).expand_as(places))


def exact_matches(model: Model, batch: Batch) -> Tensor:
    """[2, skills]: samples whose whole answer greedy decoding would give, and samples.

    A question that is too long for its batch has no answer there, and does not count.
    """
    hidden, _ = _forward(model, batch)
    at = batch["answers"]
    guesses = model.logits(hidden.flatten(0, 1)[at]).argmax(-1)
    rows, length = batch["ids"].shape
    wrong = torch.zeros(rows, device=at.device)
    wrong.index_add_(0, at // length, (guesses != batch["targets"].flatten()[at]).float())
    skills = batch["skills"].max(1).values.long()
    counts = torch.zeros(2, len(SKILLS), device=at.device)
    answered = skills >= 0
    counts[0].index_add_(0, skills.clamp(min=0), ((wrong == 0) & answered).float())
    counts[1].index_add_(0, skills.clamp(min=0), answered.float())
    return counts


def _forward(model: Model, batch: Batch) -> tuple[Tensor, Views]:
    hidden, views = model(batch["pixels"], batch["ids"], batch["positions"], batch["slots"].flatten().long())
    return hidden, views


def _places(cells: Tensor) -> Tensor:
    """Column and row of each patch, -1..1: [1, N, 2]."""
    _, rows, columns = cells.shape
    y, x = torch.meshgrid(
        torch.linspace(-1, 1, rows, device=cells.device),
        torch.linspace(-1, 1, columns, device=cells.device),
        indexing="ij",
    )
    return torch.stack((in_patch_order(x[None]), in_patch_order(y[None])), dim=-1)
