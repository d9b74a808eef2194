"""Private training of dense heads on fixed features: one step without a host in the loop, replayed as a CUDA graph."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from weightclip.bounds import gram_iteration, spectral_norm
from weightclip.errors import WeightclipError
from weightclip.noise import NOISE, SAMPLING, Streams, joint_multiplier
from weightclip_studies.images._gather import gather
from weightclip_studies.images._product import Features, integer_product, outputs, quantise
from weightclip_studies.images._settings import ALLOCATIONS, HeadSettings

_MARGIN = 1 + 1e-5  # norms and scales are float32
_TINY = 1e-30


def certified_norm(w: Tensor) -> Tensor:
    """Upper bound of the largest singular value; on CUDA by 8 Gram products, at most 1% above it for 128 units."""
    return gram_iteration(w, 8) if w.is_cuda else spectral_norm(w)


def noise_seed(settings: HeadSettings, sigma: float, seed: int, stream: str) -> int:
    """Seed of a run's draws and noise: a hash of all that tells runs apart, so that no two of them share noise."""
    told = json.dumps([stream, settings.to_dict(), sigma, seed], sort_keys=True)
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "big") >> 1


@dataclass
class Contribution:
    """What one step reads from the records: per-layer sums, and the bounds that hold for each record."""

    sums: list[tuple[Tensor, Tensor]]  # per layer: weight sum, bias sum times beta; float64
    sensitivities: Tensor  # Delta_k


