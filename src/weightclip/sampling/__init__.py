"""Draws, pieces, per-record randomness and data sets: which records a step sees.

Imports `factors` and `noise`; imported by `cli`, `engine`, `search` and `tabular`.
"""

from __future__ import annotations

from weightclip.sampling._datasets import ArrayDataset as ArrayDataset
from weightclip.sampling._datasets import ArrowDataset as ArrowDataset
from weightclip.sampling._draws import TAIL as TAIL
from weightclip.sampling._draws import Share as Share
from weightclip.sampling._draws import largest_batch as largest_batch
from weightclip.sampling._draws import poisson_indices as poisson_indices
from weightclip.sampling._keyed import KeyedRecords as KeyedRecords
from weightclip.sampling._keyed import Wanted as Wanted
from weightclip.sampling._loader import RECORDS as RECORDS
from weightclip.sampling._loader import SLOTS as SLOTS
from weightclip.sampling._loader import BatchInfo as BatchInfo
from weightclip.sampling._loader import PoissonLoader as PoissonLoader
from weightclip.sampling._randomness import FORWARD as FORWARD
from weightclip.sampling._randomness import ForwardRandomness as ForwardRandomness
from weightclip.sampling._randomness import model_draws as model_draws
