"""The paper's networks, the small networks of the literature, and heads on scattering features.

Imports `nn`; imported by `tabular`.
"""

from __future__ import annotations

from weightclip.models._networks import MLP as MLP
from weightclip.models._networks import ConvNet as ConvNet
from weightclip.models._networks import ScatteringHead as ScatteringHead
from weightclip.models._networks import SmallCNN as SmallCNN
from weightclip.models._networks import WideResNet as WideResNet
