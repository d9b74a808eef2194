"""Searches that pay for themselves: of a table or a training function, in one process or in several on one storage.

Imports `accounting`, `engine`, `noise`, `sampling` and `tabular`; imported by `cli`.
"""

from __future__ import annotations

from weightclip.search._function import FunctionSearch as FunctionSearch
from weightclip.search._function import SearchRun as SearchRun
from weightclip.search._function import load_function as load_function
from weightclip.search._function import network_card as network_card
from weightclip.search._place import Place as Place
from weightclip.search._shared import Shared as Shared
from weightclip.search._shared import shared_search as shared_search
from weightclip.search._storage import SearchOver as SearchOver
from weightclip.search._storage import SharedBoard as SharedBoard
from weightclip.search._table import TableSearch as TableSearch
