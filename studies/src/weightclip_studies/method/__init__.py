"""Measurements behind the method's choices: mechanisms, norms, caps, defaults, accuracy under
the exponential mechanism, effect of τ, X_0 and C. Each writes its table and figure."""

from ._caps import caps_study as caps_study
from ._defaults import defaults_study as defaults_study
from ._effects import effects_study as effects_study
from ._exponential import exponential_study as exponential_study
from ._mechanisms import mechanisms_study as mechanisms_study
from ._norms import norms_study as norms_study
