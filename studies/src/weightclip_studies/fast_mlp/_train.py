"""The loop: Poisson draws, bounded factors, joint noise, optimiser, ClipWeights, average, for a stack of runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weightclip.accounting import Mechanism
from weightclip.errors import CertificationError, WeightclipError
from weightclip.noise import NOISE, Streams
from weightclip.sampling import largest_batch

from ._bounds import clip_, gain, scales, sensitivities
from ._data import Data
from ._objectives import Objective
from ._settings import Adam, Budget, Settings, noise_multiplier

_INIT = "fast-mlp/init"
_PIECE = 1 << 18  # inputs of a piece of a draw: two megabytes
Weights = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True, eq=False)
class Run:
    """One trained network and what it cost.

    Attributes:
        settings: How it was trained.
        weights: (weight, bias) of every layer, float32; they multiply the projected input, before the temperature.
        sigma: Noise multiplier of the joint release of all layers.
        q: Sampling rate.
        steps: Number of releases.
        batch: Public divisor b.
        sensitivities: Δ_k at the last step, rounding slack included (t_k under a joint cap).
        scales: s_k at the last step.
    """

    settings: Settings
    weights: Weights
    sigma: float
    q: float
    steps: int
    batch: float
    sensitivities: tuple[float, ...]
    scales: tuple[float, ...]

    @property
    def mechanism(self) -> Mechanism:
        """What the accountant has to count."""
        return Mechanism("gaussian", self.sigma, self.q, self.steps, label="noisy gradients")

    @property
    def finite(self) -> bool:
        """Whether training stayed finite."""
        return all(bool(torch.isfinite(t).all()) for layer in self.weights for t in layer)


def train_many(
    X: np.ndarray | Tensor,
    y: np.ndarray | Tensor,
    settings: Sequence[Settings],
    seeds: Sequence[int | Streams],
    *,
    objective: Objective,
    noise: float | Budget | Sequence[float],
    subsets: Sequence[np.ndarray] | None = None,
    records: int | None = None,
    init: Sequence[tuple[Tensor, Tensor]] | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> list[list[Run]]:
    """Train every setting with every seed.

    Settings that agree in architecture, batch size and number of epochs run as one stack. All settings of one seed see
    the same draws and the same standard normals (common random numbers), as in an engine with that seed.

    Args:
        X: Private records, in memory or looked up when drawn.  # records x features
        y: Private labels.
        settings: What to train.
        seeds: Seeds for experiments, or the streams of a run. Secure streams serve one setting only.
        objective: What is minimised.
        noise: Noise multiplier for all, one for each setting, or the budget of each run.
        subsets: Records of each seed (all of one length), if not all of them: splits that go with the seed.
        records: Public number of records, from which q and T follow; None declares the true number public.
        init: Initial (weight, bias) of every layer, instead of random ones; all settings then need one architecture.
        device: Where to compute.
        progress: Called with (steps done, steps in all).

    Returns:
        Runs by setting, then by seed.

    Formal guarantees:
        Each run alone is the composition of T Poisson-sampled Gaussian mechanisms, `Run.mechanism`, under adding or
        removing one record, given q, b, the settings and the initial weights; non-finite records contribute zero.
        Sums and noise are formed in float64 (SOUNDNESS section 6). Two runs with one seed share their noise: never
        release both.
    """
    streams = [s if isinstance(s, Streams) else Streams.seeded(s) for s in seeds]
    if len(settings) > 1 and any(s.is_secure for s in streams):
        raise WeightclipError("train_many: secure streams serve one setting only, runs of one seed share their noise.")
    data = Data(X, y, objective, subsets, len(streams), torch.device(device))
    groups: dict[tuple, list[int]] = defaultdict(list)
    for i, s in enumerate(settings):
        kind = None if s.joint_cap is not None else s.allocation
        groups[(s.hidden, s.batch, float(s.epochs), s.optimizer, kind)].append(i)
    public = data.n if records is None else int(records)
    total = sum(settings[members[0]].steps(public) for members in groups.values())
    done = 0
    runs: list[list[Run]] = [[] for _ in settings]
    for members in groups.values():
        stack = _Stack(data, [settings[i] for i in members], streams, objective, public)
        stack.sigma = stack.vector(noise_multiplier(noise, i, stack.q, stack.steps) for i in members)
        stack.noisy = bool((stack.sigma > 0).any())
        stack.start(init)
        for step in range(stack.steps):
            stack.step(step)
            done += 1
            if progress is not None:
                progress(done, total)
        for place, i in enumerate(members):
            runs[i] = [stack.run(place, s) for s in range(len(streams))]
    return runs


def logits(runs: Sequence[Run], X: np.ndarray | Tensor, chunk: int = 1 << 16) -> Tensor:
    """Outputs of several runs divided by their temperature, float32.  # runs x records x outputs"""
    X = torch.as_tensor(X, dtype=torch.float32)
    result = []
    for run in runs:
        parts = []
        for part in X.split(chunk):
            h = part
            radius = run.settings.input_radius
            if radius is not None:
                h = h * (radius / torch.linalg.vector_norm(h, dim=1, keepdim=True).clamp(min=radius))
            for k, (w, b) in enumerate(run.weights):
                h = torch.nn.functional.linear(h.relu() if k else h, w, b)
            parts.append(h / run.settings.temperature)
        result.append(torch.cat(parts) if parts else X.new_zeros(0, run.weights[-1][0].shape[0]))
    return torch.stack(result)


