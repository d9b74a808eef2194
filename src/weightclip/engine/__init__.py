"""PrivacyEngine and its one step: admit, limits, collect, charge, release; checkpoint and report.

Imports `accounting`, `certificate`, `distributed`, `factors`, `losses`, `noise` and `sampling`; imported by `audit`,
`cli`, `integrations`, `search`, `tabular` and `text`.
"""

from __future__ import annotations

from weightclip.engine._card import model_card as model_card
from weightclip.engine._card import one_line as one_line
from weightclip.engine._compatible import explain as explain
from weightclip.engine._compatible import make_compatible as make_compatible
from weightclip.engine._engine import PrivacyEngine as PrivacyEngine
from weightclip.engine._engine import engine_of as engine_of
from weightclip.engine._report import version_of_package as version_of_package
from weightclip.engine._statement import FORMAT as FORMAT
from weightclip.engine._statement import check_format as check_format
from weightclip.engine._statement import nist_answers as nist_answers
from weightclip.engine._statement import registry_entry as registry_entry
