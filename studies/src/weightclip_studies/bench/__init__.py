"""Step time and memory of ordinary training, of weightclip and of other libraries, interleaved in one process."""

from __future__ import annotations

from weightclip_studies.bench._models import models as models
from weightclip_studies.bench._others import OTHERS as OTHERS
from weightclip_studies.bench._others import installed as installed
from weightclip_studies.bench._rows import COLUMNS as COLUMNS
from weightclip_studies.bench._rows import GRAPHED as GRAPHED
from weightclip_studies.bench._rows import MODES as MODES
from weightclip_studies.bench._rows import StepRow as StepRow
from weightclip_studies.bench._rows import file_of as file_of
from weightclip_studies.bench._rows import plot as plot
from weightclip_studies.bench._rows import read_csv as read_csv
from weightclip_studies.bench._rows import write_csv as write_csv
from weightclip_studies.bench._step import PRECISIONS as PRECISIONS
from weightclip_studies.bench._step import Setting as Setting
from weightclip_studies.bench._step import bounds_of as bounds_of
from weightclip_studies.bench._step import endless_steps as endless_steps
from weightclip_studies.bench._step import measure as measure
from weightclip_studies.bench._step import precision as precision
from weightclip_studies.bench._step import prepare as prepare
