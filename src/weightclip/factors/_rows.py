"""Which dimension of a tensor holds the records, and how many rows each has (SOUNDNESS section 7, condition b).

Found by running the model on two numbers of public records: the one dimension that grows with them is theirs. What was
found is what every later pass must repeat; anything else is refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from weightclip.errors import ContractError

SIZES = ((7, 2), (5, 3))  # numbers of public records; a model may not take every one


@dataclass(frozen=True)
class Layout:
    """Rows i*m .. (i+1)*m - 1 of dimension ``dim`` are record i's; m = 0: no dimension holds records."""

    dim: int = 0
    m: int = 1


RECORDS, NONE = Layout(), Layout(0, 0)


def layout_between(
    one: Sequence[int], other: Sequence[int], sizes: tuple[int, int] = SIZES[0]
) -> Layout | None:  # fmt: skip
    """The layout of a tensor that has these shapes for these numbers of records; None if there is none."""
    if len(one) != len(other):
        return None
    grown = [k for k, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if not grown:
        return NONE
    (a, b), (many, few) = (one[grown[0]], other[grown[0]]), sizes
    fits = len(grown) == 1 and a % many == 0 and a // many * few == b
    return Layout(grown[0], a // many) if fits else None


@dataclass
class RowTable:
    """What two runs found: the layouts of each place's tensors, by their number of dimensions.

    A place is whatever names a use: a private layer, or an argument of an operator on a copied parameter.
    """

    sizes: tuple[int, int] = SIZES[0]
    layouts: dict[tuple[Hashable, int], set[Layout]] = field(default_factory=dict)
    uses: dict[Hashable, int] = field(default_factory=dict)

    def learn(self, one: dict[Hashable, list], other: dict[Hashable, list], names: dict[Hashable, str]) -> None:
        """Compare the shapes that the runs noted, place by place."""
        for place in one.keys() | other.keys():
            many, few = one.get(place, []), other.get(place, [])
            name, (n, k) = names.get(place, "a layer"), self.sizes
            if len(many) != len(few):
                raise ContractError(
                    f"{name} is used {len(many)} times for {n} records and {len(few)} times for {k}: what runs must "
                    "not depend on the batch size."
                )
            self.uses[place] = len(many)
            for a, b in zip(many, few, strict=True):
                found = layout_between(a, b, self.sizes)
                if found is None:
                    raise ContractError(
                        f"{name} gets a tensor of shape {tuple(a)} for {n} records and {tuple(b)} for {k}: one "
                        "dimension must hold the records, each with as many rows."
                    )
                self._add(place, len(a), found, names)
                if found == NONE:  # every record gets its own copy, in front
                    self._add(place, len(a) + 1, RECORDS, names)

    def _add(self, place: Hashable, dims: int, layout: Layout, names: dict[Hashable, str]) -> None:
        known = self.layouts.setdefault((place, dims), set())
        known.add(layout)
        if len({(k.dim, k.m == 0) for k in known}) > 1:
            raise ContractError(
                f"{names.get(place, 'a layer')} gets records on different dimensions of tensors with {dims} "
                "dimensions: keep records on dimension 0."
            )

    def find(self, place: Hashable, shape: Sequence[int], records: int) -> Layout | None:
        """The layout of a tensor at this place, if it is one that was found."""
        for layout in self.layouts.get((place, len(shape)), ()):
            if layout.m == 0 or shape[layout.dim] == records * layout.m:
                return layout
        return None
