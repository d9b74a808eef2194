"""Several processes that train one model: what they must agree on, one sum, one charge, one release for all.

Imports `accounting`; imported by `engine`, `integrations`, `noise` and `tabular`.
"""

from __future__ import annotations

from weightclip.distributed._ranks import ManyRanks as ManyRanks
from weightclip.distributed._ranks import Ranks as Ranks
from weightclip.distributed._ranks import SharedLedger as SharedLedger
from weightclip.distributed._ranks import find_ranks as find_ranks
from weightclip.distributed._shards import Rows as Rows
from weightclip.distributed._shards import Shards as Shards
from weightclip.distributed._shards import find_shards as find_shards
from weightclip.distributed._shards import refuse_parallel as refuse_parallel