class HeadTrainer:
    """Trains one head on one data set.

    Args:
        data: The records, inside the unit ball.
        settings: The head and how it is trained.
        sigma: Noise multiplier.
        seed: Of the initial weights and, hashed with everything else here, of the streams of draws and noise.
        stream: Name of this run among others on the same records (data set, stage, method, epsilon).
        classes: Number of outputs.

    Formal guarantees:
        Each step includes each record independently with probability q = batch/records and releases
        (G_k + s_k N(0, I))/b for all layers jointly with sum_k Delta_k^2/s_k^2 = 1/sigma^2 (joint cap: s_k = sigma t_k
        with sum_k ||g_k||^2/t_k^2 <= 1), where Delta_k bounds one record's contribution to G_k: one Poisson-sampled
        Gaussian mechanism of multiplier sigma under adding or removing one record. Weights after each step are
        post-processing. Sums over records are exact (hidden layer) or float64; noise is added in float64, and drawn
        from the package's streams: those of one run and step, which no other has. Public: settings, number of records,
        widths, initial weights. ``sigma = 0`` is not private.
    """

    def __init__(
        self, data: Features, settings: HeadSettings, sigma: float, seed: int, stream: str = "", classes: int = 10
    ) -> None:
        self.data, self.settings, self.sigma, self.classes = data, settings, float(sigma), classes
        device = data.codes.device
        self.q = min(1.0, settings.batch / len(data))
        self.b = self.q * len(data)
        # rows of the padded batch: exceeded with probability below 1e-20; never truncated, see `finish`
        rows = len(data) if self.q == 1 else math.ceil(self.b + 10 * math.sqrt(self.b) + 40)
        self.rows = min(len(data), rows) + -min(len(data), rows) % 16
        widths = [data.width, *([settings.hidden] if settings.hidden else []), classes]
        self.shapes = [(o, i) for i, o in zip(widths[:-1], widths[1:], strict=True)]
        sizes = [n for o, i in self.shapes for n in (o * i, o)]
        self.flat = torch.zeros(sum(sizes), device=device)
        self.layers = self._views(self.flat, sizes)
        generator = torch.Generator().manual_seed(seed)
        if settings.hidden:  # unit-norm inputs: rows of norm about `gain`; the output layer starts at zero
            first = torch.randn(self.shapes[0], generator=generator) * (settings.gain / math.sqrt(data.width))
            self.layers[0][0].copy_(first)
            second = torch.randn(self.shapes[1], generator=generator) / math.sqrt(settings.hidden)
            self.layers[1][0].copy_(second)
        self.gradient = torch.zeros_like(self.flat)
        self.gradients = self._views(self.gradient, sizes)
        self.m, self.v = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.mean = self.flat.clone()
        self.means = self._views(self.mean, sizes)
        self.t = torch.zeros((), device=device)
        self.largest = torch.zeros((), dtype=torch.int64, device=device)
        self.order = torch.arange(len(data), device=device)
        # pages of a batch's rows are mapped once: on a CPU that takes longer than a step
        self._rows = None if device.type == "cuda" else data.codes.new_empty(self.rows, data.width)
        self.half = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.scales = torch.zeros(len(self.shapes), dtype=torch.float64, device=device)
        self.sensitivities = torch.zeros(len(self.shapes), dtype=torch.float64, device=device)
        self.gains = torch.zeros(len(self.shapes), dtype=torch.float64, device=device)
        self._cache: dict[tuple[float, ...], Tensor] = {}
        self.streams = Streams.seeded(noise_seed(settings, self.sigma, seed, stream))
        self.steps = 0  # those whose random numbers were drawn
        self.noise = torch.zeros_like(self.flat)
        self.noises = self._views(self.noise, sizes)
        self.chances = torch.ones(len(data), dtype=torch.float64, device=device)
        self._sampler = torch.Generator(device)
        self._clip()

    def _views(self, flat: Tensor, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
        parts = flat.split(sizes)
        return [(w.view(s), b) for w, b, s in zip(parts[::2], parts[1::2], self.shapes, strict=True)]

    # -- one step --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """The random numbers of the next step, in the memory that it reads: a graph holds none of its own."""
        self.streams.normal_(self.noise, NOISE, self.steps)
        self._sampler.manual_seed(self.streams.seeds(SAMPLING, self.steps)[0])
        self.chances.uniform_(generator=self._sampler)
        self.steps += 1

    def draw(self) -> Tensor:
        """Poisson sample as row numbers of fixed length, padded with the zero record."""
        n = len(self.data)
        chosen = self.chances < self.q
        place = chosen.cumsum(0) - 1
        self.largest.copy_(torch.maximum(self.largest, place[-1] + 1))
        slot = torch.where(chosen, place.clamp(max=self.rows), self.rows)
        return torch.full((self.rows + 1,), n, device=slot.device).scatter_(0, slot, self.order)[: self.rows]

    def contribution(self, rows: Tensor) -> Contribution:
        """Sums of bounded per-record gradients over the given rows, and the bounds."""
        s, data = self.settings, self.data
        target = data.labels.index_select(0, rows)
        x, x8 = gather(data.codes, rows, self.half, self._rows)
        live = (rows < len(data)).unsqueeze(1)
        z, hidden = self._forward(x, self.layers)
        top = self._loss_gradient(z, target) * live
        cotangents = [top]
        if hidden is not None:
            cotangents = [(top @ self.layers[1][0]) * (hidden > 0), top]
        factors = [(data.norms.index_select(0, rows).square() + s.bias_scale**2).sqrt()]
        if hidden is not None:
            factors.append((hidden.square().sum(1) + s.bias_scale**2).sqrt())
        scales, delta = self._limit(cotangents, factors)
        sums = []
        for k, (cotangent, scale) in enumerate(zip(cotangents, scales, strict=True)):
            scaled = torch.where(torch.isfinite(scale), scale, 0).unsqueeze(1) * cotangent
            scaled = torch.where(torch.isfinite(scaled), scaled, 0)
            if k == 0:
                # entries of a bounded record are at most twice Delta/||(x, beta)||; `quantise` clamps the rest
                codes, step = quantise(scaled, 2 * delta[0])
                sums.append((integer_product(codes, x8) * (step * data.scale), codes.sum(0) * (step * s.bias_scale)))
            else:
                assert hidden is not None
                wide = scaled.double()
                sums.append((wide.t() @ hidden.double(), wide.sum(0) * s.bias_scale))
        return Contribution(sums, delta)

    def _forward(self, x: Tensor, layers: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor | None]:
        (w, b), rest = layers[0], layers[1:]
        product = (x @ w.to(self.half).t()).float() if x.is_cuda else outputs(x, w)
        first = product * self.data.scale + b
        if not rest:
            return first, None
        hidden = first.relu()
        return hidden @ rest[0][0].t() + rest[0][1], hidden

    def _loss_gradient(self, z: Tensor, target: Tensor) -> Tensor:
        """Gradient of tau CE(z/tau) at the logits, its norm capped at B."""
        g = (z / self.settings.temperature).softmax(1)
        g = g.scatter_add(1, target.unsqueeze(1), torch.full_like(g[:, :1], -1.0))
        if self.settings.loss_cap is not None:
            norm = torch.linalg.vector_norm(g, dim=1, keepdim=True).clamp_min(_TINY)
            g = g * (self.settings.loss_cap / norm).clamp_max(1)
        return g

    def _limit(self, cotangents: list[Tensor], factors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Scale of each record in each layer's product, and Delta_k (SOUNDNESS section 4)."""
        s, device = self.settings, self.flat.device
        norms = [torch.linalg.vector_norm(c, dim=1) for c in cotangents]
        products = [d * a for d, a in zip(norms, factors, strict=True)]
        if s.joint_cap is not None:
            total = sum((p / t).square() for p, t in zip(products, s.joint_cap, strict=True))
            assert isinstance(total, Tensor)
            scale = total.clamp_min(_TINY).rsqrt().clamp_max(1)
            return [scale] * len(products), self._constants(s.joint_cap)
        if s.layer_caps is not None:
            caps = [(t / p.clamp_min(_TINY)).clamp_max(1) for p, t in zip(products, s.layer_caps, strict=True)]
            return caps, self._constants(s.layer_caps)
        bound = min(s.loss_cap or math.inf, math.sqrt(2))
        outer = math.sqrt(1 + s.bias_scale**2)  # a_1: inputs lie in the unit ball
        if not s.hidden:
            return [torch.ones_like(norms[0])], self._constants((bound * outer,))
        scales = [torch.ones_like(n) for n in norms]
        if s.cotangent_radius is not None:
            scales[0] = (s.cotangent_radius / norms[0].clamp_min(_TINY)).clamp_max(1)
            first = torch.full((), s.cotangent_radius * outer, dtype=torch.float64, device=device)
        else:
            first = bound * outer * self._gain(1)
        if s.layer_radius is not None:
            scales[1] = (s.layer_radius / factors[1].clamp_min(_TINY)).clamp_max(1)
            second = torch.full((), bound * s.layer_radius, dtype=torch.float64, device=device)
        else:  # ||h|| <= ||W_1|| + ||b_1||, enforced as a radius: the bound holds whatever the product rounds
            x = self._input_gain() + self.layers[0][1].double().norm()
            radius = (x.square() + s.bias_scale**2).sqrt()
            scales[1] = (radius / factors[1].double().clamp_min(_TINY)).clamp_max(1).float()
            second = bound * radius
        return scales, torch.stack([first, second]) * _MARGIN

    def _gain(self, k: int) -> Tensor:
        """Certified norm of a layer's weight, as ClipWeights left it."""
        return certified_norm(self.layers[k][0]) if self.settings.weight_norm is None else self.gains[k]

    def _input_gain(self) -> Tensor:
        """Certified norm of the first layer's weight as the forward pass reads it, with room for rounded outputs.

        Casting to bf16 can raise the spectral norm by several percent, so the norm is that of the weight as cast; the
        outputs then round by 2^-8 relatively, and float32 accumulation by less.
        """
        if self.half is torch.float32:
            return self._gain(0) * (1 + 1e-5)
        return certified_norm(self.layers[0][0].to(self.half).float()) * (1 + 2.0**-7)

    def _constants(self, values: tuple[float, ...]) -> Tensor:
        if values not in self._cache:  # copied to the device once, before a graph is captured
            self._cache[values] = torch.tensor(values, dtype=torch.float64, device=self.flat.device) * _MARGIN
        return self._cache[values]

    def noise_scales(self, delta: Tensor) -> Tensor:
        """s_k."""
        if self.settings.joint_cap is not None:
            return self.sigma * delta
        dims = [o * (i + 1) for o, i in self.shapes]
        return ALLOCATIONS[self.settings.allocation].scales(delta, dims, self.sigma)

    @torch.no_grad()
    def step(self, rows: Tensor | None = None) -> None:
        """Draw, bound, sum, noise, Adam, ClipWeights, average."""
        self.prepare()
        self._step(rows)

    def _step(self, rows: Tensor | None = None) -> None:
        c = self.contribution(self.draw() if rows is None else rows)
        self.sensitivities.copy_(c.sensitivities)
        self.scales.copy_(self.noise_scales(c.sensitivities))
        for k, (sums, noises, into) in enumerate(zip(c.sums, self.noises, self.gradients, strict=True)):
            for part, noise, out in zip(sums, noises, into, strict=True):
                out.copy_((part + noise.double() * self.scales[k]) / self.b)
            into[1].div_(self.settings.bias_scale)
        self.t += 1
        self.m.lerp_(self.gradient, 0.1)
        self.v.mul_(0.999).addcmul_(self.gradient, self.gradient, value=0.001)
        rate = self.settings.learning_rate * (1 - (self.t - 1) / self.settings.steps) / (1 - 0.9**self.t)
        self.flat.sub_(rate * self.m / ((self.v / (1 - 0.999**self.t)).sqrt() + 1e-10))
        self._clip()
        self.mean.lerp_(self.flat, (1 - torch.clamp((self.t - 1) / (self.t + 9), max=self.settings.average)))

    @torch.no_grad()
    def _clip(self) -> None:
        if self.settings.weight_norm is None:
            return
        limit = self.settings.weight_norm
        for k, (w, _) in enumerate(self.layers):
            norm = certified_norm(w)
            scale = limit / norm.clamp_min(_TINY)
            w.mul_((scale if self.settings.sphere else scale.clamp_max(1)).float())
            bound = torch.full_like(norm, limit) if self.settings.sphere else norm.clamp_max(limit)
            self.gains[k].copy_(bound * _MARGIN)

    # -- whole runs --------------------------------------------------------------------------------------------------

    def fit(self) -> HeadTrainer:
        """All steps; on CUDA the step is captured once and replayed."""
        if self.flat.device.type != "cuda":
            for _ in range(self.settings.steps):
                self.step()
            return self.finish()
        graph = self.capture()
        for _ in range(self.settings.steps):
            self.replay(graph)
        torch.cuda.synchronize()
        del graph
        return self.finish()

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """One step of a captured graph, with random numbers of its own."""
        self.prepare()
        graph.replay()

    @torch.no_grad()
    def capture(self) -> torch.cuda.CUDAGraph:
        """One step as a CUDA graph; the warm-up steps it takes are forgotten, never released."""
        state = [x.clone() for x in self._state()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._restore(state)
        return graph

    def _state(self) -> tuple[Tensor, ...]:
        """All that one step leaves to the next."""
        return self.flat, self.m, self.v, self.mean, self.t, self.gains

    def _restore(self, state: list[Tensor]) -> None:
        for x, before in zip(self._state(), state, strict=True):
            x.copy_(before)

    def finish(self) -> HeadTrainer:
        """Refuse a run whose draws were cut short or whose noise was not what was accounted."""
        if int(self.largest) > self.rows:
            raise WeightclipError(f"a draw of {int(self.largest)} records exceeded {self.rows} rows: run again")
        if self.sigma > 0 and self.settings.joint_cap is None:
            got = float(joint_multiplier(self.sensitivities, self.scales))
            if not math.isclose(got, self.sigma, rel_tol=1e-6):
                raise WeightclipError(f"joint multiplier {got} differs from {self.sigma}")
        return self

    @torch.no_grad()
    def logits(self, data: Features, averaged: bool = True) -> Tensor:
        """Outputs of the averaged (or last) weights for all records of ``data``."""
        layers = self.means if averaged else self.layers
        parts = data.codes[:-1].split(8192)
        return torch.cat([self._forward(p.to(self.half) if p.is_cuda else p, layers)[0] for p in parts])

    def accuracy(self, data: Features) -> float:
        """Share of records of ``data`` whose largest output is the label's, of the averaged weights, in percent."""
        return 100 * float((self.logits(data).argmax(1) == data.labels[:-1]).double().mean())
