"""The norm of one record's gradient over several uses of one parameter, exact where that is cheap (SOUNDNESS 7 a)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weightclip.factors._dense import DENSE, dense_factors, position_gram
from weightclip.factors._embedding import EMBEDDING, embedding_factors, embedding_norm
from weightclip.factors._limits import CANCELLED, beta_of, product_rounding, trains

if TYPE_CHECKING:
    from weightclip.factors._collector import Use

_SMALL = 2**20  # entries of a parameter whose per-record gradients are formed (in chunks of records)
_CHUNK = 2**23  # entries of such a chunk


def norm_over(uses: Sequence[Use], way: int) -> Tensor:
    """Norm of each record's gradient over all these uses of one layer: blocks are orthogonal, uses of one add up.

    Formal guarantees:
        Never below the norm of what the uses' ``scaled`` add for a record of scale one.
    """
    found: dict[Any, list[Use]] = {}
    for use in uses:
        found.setdefault(use.key(), []).append(use)
    norms = [_norm_of_one(block, way) for block in found.values()]
    if len(norms) == 1:
        return norms[0]
    return torch.stack(norms).double().square().sum(0).sqrt().float() * (1 + 2.0**-22)


def _norm_of_one(uses: list[Use], way: int) -> Tensor:
    if len(uses) == 1:
        return uses[0].norm(way)
    alike = len({trains(use.part) for use in uses}) == 1
    simple = all(u.part._wc_form in (DENSE, EMBEDDING) for u in uses)
    if alike and simple and trains(uses[0].part)[0]:
        return _rank_one(uses)
    if alike and uses[0].part.weight.numel() <= _SMALL and not any(use.cut() for use in uses):
        return _formed(uses)
    parts = [use.grouped() for use in uses]
    norms = [use.part._wc_form.norm(use.part, x, d, way, conf) for use, (x, d, conf) in zip(uses, parts, strict=True)]
    return torch.stack(norms).sum(0) * (1 + len(uses) * 2.0**-23)


def _rank_one(uses: list[Use]) -> Tensor:
    """Dense layers and embeddings: all uses are positions of one product, a sum of left (x) right."""
    tables, products = [], []
    for use in uses:
        x, d, _ = use.grouped()
        if use.part._wc_form is EMBEDDING:
            ids, right = x.reshape(x.shape[0], -1), d.reshape(x.shape[0], -1, d.shape[-1])
            if use.part.padding_idx is not None:
                right = torch.where((ids == use.part.padding_idx)[..., None], torch.zeros_like(right), right)
            tables.append((ids, right))
        else:
            x, d = (t.reshape(t.shape[0], -1, t.shape[-1]) for t in (x, d))
            products.append((x, d) if use.turned else (d, x))
    part, beta = uses[0].part, beta_of(uses[0].part)
    dtype, total, free = part._wc_product.dtype, 0.0, []
    if products:
        left, right = (torch.cat([p[k].double() for p in products], 1) for k in (0, 1))
        total = total + position_gram(right, left, beta, dtype).double().square()
        a, b = dense_factors(right, left, beta)
        free.append(a.double() * b.double())
    if tables:
        ids, rows = (torch.cat([t[k] for t in tables], 1) for k in (0, 1))
        total = total + embedding_norm(ids, rows, None, dtype).double().square()
        a, b = embedding_factors(ids, rows)
        free.append(a.double() * b.double())
    if products and tables:
        picked = left.gather(2, ids[:, None, :].expand(-1, left.shape[1], -1))  # records x positions x tokens
        total = total + 2 * (picked * (right @ rows.double().mT)).sum((1, 2))
        terms = picked.shape[1] * picked.shape[2] + right.shape[2] + 8
        total = total + terms * 2.0**-52 * free[0] * free[1]
    exact = torch.as_tensor(total).clamp(min=0).sqrt() * (1 + 2.0**-22)
    return torch.maximum(exact, CANCELLED * torch.stack(free).sum(0)).float()


def _formed(uses: list[Use]) -> Tensor:
    """Per-record gradients of all uses, added up in float64, a chunk of records at a time."""
    parts = [use.grouped() for use in uses]
    chunk = max(1, _CHUNK // max(1, uses[0].part.weight.numel()))
    found = []
    for start in range(0, parts[0][1].shape[0], chunk):
        total, room, free = None, 0.0, torch.zeros((), dtype=torch.float64, device=uses[0].d.device)
        for use, (x, d, conf) in zip(uses, parts, strict=True):
            kind, x, d = use.part._wc_form, x[start : start + chunk], d[start : start + chunk]
            weight, *bias = kind.gradients(use.part, x, d, conf)
            own = torch.cat([g.flatten(1) for g in (weight.mT if use.turned else weight, *bias)], 1)
            total = own if total is None else total + own
            a, b = kind.factors(use.part, x, d, conf)
            places = math.prod(d.shape[1:]) + 8
            room = room + product_rounding(places, use.part._wc_product.dtype, x.is_cuda) * a.double() * b.double()
            free = free + a.double() * b.double()
        assert total is not None
        found.append(torch.maximum(total.square().sum(1).sqrt() + room, CANCELLED * free).float())
    return torch.cat(found)
