"""Losses that know how steep they can be at the model's raw outputs.

Imports `factors`; imported by `audit`, `certificate`, `cli`, `engine`, `integrations`, `noise`, `tabular` and `text`.
"""

from __future__ import annotations

from weightclip.losses._base import Loss as Loss
from weightclip.losses._cross_entropy import CausalLM as CausalLM
from weightclip.losses._cross_entropy import CrossEntropy as CrossEntropy
from weightclip.losses._custom import PerRecordLoss as PerRecordLoss
from weightclip.losses._elementwise import L1 as L1
from weightclip.losses._elementwise import MSE as MSE
from weightclip.losses._elementwise import BCEWithLogits as BCEWithLogits
from weightclip.losses._elementwise import Cosine as Cosine
from weightclip.losses._elementwise import Huber as Huber
from weightclip.losses._elementwise import MultiMargin as MultiMargin
from weightclip.losses._elementwise import SmoothL1 as SmoothL1
from weightclip.losses._recognise import recognise as recognise
