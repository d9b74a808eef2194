"""The paper's networks, the small networks of the literature, and heads on scattering features.

Imports `nn`; used by `tabular` and by users.
"""

from __future__ import annotations

from weightclip.models._convnet import ConvNet as ConvNet
from weightclip.models._mlp import MLP as MLP
from weightclip.models._scattering_head import ScatteringHead as ScatteringHead
from weightclip.models._small_cnn import SmallCNN as SmallCNN
from weightclip.models._wide_resnet import WideResNet as WideResNet
