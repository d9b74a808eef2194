"""Certified upper bounds of the operator norm of convolutions (SOUNDNESS, section 3, "Conv").

On each axis y[j] = Σ_t θ[t]·x[s·j + d·t − pad], with kernel size k, stride s, dilation d, g = gcd(s, d), input size n.

* An input entry i meets tap t only if d·t ≡ i + pad (mod s), a condition on t mod s/g, and each such t fixes j. So an
  entry appears in at most m = ∏⌈k/(s/g)⌉ patches, and ‖Ax‖ ≤ ‖R‖·‖patches(x)‖ ≤ √m·‖R‖·‖x‖.
* Schur: ‖A‖₂ ≤ √(‖A‖₁‖A‖_∞); a row of A holds one output channel's kernel, a column the taps of one residue class.
* With P = min(pad, d(k−1)), zero padding is a part of circular convolution at any N ≥ n + P (the zeros at both ends can
  be the same ones): rows whose window lies wholly in the padding are zero, the windows of the others start at different
  places mod N, and no two indices in reach are congruent unless both are padding. If lcm(s, d) divides N, splitting x
  by its index mod s leaves a convolution of stride 1 at N/s, which the DFT makes block diagonal: exactly one matrix of
  (channels out) × (channels in · s) per frequency.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from weightclip.bounds._operator_norms import check_p, frobenius, spectral_norm
from weightclip.errors import CertificationError

Size = int | Sequence[int]
Padding = int | str | Sequence[int]

_U64 = 2.0**-53
_CHUNK = 1 << 22  # complex numbers held at a time by the DFT bound (64 MiB)


def overlap(kernel: Size, stride: Size = 1, dilation: Size = 1, output_size: Size | None = None) -> int:
    """m = ∏ over axes of ⌈k/(s/gcd(s, d))⌉: in how many patches one input entry can appear.

    Args:
        kernel, stride, dilation: an int or one per axis; the number of axes is the kernel's.
        output_size: number of output positions per axis, where known: no entry appears in more patches than there are.
            Not for circular padding with a kernel that wraps around its input (one patch then holds an entry twice).
    """
    kernel = (kernel,) if isinstance(kernel, int) else tuple(kernel)
    axes = len(kernel)
    strides, dilations = per_axis(stride, axes, "stride"), per_axis(dilation, axes, "dilation")
    counts = [-(-k // (s // math.gcd(s, d))) for k, s, d in zip(kernel, strides, dilations, strict=True)]
    if output_size is not None:
        counts = [min(c, o) for c, o in zip(counts, per_axis(output_size, axes, "output_size"), strict=True)]
    return math.prod(counts)


def kernel_matrices(weight: Tensor, groups: int = 1) -> Tensor:
    """The kernel as R: (groups, c_out/groups, c_in/groups · taps)."""
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def kernel_matrix_norm(weight: Tensor, groups: int = 1) -> Tensor:
    """max over groups of ‖R_g‖₂; √overlap times this bounds the convolution."""
    return _largest(spectral_norm(kernel_matrices(weight.detach(), groups)))


def row_sum_norm(weight: Tensor) -> Tensor:
    """n_∞, the ∞-norm: largest Σ|θ| over output channels (attained where a whole window lies inside the input)."""
    sums = weight.detach().flatten(1).abs().sum(1, dtype=torch.float64)
    return _largest(sums) * (1.0 + (weight.numel() + 4) * _U64)


def column_sum_norm(weight: Tensor, groups: int = 1, stride: Size = 1, dilation: Size = 1) -> Tensor:
    """n₁, the 1-norm: largest Σ|θ| over input channels and residue classes of taps mod s/gcd(s, d)."""
    axes = weight.dim() - 2
    strides, dilations = per_axis(stride, axes, "stride"), per_axis(dilation, axes, "dilation")
    sums = weight.detach().abs().unflatten(0, (groups, -1)).sum(1, dtype=torch.float64)  # groups x c_in/g x kernel
    for axis, (s, d) in enumerate(zip(strides, dilations, strict=True), start=2):
        q, k = s // math.gcd(s, d), weight.shape[axis]
        every = (slice(None),) * axis + (slice(None, None, q),)
        classes = [sums.narrow(axis, r, 1 + (k - 1 - r) // q * q)[every].sum(axis) for r in range(min(q, k))]
        sums = torch.stack(classes, axis)
    return _largest(sums) * (1.0 + (weight.numel() + 4) * _U64)


def schur_norm(weight: Tensor, groups: int = 1, stride: Size = 1, dilation: Size = 1) -> Tensor:
    """√(n₁·n_∞), a bound of the 2-norm by the Schur test."""
    product = column_sum_norm(weight, groups, stride, dilation) * row_sum_norm(weight)
    return product.sqrt() * (1.0 + 4.0 * _U64)


def dft_norm(
    weight: Tensor,
    groups: int,
    dilation: Size,
    input_size: Size,
    *,
    stride: Size = 1,
    padding: Padding | None = None,
    circular: bool = False,
) -> Tensor:
    """Largest singular value over the frequencies of the (circular) convolution that contains this one.

    Args:
        weight: ``(c_out, c_in/groups, *kernel)``.
        groups, dilation: as in ``nn.Conv*d``.
        input_size: spatial size n. The zero-padding bound also holds for every smaller input, the circular one for n
            only.
        stride: stride; the exact polyphase form is used, not the stride-1 bound.
        padding: zero padding; None bounds every padding, at size n + d(k−1).
        circular: circular padding; needs total padding ≤ d(k−1) and s | n on each axis (:class:`ConvNorm` checks it).
    """
    weight = weight.detach()
    axes = weight.dim() - 2
    kernel = tuple(weight.shape[2:])
    strides, dilations = per_axis(stride, axes, "stride"), per_axis(dilation, axes, "dilation")
    sizes = per_axis(input_size, axes, "input_size")
    pads = [(d * (k - 1),) * 2 for k, d in zip(kernel, dilations, strict=True)]
    if padding is not None:
        pads = _pads(padding, kernel, dilations)
    if weight.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=weight.device)

    waves = []
    for axis, (n, k, s, d, pad) in enumerate(zip(sizes, kernel, strides, dilations, pads, strict=True)):
        size = n
        if not circular:
            block = math.lcm(s, d)
            size = block * -(-(n + min(max(pad), d * (k - 1))) // block)
        elif n % s:
            raise CertificationError(f"circular convolution: stride {s} does not divide the input size {n}")
        if size % d == 0:  # entries of different index mod d never meet: d/gcd copies of one smaller convolution
            size, s, d = size // d, s // math.gcd(s, d), 1
        half = axis == axes - 1  # real kernels: frequencies f and −f have conjugate matrices
        waves.append(_waves(size // s, s, d, k, half, weight.device))

    grouped = weight.unflatten(0, (groups, -1)).to(torch.complex128)  # groups x out x in x kernel
    per_frequency = grouped[..., 0].numel() // math.prod(kernel[:-1]) * math.prod(w.shape[1] for w in waves)
    rest = per_frequency * math.prod(w.shape[0] for w in waves[1:])
    tops = []
    for first in waves[0].split(max(1, _CHUNK // rest)):
        symbol = grouped
        for wave in (first, *waves[1:]):
            symbol = torch.einsum("goct...,fpt->goc...fp", symbol, wave)  # frequency and phase go to the end
        order = [*range(3, 3 + 2 * axes, 2), 0, 1, 2, *range(4, 4 + 2 * axes, 2)]
        matrices = symbol.permute(order).flatten(axes + 2)  # frequencies x groups x out x (in · phases)
        tops.append(spectral_norm(matrices).amax())
    # Rounding of the waves and sums: at most (taps + 8 per axis)·u·Σ|θ| per entry, Σ|θ| ≤ √taps·‖θ‖₂.
    taps = math.prod(kernel)
    slack = 4.0 * (taps + 16 * axes + 8) * _U64 * math.sqrt(taps) * frobenius(weight)
    return torch.stack(tops).amax() + slack


@dataclass(frozen=True)
class ConvNorm:
    """Certified upper bound of ‖A‖_p of a convolution A, the kernel being the argument: the least of those that hold.

    ``nn.ConvTranspose*d`` stores its weight as ``(c_in, c_out/groups, *kernel)``, the layout of the convolution A which
    it transposes: ‖Aᵀ‖₂ = ‖A‖₂, and the exponents 1 and ∞ change places. A's input is the transposed layer's output;
    ``output_padding`` makes it longer.

    Attributes:
        p: 1, 2 or inf.
        stride, padding, dilation, groups, padding_mode: as in ``nn.Conv*d`` ("same" and "valid" included).
        transposed, output_padding: of ``nn.ConvTranspose*d``.
        input_size: spatial input size, if known: adds the DFT bound and caps the overlap. The result then holds for
            inputs of at most this size (circular padding: of this size).
        use_dft: whether to try the DFT bound (the tightest, and the dearest) when ``input_size`` is given.
    """

    p: float = 2
    stride: Size = 1
    padding: Padding = 0
    dilation: Size = 1
    groups: int = 1
    padding_mode: str = "zeros"
    transposed: bool = False
    output_padding: Size = 0
    input_size: Size | None = None
    use_dft: bool = True

    def __call__(self, weight: Tensor) -> Tensor:
        """0-dim float64 tensor on the device of the weight ``(c_out, c_in/groups, *kernel)``, as cast.

        Geometries without a bound (reflect, replicate, circular padding that repeats outputs) are refused.
        """
        check_p(self.p)
        axes = weight.dim() - 2
        if axes not in (1, 2, 3):
            raise CertificationError(f"convolution weight of {weight.dim()} dimensions: expected 3 to 5")
        kernel = tuple(weight.shape[2:])
        strides, dilations = per_axis(self.stride, axes, "stride"), per_axis(self.dilation, axes, "dilation")
        sizes = None if self.input_size is None else per_axis(self.input_size, axes, "input_size")
        if self.transposed:
            outputs = None if sizes is None else self._outputs(sizes, kernel, strides, dilations)
            dual = {1: math.inf, 2: 2, math.inf: 1}[self.p]
            return replace(self, p=dual, input_size=outputs, transposed=False)(weight)
        pads = _pads(self.padding, kernel, dilations)
        _check_padding(self.padding_mode, pads, kernel, strides, dilations, sizes)
        if self.p == math.inf:
            return row_sum_norm(weight)
        if self.p == 1:
            return column_sum_norm(weight, self.groups, strides, dilations)

        outputs = None
        circular = self.padding_mode == "circular"
        if sizes is not None:
            spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
            outputs = [(n + sum(e) - w) // s + 1 for n, e, w, s in zip(sizes, pads, spans, strides, strict=True)]
            if min(outputs) < 1:
                raise CertificationError(
                    f"convolution: kernel {kernel} does not fit into the padded input {tuple(sizes)}"
                )
            if circular and any(w > n for w, n in zip(spans, sizes, strict=True)):
                outputs = None  # the kernel wraps around: one patch holds an entry twice
        m = overlap(kernel, strides, dilations, outputs)
        bound = kernel_matrix_norm(weight, self.groups) * (math.sqrt(m) * (1.0 + 4.0 * _U64))
        bound = torch.minimum(bound, schur_norm(weight, self.groups, strides, dilations))
        if sizes is not None and self.use_dft:
            dft = dft_norm(
                weight, self.groups, dilations, sizes, stride=strides, padding=self.padding, circular=circular
            )
            bound = torch.minimum(bound, dft)
        return bound

    def _outputs(
        self, sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
    ) -> tuple[int, ...]:
        """Spatial output size of the transposed layer."""
        pads = per_axis(cast(Size, self.padding), len(kernel), "padding")
        more = per_axis(self.output_padding, len(kernel), "output_padding")
        dims = zip(sizes, kernel, strides, dilations, pads, more, strict=True)
        outputs = tuple((n - 1) * s + d * (k - 1) + 1 - 2 * e + o for n, k, s, d, e, o in dims)
        if min(outputs) < 1:
            raise CertificationError(f"transposed convolution: input {self.input_size} leaves an empty output")
        return outputs

    def matrices(self, weight: Tensor) -> Tensor:
        """The kernel matrices R: (groups, rows, columns), a view of the weight."""
        return kernel_matrices(weight, self.groups)

    def overlap(self, weight: Tensor) -> int:
        """m: √m·‖R‖₂ bounds the 2-norm."""
        return overlap(weight.shape[2:], self.stride, self.dilation)


def _check_padding(
    mode: str,
    pads: list[tuple[int, int]],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    sizes: Sequence[int] | None,
) -> None:
    """Circular outputs are a part of the circular convolution at n only if none repeats and the stride divides n."""
    if mode == "zeros":
        return
    if mode != "circular":
        raise CertificationError(f"convolution with padding_mode={mode!r} has no bound: use 'zeros' or 'circular'")
    for axis, (pad, k, s, d) in enumerate(zip(pads, kernel, strides, dilations, strict=True)):
        if sum(pad) > d * (k - 1):
            raise CertificationError(
                f"circular convolution: total padding {sum(pad)} on axis {axis} exceeds dilation*(kernel-1) = "
                f"{d * (k - 1)}, outputs repeat: pad less"
            )
        if s > 1 and sizes is None:
            raise CertificationError("circular convolution with stride > 1: pass input_size, the stride must divide it")
        if sizes is not None and sizes[axis] % s:
            raise CertificationError(
                f"circular convolution: stride {s} does not divide the input size {sizes[axis]} on axis {axis}"
            )


@functools.cache  # recorded graphs read them: none may be dropped
def _waves(size: int, stride: int, dilation: int, kernel: int, half: bool, device: torch.device) -> Tensor:
    """(frequency, phase, tap): exp(2πi·f·⌊dt/s⌋/size) where the tap's phase d·t mod s matches, else 0."""
    frequencies = torch.arange(size // 2 + 1 if half else size, device=device)
    offsets = dilation * torch.arange(kernel, device=device)
    turns = frequencies[:, None] * (offsets // stride) % size  # reduced in integers, so that angles stay accurate
    wave = torch.polar(torch.ones_like(turns, dtype=torch.float64), turns.double() * (2.0 * math.pi / size))
    step = math.gcd(stride, dilation)  # other phases meet no tap
    phases = torch.arange(0, stride, step, device=device)
    return wave[:, None, :] * (offsets % stride == phases[:, None])


def per_axis(value: Size, axes: int, name: str) -> tuple[int, ...]:
    """One number for each axis; a single one stands for all of them."""
    values = (value,) * axes if isinstance(value, int) else tuple(int(v) for v in value)
    if len(values) == 1 and axes > 1:
        values = values * axes
    if len(values) != axes:
        raise CertificationError(f"convolution over {axes} axes: {name} has {len(values)} entries, {values}")
    return values


def _pads(padding: Padding, kernel: Sequence[int], dilations: Sequence[int]) -> list[tuple[int, int]]:
    """Zeros before and after, per axis, as torch places them."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
        return [(t // 2, t - t // 2) for t in totals]
    if isinstance(padding, str):
        raise CertificationError(f"convolution with padding={padding!r}: expected numbers, 'same' or 'valid'")
    return [(e, e) for e in per_axis(padding, len(kernel), "padding")]


def _largest(values: Tensor) -> Tensor:
    if values.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=values.device)
    return values.amax()
