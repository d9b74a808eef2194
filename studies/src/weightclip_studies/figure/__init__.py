"""The paper's accuracy figure on the paper's networks: every method, chosen on validation, tested once.

Imports `images` (records, augmentation, noise); used by the command line alone.
"""

from __future__ import annotations

from weightclip_studies.figure._audit import audit as audit
from weightclip_studies.figure._driver import Figure as Figure
from weightclip_studies.figure._pace import BATCHES as BATCHES
from weightclip_studies.figure._pace import PACE_MODES as PACE_MODES
from weightclip_studies.figure._pace import SUBJECTS as SUBJECTS
from weightclip_studies.figure._pace import Pace as Pace
from weightclip_studies.figure._page import draw as draw
from weightclip_studies.figure._page import page as page
from weightclip_studies.figure._page import table as table
from weightclip_studies.figure._plan import ABLATIONS as ABLATIONS
from weightclip_studies.figure._plan import EPSILONS as EPSILONS
from weightclip_studies.figure._plan import Cell as Cell
from weightclip_studies.figure._plan import ablations as ablations
from weightclip_studies.figure._plan import cells as cells
from weightclip_studies.figure._plan import settle as settle
from weightclip_studies.figure._plan import steps_within as steps_within
from weightclip_studies.figure._recipe import METHODS as METHODS
from weightclip_studies.figure._recipe import Recipe as Recipe
from weightclip_studies.figure._rows import ROWS_FILE as ROWS_FILE
from weightclip_studies.figure._rows import read_rows as read_rows
from weightclip_studies.figure._train import train as train
