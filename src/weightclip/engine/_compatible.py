"""What a model needs before it can be trained privately, all of it at once, and the part that can be done for you."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weightclip._torch import AnyBatchNorm, AnyInstanceNorm, SpectralNorm
from weightclip.errors import ContractError

_GROUPS = 32
_NATIVE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Finding:
    """One layer that cannot be trained privately as it is.

    Attributes:
        name: Its path in the model.
        kind: Its type.
        problem: Why.
        fix: What to do.
        mechanical: Whether :func:`make_compatible` does it.
    """

    name: str
    kind: str
    problem: str
    fix: str
    mechanical: bool = False


@dataclass(frozen=True)
class Explanation:
    """Everything a model needs; prints as a table. Empty (and false) if it needs nothing."""

    rows: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __str__(self) -> str:
        if not self.rows:
            return "Every layer can be trained privately."
        head = ("layer", "type", "problem", "fix")
        cells = [(r.name or "(model)", r.kind, r.problem, r.fix) for r in self.rows]
        widths = [max(len(row[i]) for row in [head, *cells]) for i in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[3]]) for r in [head, *cells]]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

    def refuse(self) -> None:
        """One error with all of it, if there is anything."""
        if self.rows:
            hint = " wc.make_compatible(model) makes the changes that need no decision." if self._mechanical else ""
            raise ContractError(f"the model cannot be trained privately as it is.{hint}\n{self}")

    @property
    def _mechanical(self) -> bool:
        return any(row.mechanical for row in self.rows)


def explain(model: nn.Module) -> Explanation:
    """All layers of a model that need something before it can be trained privately, and what.

    Looks at the layers only, in the modes they are in. That no record changes another's result is tested later, by
    ``make_private``, on random records.

    Example::

        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> [(row.name, row.kind) for row in explain(model).rows]
        [('1', 'BatchNorm2d')]
        >>> explain(make_compatible(model, report=None)).rows
        ()
    """
    return Explanation(tuple(f for path, module in model.named_modules() for f in _findings(path, module)))


def make_compatible(model: nn.Module, report: Callable[[Any], Any] | None = print) -> nn.Module:
    """A copy of the model in which the problems of :func:`explain` with a mechanical fix are fixed.

    Batch normalisation becomes group normalisation (at most 32 groups) with the same scales and shifts; its running
    statistics are dropped, so that a pretrained model computes something else at first. Instance normalisation forgets
    its running statistics, embeddings their ``max_norm`` and ``scale_grad_by_freq``. Layers that are frozen and in
    eval mode stay as they are: they mix nothing.

    Args:
        model: The model; it is not changed.
        report: Gets an :class:`Explanation` of what was changed (printed by default), None for no report.
    """
    model = copy.deepcopy(model)
    done = tuple(row for row in explain(model).rows if row.mechanical)
    for name in {row.name: None for row in done}:
        fixed = _fixed(model.get_submodule(name))
        parent, _, last = name.rpartition(".")
        if name:
            setattr(model.get_submodule(parent), last, fixed)
        else:
            model = fixed
    if report is not None:
        report(Explanation(done) if done else "Nothing had to be changed.")
    return model


def _findings(path: str, module: nn.Module) -> Iterator[Finding]:
    kind = getattr(type(module), "_wc_native", type(module))

    def found(problem: str, fix: str, mechanical: bool = False) -> Finding:
        return Finding(path, kind.__name__, problem, fix, mechanical)

    trains = any(p.requires_grad for p in module.parameters(recurse=False))
    if isinstance(module, torch.jit.ScriptModule):
        yield found("compiled by torch.jit, where layers cannot be reached", "use the Python module, and torch.compile")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters(recurse=False)):
        yield found("has no shape yet", "run one forward pass on a public input first")
        return
    if isinstance(module, AnyBatchNorm) and (module.training or not module.track_running_stats):
        ours = kind in _NATIVE
        fix = "group normalisation, or freeze it and call eval()"
        fix = fix if ours else f"{fix} ({kind.__name__} is a layer of its own: replace it by hand)"
        yield found("batch normalisation mixes records", fix, ours)
    if isinstance(module, AnyInstanceNorm) and module.training and module.track_running_stats:
        yield found("running statistics are written by private records", "track_running_stats=False", True)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and trains:
        if module.max_norm is not None:
            yield found("max_norm rewrites the table in forward", "max_norm=None", True)
        if module.scale_grad_by_freq:
            yield found("scale_grad_by_freq divides by counts of the batch", "scale_grad_by_freq=False", True)
    if isinstance(module, SpectralNorm) and module.training:
        yield found("writes a buffer in every forward pass", "remove_parametrizations, and Bounds(weight_norm=...)")
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        yield found("averages raw gradients before the noise", "make the plain model (.module) private")
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            yield found(f"parameter '{name}' is {parameter.dtype}", "keep parameters in float32 and use autocast")


def _fixed(module: Any) -> nn.Module:
    """The module without its mechanical problems."""
    if isinstance(module, AnyBatchNorm):
        return _group_norm(module)
    if isinstance(module, AnyInstanceNorm):
        module.track_running_stats, module.running_mean, module.running_var = False, None, None
        module.num_batches_tracked = None
    else:
        module.max_norm, module.scale_grad_by_freq = None, False
    return module


def _group_norm(norm: Any) -> nn.GroupNorm:
    channels = norm.num_features
    # at least two channels in a group: without positions a channel alone would be normalised to zero
    groups = max(g for g in range(1, _GROUPS + 1) if channels % g == 0 and (channels // g > 1 or channels == 1))
    fresh = nn.GroupNorm(groups, channels, norm.eps, norm.affine)
    if norm.affine:
        fresh.to(norm.weight.device, norm.weight.dtype)
        for name in ("weight", "bias"):
            old, new = getattr(norm, name), getattr(fresh, name)
            new.data.copy_(old.data)
            new.requires_grad_(old.requires_grad)
    return fresh.train(norm.training)
