"""Text: SST-2 with a pretrained sentence encoder, from a head on frozen features to fine-tuning all of it."""

from __future__ import annotations

from ._canaries import Canaries as Canaries
from ._data import Sentences as Sentences
from ._data import load_sst2 as load_sst2
from ._figure import figure as figure
from ._jobs import Jobs as Jobs
from ._jobs import write as write
from ._networks import Full as Full
from ._networks import Head as Head
from ._networks import Last as Last
from ._networks import Lora as Lora
from ._networks import Part as Part
from ._networks import PlainLora as PlainLora
from ._networks import Thawed as Thawed
from ._plan import Audit as Audit
from ._plan import Recipes as Recipes
from ._plan import Rows as Rows
from ._plan import Stage as Stage
from ._plan import Timing as Timing
from ._plan import calibrate as calibrate
from ._plan import plan as plan
from ._plan import timings as timings
from ._prepared import SPLITS as SPLITS
from ._prepared import Prepared as Prepared
from ._prepared import prepare as prepare
from ._recipes import RECIPES as RECIPES
from ._recipes import recipe_row as recipe_row
from ._recipes import recipes_of as recipes_of
from ._recipes import write_recipes as write_recipes
from ._report import write_page as write_page
from ._runner import Runner as Runner
from ._settings import METHODS as METHODS
from ._settings import Recipe as Recipe
from ._settings import Settings as Settings
from ._study import Study as Study
from ._study import Trial as Trial
from ._training import Run as Run
