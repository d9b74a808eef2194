"""Several processes that train one model: what they must agree on, one sum, one charge, one release for all.

Imports `accounting`; used by `engine` and `tabular`.
"""

from __future__ import annotations

from weightclip.distributed._ledger import SharedLedger as SharedLedger
from weightclip.distributed._parallel import refuse_parallel as refuse_parallel
from weightclip.distributed._ranks import ManyRanks as ManyRanks
from weightclip.distributed._ranks import Ranks as Ranks
from weightclip.distributed._ranks import find_ranks as find_ranks