class _Stack:
    """Runs of one architecture, batch size and length: seeds x settings of them."""

    def __init__(
        self, data: Data, settings: list[Settings], streams: list[Streams], objective: Objective, n: int
    ) -> None:
        self.data, self.settings, self.streams, self.objective = data, settings, streams, objective
        self.device = data.device
        first = settings[0]
        self.q, self.steps, self.b = first.sample_rate(n), first.steps(n), float(min(first.batch, n))
        self.sizes = [data.shape[1], *first.hidden, objective.outputs]
        self.layers = len(self.sizes) - 1
        self.joint = first.joint_cap is not None
        self.sigma, self.noisy = self.vector(0.0 for _ in settings), False
        self.lr = self.vector(s.lr for s in settings)
        self.final_lr = self.vector(s.final_lr for s in settings)
        self.averaging = self.vector(s.averaging for s in settings)
        self.temperature = self.vector(s.temperature for s in settings)
        self.cap = self.vector(math.inf if s.cap is None else s.cap for s in settings)
        self.beta = self.vector(s.bias_scale for s in settings)
        self.input_radius = self.vector(math.inf if s.input_radius is None else s.input_radius for s in settings)
        self.sphere = torch.tensor([s.fix_lip for s in settings], device=self.device)
        self.clips = any(s.weight_norm is not None for s in settings)
        self.weight_norm, self.layer_radius, self.cotangent_radius, self.joint_cap = (
            self.vector(v for s in settings for v in s.per_layer(name)).view(len(settings), -1)
            for name in ("weight_norm", "layer_radius", "cotangent_radius", "joint_cap")
        )
        self.limits_input = any(s.layer_radius is not None for s in settings)
        self.limits_cotangent = any(s.cotangent_radius is not None for s in settings)
        self.loss_bound = self.vector(objective.bound(s.cap) for s in settings)
        b_max = largest_batch(self.b, self.q, n)
        self.slack = 1 + 2 * (b_max + 8) * 2.0**-53 * b_max
        # The flat vector of parameters is W_1, b_1, W_2, b_2, ..., as a model's parameters are ordered.
        self.blocks: list[tuple[int, bool, slice]] = []
        place = 0
        for k in range(self.layers):
            for is_bias, size in ((False, self.sizes[k] * self.sizes[k + 1]), (True, self.sizes[k + 1])):
                self.blocks.append((k, is_bias, slice(place, place + size)))
                place += size
        self.dimension = place
        self.dims = self.vector(self.sizes[k + 1] * (self.sizes[k] + 1) for k in range(self.layers))
        owner = [k for k, _, part in self.blocks for _ in range(part.stop - part.start)]
        self.owner = torch.tensor(owner, device=self.device)  # layer of each parameter
        is_bias = [bias for _, bias, part in self.blocks for _ in range(part.stop - part.start)]
        # noise on a native bias gradient is s_k/beta
        self.per_beta = torch.where(torch.tensor(is_bias, device=self.device), 1 / self.beta[:, None], 1.0)

    def vector(self, values) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64, device=self.device)

    def views(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(weight, bias) of every layer in a flat tensor.  # ... x dimension"""
        lead = flat.shape[:-1]
        parts = [flat[..., part] for _, _, part in self.blocks]
        return [
            (parts[2 * k].view(*lead, self.sizes[k + 1], self.sizes[k]), parts[2 * k + 1]) for k in range(self.layers)
        ]

    def start(self, init: Sequence[tuple[Tensor, Tensor]] | None) -> None:
        """Initial weights, clipped, and the state of the optimiser."""
        shape = (len(self.streams), len(self.settings), self.dimension)
        self.flat = torch.empty(shape, dtype=torch.float64, device=self.device)
        self.params = self.views(self.flat)
        for s, stream in enumerate(self.streams):
            rng = stream.numpy(_INIT)
            for k, (w, b) in enumerate(self.params):
                if init is not None:
                    w[s], b[s] = init[k][0].to(w), init[k][1].to(b)
                    continue
                limit = 1 / math.sqrt(self.sizes[k])  # as nn.Linear does
                scale = self.vector(v.init_scale for v in self.settings)
                w[s] = torch.from_numpy(rng.uniform(-limit, limit, w.shape[2:])).to(w) * scale[:, None, None]
                b[s] = torch.from_numpy(rng.uniform(-limit, limit, b.shape[2:])).to(b) * scale[:, None]
        self.norms = self.clip()
        self.moments = [torch.zeros_like(self.flat), torch.zeros_like(self.flat)]
        self.average = self.flat.clone()
        self.delta = self.scale = torch.zeros(*shape[:2], self.layers, dtype=torch.float64, device=self.device)

    def clip(self) -> list[Tensor]:
        """ClipWeights; returns certified norms where they are needed."""
        if self.clips:
            norms = [clip_(w, self.weight_norm[:, k], self.sphere) for k, (w, _) in enumerate(self.params)]
            return [norm * (1 + max(self.sizes) * 2.0**-50) for norm in norms]
        return [] if self.joint else [gain(w) for w, _ in self.params]

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Δ_k and s_k of the step to come, from public values."""
        if self.joint:
            delta = self.joint_cap * (1 + 1e-9) * self.slack
            delta = delta.expand(len(self.streams), -1, -1)
            return delta, self.sigma[:, None] * delta  # one scale per record: s_k = sigma t_k, no root of K
        delta = self.slack * sensitivities(
            self.norms, [b for _, b in self.params], self.loss_bound, self.input_radius, self.beta,
            self.layer_radius, self.cotangent_radius,
        )  # fmt: skip
        return delta, scales(delta, self.dims, self.sigma, self.settings[0].allocation)

    def step(self, step: int) -> None:
        """One release and what follows from it."""
        self.delta, self.scale = self.bounds()
        if step == 0 and bool(torch.isinf(self.delta).any()):
            raise CertificationError(
                "train_many: a layer has no finite sensitivity; set input_radius, or layer_radius and "
                "cotangent_radius, and a cap for Huber."
            )
        gradient = self.summed(*self.data.draw(self.streams, self.q, step))
        if self.noisy:
            normals = torch.empty(len(self.streams), self.dimension, dtype=torch.float32, device=self.device)
            for s, stream in enumerate(self.streams):
                stream.normal_(normals[s], NOISE, step)
            # a float32 normal times a float64 scale: the product is formed in float64
            gradient += self.scale.index_select(-1, self.owner) * self.per_beta * normals[:, None, :]
        gradient /= self.b
        self.update(gradient, step)
        self.norms = self.clip()
        past = torch.zeros_like(self.averaging) if step == 0 else self.averaging
        self.average.lerp_(self.flat, (1 - past)[:, None].expand_as(self.flat))

    def summed(self, index: Tensor, mask: Tensor | None) -> Tensor:
        """G: sums over the drawn records of their gradients with bounded factors.  # seeds x settings x dimension"""
        # Pieces of a draw that stay in the processor's cache; the slack covers sums in any order.
        size = max(256, _PIECE // (index.shape[0] * self.sizes[0]))
        result = self.part(index[:, :size], None if mask is None else mask[:, :size])
        for start in range(size, index.shape[1], size):
            piece = slice(start, start + size)
            result += self.part(index[:, piece], None if mask is None else mask[:, piece])
        return result

    def part(self, index: Tensor, mask: Tensor | None) -> Tensor:
        """The share of G of some drawn records."""
        seeds, rows = index.shape
        runs = len(self.settings)
        x, square = self.data.look_up(index)  # the same for all settings
        square = square[:, None, :]  # seeds x 1 x rows
        # A projected record is a multiple of it: the factor is applied to what comes out of the first layer.
        shrink = (self.input_radius[:, None] / square.sqrt().clamp(min=1e-300)).clamp(max=1.0)  # seeds x runs x rows
        w, b = self.params[0]
        z = (x @ w.reshape(seeds, -1, self.sizes[0]).mT).view(seeds, rows, runs, -1).transpose(1, 2)
        z = z * shrink[..., None] + b[:, :, None, :]
        inputs: list[Tensor] = []  # of the layers after the first
        for w, b in self.params[1:]:
            inputs.append(z.relu())
            z = inputs[-1] @ w.mT + b[:, :, None, :]
        delta = self.objective.gradient(z, self.data.y[index][:, None, :], self.temperature, self.cap)
        if mask is not None:
            delta = delta * mask[:, None, :, None]
        deltas = [delta]
        for k in range(self.layers - 1, 0, -1):
            delta = (delta @ self.params[k][0]) * (inputs[k - 1] > 0)
            deltas.append(delta)
        deltas.reverse()
        x_squares = [square * shrink.square()] + [a.square().sum(-1) for a in inputs]
        factors = self.record_scales(deltas, inputs, x_squares)
        result = torch.empty(seeds, runs, self.dimension, dtype=torch.float64, device=self.device)
        for k, (gw, gb) in enumerate(self.views(result)):
            factor = factors[k]
            d = deltas[k] if factor is None else deltas[k] * factor[..., None]
            gb.copy_(d.sum(2))
            if k == 0:
                d = (d * shrink[..., None]).transpose(1, 2).reshape(seeds, rows, -1)
                gw.copy_((d.mT @ x).view_as(gw))
            else:
                gw.copy_(d.mT @ inputs[k - 1])
        return result

    def record_scales(self, deltas: list[Tensor], inputs: list[Tensor], x_squares: list[Tensor]) -> list[Tensor | None]:
        """One factor per record and layer that bounds its gradient (SOUNDNESS section 4), or None where none is asked.

        A record with a non-finite factor contributes zero: its cotangents and inputs are zeroed in place.
        """
        d_norms = [d.square().sum(-1).sqrt() for d in deltas]  # vector_norm is slow along short dimensions
        x_norms = [(s + self.beta.square()[:, None]).sqrt() for s in x_squares]
        products = [d * x for d, x in zip(d_norms, x_norms, strict=True)]  # norms of the gradients
        total = torch.stack(products).sum(0)  # no term is negative: finite if and only if all are
        if not math.isfinite(float(total.sum())):
            good = torch.isfinite(total)
            for factor in (*deltas, *inputs):
                factor.masked_fill_(~good[..., None], 0.0)
            d_norms = [d.masked_fill(~good, 0.0) for d in d_norms]
            x_norms = [x.masked_fill(~good, 1.0) for x in x_norms]
            products = [g.masked_fill(~good, 0.0) for g in products]
        if self.joint:
            relative = [g / self.joint_cap[:, k, None] for k, g in enumerate(products)]
            scale = torch.linalg.vector_norm(torch.stack(relative), dim=0).clamp(min=1.0).reciprocal()
            return [scale] * self.layers
        result: list[Tensor | None] = []
        for k, (d, x) in enumerate(zip(d_norms, x_norms, strict=True)):
            scale = None
            if self.limits_input:
                scale = (self.layer_radius[:, k, None] / x).clamp(max=1.0)
            if self.limits_cotangent:
                own = (self.cotangent_radius[:, k, None] / d.clamp(min=1e-300)).clamp(max=1.0)
                scale = own if scale is None else scale * own
            result.append(scale)
        return result

    def update(self, gradient: Tensor, step: int) -> None:
        """The optimiser, as torch writes it."""
        lr = self.lr * (1 - (1 - self.final_lr) * step / self.steps)
        first, second = self.moments
        rule = self.settings[0].optimizer
        if isinstance(rule, Adam):
            first.lerp_(gradient, 1 - rule.beta1)
            second.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
            root = (second / (1 - rule.beta2 ** (step + 1))).sqrt_().add_(rule.eps)
            move = first / root / (1 - rule.beta1 ** (step + 1))
        else:
            move = gradient if step == 0 or rule.momentum == 0 else first * rule.momentum + gradient
            first.copy_(move)
        self.flat -= lr[:, None] * move

    def run(self, place: int, seed: int) -> Run:
        """The finished run of one setting and seed."""
        weights = [(w[seed, place].float().cpu().clone(), b[seed, place].float().cpu().clone())
                   for w, b in self.views(self.average)]  # fmt: skip
        return Run(
            self.settings[place], tuple(weights), float(self.sigma[place]), self.q, self.steps, self.b,
            tuple(self.delta[seed, place].tolist()), tuple(self.scale[seed, place].tolist()),
        )  # fmt: skip
