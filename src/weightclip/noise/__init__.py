"""Streams of randomness, allocation over layers, mechanisms and the release: the only place that adds noise.

Imports `accounting`, `bounds`, `certificate`, `distributed`, `factors` and `losses`; imported by `audit`, `cli`,
`engine`, `sampling`, `search`, `tabular` and `text`.
"""

from __future__ import annotations

from weightclip.noise._adaptive import Quantiles as Quantiles
from weightclip.noise._knorm import Entrywise as Entrywise
from weightclip.noise._knorm import KNorm as KNorm
from weightclip.noise._knorm import calibrate_epsilon0 as calibrate_epsilon0
from weightclip.noise._knorm import spread as spread
from weightclip.noise._mechanisms import AdamAware as AdamAware
from weightclip.noise._mechanisms import Allocation as Allocation
from weightclip.noise._mechanisms import Equal as Equal
from weightclip.noise._mechanisms import Global as Global
from weightclip.noise._mechanisms import KNormMechanism as KNormMechanism
from weightclip.noise._mechanisms import LeastVariance as LeastVariance
from weightclip.noise._mechanisms import Weighted as Weighted
from weightclip.noise._mechanisms import combine as combine
from weightclip.noise._mechanisms import floored as floored
from weightclip.noise._mechanisms import floored_at as floored_at
from weightclip.noise._mechanisms import joint_multiplier as joint_multiplier
from weightclip.noise._mechanisms import quantile_adjusted_sigma as quantile_adjusted_sigma
from weightclip.noise._mechanisms import round_release_ as round_release_
from weightclip.noise._mechanisms import rounded_sensitivity as rounded_sensitivity
from weightclip.noise._release import GridSums as GridSums
from weightclip.noise._release import Release as Release
from weightclip.noise._release import sum_slack as sum_slack
from weightclip.noise._sharded import ShardedRelease as ShardedRelease
from weightclip.noise._streams import NOISE as NOISE
from weightclip.noise._streams import SAMPLING as SAMPLING
from weightclip.noise._streams import Streams as Streams
from weightclip.noise._streams import fill_normal_ as fill_normal_
from weightclip.noise._streams import philox as philox
