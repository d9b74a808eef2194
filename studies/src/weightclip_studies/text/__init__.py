"""Text: SST-2 with a pretrained sentence encoder, from a head on frozen features to fine-tuning all of it."""

from __future__ import annotations

from ._data import Sentences as Sentences
from ._data import load_sst2 as load_sst2
from ._networks import Full as Full
from ._networks import Head as Head
from ._networks import Last as Last
from ._networks import Lora as Lora
from ._networks import Part as Part
from ._study import Study as Study
from ._training import Fit as Fit
from ._training import Settings as Settings
from ._training import fit as fit
